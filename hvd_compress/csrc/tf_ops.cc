// TensorFlow's ops over a session: one encodes a gradient together with its residual, one joins the messages of a bucket, one
// reads what all ranks sent, one decodes. They run on TensorFlow's own threads and see the kernels through session.h alone.
//
//   gradients --Encode--> messages --Pack--> [Horovod's allgather] --Unpack--> places --Decode--> gradients
//
// Between Pack and the allgather, tf_scatter.cc has what a scatter-gather does first.
//
// A gradient that Horovod's own allreduce carries passes through Arrive before and Finish after it, since it belongs to the
// step like the others.
//
// All are stateful, since TensorFlow must neither drop one nor run it once for all steps. In a tf.function that puts ops which
// touch the same resource, or none, one behind the other: hence each takes the `state` of its member, and a bucket's the residual
// of its first one, so that only those wait for each other that must.
#include "message.h"
#include "random.h"
#include "scatter.h"
#include "stand_in.h"
#include "tf_ops.h"

namespace hvd_compress {
namespace {

constexpr int kPlace = 4;  // numbers of a place, see HvdCompressUnpack

REGISTER_OP("HvdCompressEncode")
    .HVD_MEMBER_ATTRS.Attr("scattered_bucket: int")
    .Attr("M: int >= 0")
    .Attr("N: int >= 0")
    .Input("grad: T")
    .Input("residual: resource")
    .Input("piece_residual: resource")
    .HVD_STATE_INPUT.Input("world: int32")
    .Input("scale: float")
    .Input("dense: bool")
    .Input("weights: float")
    .Input("momentum: M * resource")
    .Input("variable: N * resource")
    .Output("message: uint8")
    .Output("stand_in: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Encodes a gradient together with its residual, as a message of one segment.

grad: Any shape, n elements.
residual: A float32 variable of n elements, or of none where there is no residual yet; replaced by what was lost.
piece_residual: Another one, of the own piece in a scatter-gather; added to the residual where that is another piece now.
state: A float64 variable of 3 elements: how many times this was encoded, the loss scale that both residuals are in, and the
  first element of the piece.
world: The own rank and the number of ranks.
scale: Of the loss.
dense: Whether Horovod's own allreduce carries the gradient in this step, and the message has nothing to add.
weights: Of the gradient and of the momentum; where there is none, of no meaning.
momentum: A float32 variable of n elements, which the gradient is averaged with before it is encoded. It is not touched.
variable: What it is the gradient of, to notice a second model. It is not touched.
message: Its bytes.
stand_in: What Horovod's own allreduce gets, see stand_in.h, or the gradient (float32, flat). Not a constant of the graph, since
  Horovod's ops are not stateful: TensorFlow's optimizer would run the allreduce of a constant once, when it folds constants,
  and never again.
)doc");

REGISTER_OP("HvdCompressPack")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
    .Attr("scattered: bool")
    .Attr("N: int >= 1")
    .Input("residual: resource")
    .Input("messages: N * uint8")
    .Output("message: uint8")
    .SetIsStateful()
    .SetShapeFn(vector_of_bytes)
    .Doc("Joins a bucket's messages of one segment into one of all.");

REGISTER_OP("HvdCompressUnpack")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
    .Attr("members: list(int)")
    .Attr("scattered: bool")
    .Input("residual: resource")
    .Input("gathered: uint8")
    .Output("places: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->MakeShape({InferenceContext::kUnknownDim, InferenceContext::kUnknownDim, kPlace}));
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Checks the messages of all ranks, which stand one behind the other.

gathered: Their bytes.
scattered: Whether each rank's message is of its chunk, encoded again.
places: Of each member of the bucket and each rank, where its payload begins and how long it is, and of which of the member's
  elements: the first one, and how many, where that is not all.
)doc");

REGISTER_OP("HvdCompressDecode")
    .HVD_MEMBER_ATTRS.Attr("row: int")
    .Attr("scattered: bool")
    .HVD_STATE_INPUT.Input("gathered: uint8")
    .Input("places: int64")
    .Input("stand_in: float")
    .Input("grad: T")
    .Input("dense: bool")
    .Output("result: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return like_input(c, 4); })
    .Doc(R"doc(
Adds up what the payloads of all ranks decode to.

gathered: The messages.
places: From Unpack; its row `row` is this member's.
stand_in: What Horovod's allreduce made of the stand-ins.
dense: As for Encode: then the stand-in is the result.
grad: What was encoded; its memory is used for the result where nobody else needs it.
result: The mean, or the sum, in the gradient's shape.
)doc");

REGISTER_OP("HvdCompressArrive")
    .HVD_MEMBER_ATTRS.Attr("reduced_size: int")
    .HVD_STATE_INPUT.Input("grad: T")
    .Output("same: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return like_input(c, 1); })
    .Doc("Notes that a gradient is there that Horovod's own allreduce carries, with so many bytes an element.");

REGISTER_OP("HvdCompressFinish")
    .HVD_MEMBER_ATTRS.Attr("check: bool")
    .HVD_STATE_INPUT.Input("grad: T")
    .Output("same: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return like_input(c, 1); })
    .Doc("Notes that Horovod's own allreduce is done, and where it is to check that, whether the result is finite.");

}  // namespace

FindSession find_session = nullptr;

namespace {

class EncodeOp final : public MemberOp {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scattered_bucket", &scattered_bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("M", &momenta_));
  }

 private:
  static constexpr int kMomentum = 8;  // the first input that is one

  void run(OpKernelContext* context) override {
    const Tensor& grad = context->input(0);
    const auto world = context->input(4).flat<int32_t>();
    OP_REQUIRES(context, world.size() == 2, InvalidArgument("world has ", world.size(), " elements, not 2"));
    const float scale = context->input(5).scalar<float>()();
    const bool dense = context->input(6).scalar<bool>()();
    const int variable_input = kMomentum + momenta_;
    const std::string variable =
        context->num_inputs() > variable_input ? tensorflow::HandleFromInput(context, variable_input).container() + "/" +
                                                     tensorflow::HandleFromInput(context, variable_input).name()
                                               : "";
    const Task task = session_->arrive(group_, member_, variable);

    const auto start = std::chrono::steady_clock::now();
    const int64_t n = grad.NumElements();
    const size_t begin = kHeaderBytes + kEntryBytes;
    const size_t capacity = begin + (dense ? 0 : task.codec->max_payload(static_cast<size_t>(n))) + 1;
    Tensor message = allocate(context, tensorflow::DT_UINT8, static_cast<int64_t>(capacity));
    uint8_t* out = message.flat<uint8_t>().data();

    RefVar state_variable = variable_of(context, 3, tensorflow::DT_DOUBLE);
    const mutex_lock state_lock(*state_variable->mu());
    State state = State::read(state_variable.get());
    const auto ratio = static_cast<float>(scale / state.scale);
    ++state.encodings;
    state.scale = scale;
    state.write(context, state_variable.get());
    const auto step = static_cast<uint64_t>(state.encodings);

    Encoded encoded;
    std::function<void()> undo;
    if (!dense) {
      const uint64_t seed =
          mix_seed(task.seed, static_cast<uint64_t>(world(0)), step, static_cast<uint64_t>(task.segment));
      RefVar residual = variable_of(context, 1, tensorflow::DT_FLOAT);
      const mutex_lock lock(*residual->mu());
      prepare(context, task, residual.get(), n, ratio, static_cast<int64_t>(state.piece_begin));
      bool changed = true;
      encoded = encode(context, task, grad, residual.get(), seed, out + begin, &changed);
      if (changed) undo = undo_of(std::move(residual), kept_of(session_, task.segment)->gradient);
    }
    write_entry(out + kHeaderBytes, static_cast<uint32_t>(member_), encoded.bytes);
    const size_t length = finish_message(out, begin + encoded.bytes, encoded.finite ? 0 : kNonFinite, task.digest, step);
    context->set_output(0, message.Slice(0, static_cast<int64_t>(length)));  // the same memory
    if (!dense) {
      Tensor* stand_in;
      OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({kStandIn}), &stand_in));
      make_stand_in(world(0), world(1), task.digest, stand_in->flat<float>().data());
      session_->encoded(group_, member_, encoded, scattered_bucket_ >= 0, grad.TotalBytes(), seconds_since(start),
                        std::move(undo));
    } else {
      set_dense_output(context, grad);
      session_->reduced(group_, member_, grad.TotalBytes(), static_cast<size_t>(n) * sizeof(float));
    }
  }

  static void set_dense_output(OpKernelContext* context, const Tensor& grad) {
    Tensor flat;
    if (grad.dtype() == tensorflow::DT_FLOAT) {
      OP_REQUIRES(context, flat.CopyFrom(grad, TensorShape({grad.NumElements()})), InvalidArgument("no such shape"));
    } else {
      flat = allocate(context, tensorflow::DT_FLOAT, grad.NumElements());
      Tensor gradient = grad;
      visit_elements(&gradient, [&](auto elements) { flat.flat<float>() = elements.template cast<float>(); });
    }
    context->set_output(1, flat);
  }

  // Brings the residuals to the scale of the loss, and the piece's into the gradient's where that is another piece now.
  void prepare(OpKernelContext* context, const Task& task, Var* residual, int64_t n, float ratio, int64_t piece_begin) {
    RefVar piece = variable_of(context, 2, tensorflow::DT_FLOAT);
    const mutex_lock lock(*piece->mu());
    const int64_t had = floats_of(residual), piece_n = floats_of(piece.get());
    if ((had != 0 && had != n) || piece_begin < 0 || piece_begin + piece_n > n) {
      throw std::runtime_error("the residual has " + std::to_string(std::max(had, piece_begin + piece_n)) +
                               " elements, the gradient " + std::to_string(n) +
                               ": it was restored from a checkpoint of another model");
    }
    for (Tensor* each : {residual->tensor(), piece->tensor()}) {
      if (ratio == 1.0f || each->NumElements() == 0 || each->dtype() != tensorflow::DT_FLOAT) continue;
      make_own(context, each);
      each->flat<float>() = each->flat<float>() * ratio;
    }
    const auto world = context->input(4).flat<int32_t>();
    if (piece_n == 0 || (task.has_residual && is_piece(world(0), world(1), piece_begin, piece_n))) return;
    if (had == 0) {
      *residual->tensor() = allocate(context, tensorflow::DT_FLOAT, n);
      residual->tensor()->flat<float>().setZero();
      residual->is_initialized = true;
    }
    make_own(context, residual->tensor());
    float* into = residual->tensor()->flat<float>().data() + piece_begin;
    const float* from = piece->tensor()->flat<float>().data();
    for (int64_t i = 0; i < piece_n; ++i) into[i] += static_cast<float>(world(1)) * from[i];  // it is of the mean
    *piece->tensor() = Tensor(tensorflow::DT_FLOAT, TensorShape({0}));
  }

  bool is_piece(int32_t rank, int32_t ranks, int64_t begin, int64_t n) {
    if (scattered_bucket_ < 0) return false;
    const auto chunks = session_->chunks(group_, scattered_bucket_, static_cast<size_t>(ranks));
    for (const Piece& piece : chunks->pieces(static_cast<size_t>(rank))) {
      if (piece.index == member_) return static_cast<int64_t>(piece.begin) == begin && static_cast<int64_t>(piece.end) == begin + n;
    }
    return false;
  }

  Encoded encode(OpKernelContext* context, const Task& task, const Tensor& grad, Var* residual, uint64_t seed, uint8_t* out,
                 bool* changed) {
    const auto n = static_cast<size_t>(grad.NumElements());
    Gradient gradient{grad.data(), dtype_of(grad.dtype())};
    Tensor momentum;  // keeps the memory
    if (momenta_ > 0) {
      RefVar variable = variable_of(context, kMomentum, tensorflow::DT_FLOAT);
      const tensorflow::tf_shared_lock lock(*variable->mu());
      momentum = *variable->tensor();
      if (momentum.dtype() != tensorflow::DT_FLOAT || momentum.NumElements() != grad.NumElements()) {
        throw std::runtime_error("a momentum of " + std::to_string(momentum.NumElements()) + " " +
                                 tensorflow::DataTypeString(momentum.dtype()) + " for " + std::to_string(n) +
                                 " elements: it takes as many float32");
      }
      const auto weights = context->input(7).flat<float>();
      if (weights.size() != 2) throw std::runtime_error("weights has " + std::to_string(weights.size()) + " elements, not 2");
      gradient.momentum = momentum.flat<float>().data();
      gradient.weight = weights(0);
      gradient.momentum_weight = weights(1);
    }
    if (!task.has_residual && floats_of(residual) == 0) {
      *changed = false;
      return task.codec->encode(gradient, nullptr, nullptr, n, seed, out);
    }
    Before* before = kept_of(session_, task.segment)->gradient.get();
    if (task.has_residual) {
      return encode_with(context, residual, before, static_cast<int64_t>(n), [&](const float* in, float* left) {
        return task.codec->encode(gradient, in, left, n, seed, out);
      });
    }
    // What a codec before has left is sent.
    Tensor sum = own_floats(context, std::move(before->residual), static_cast<int64_t>(n));
    Tensor floats = grad;
    visit_elements(&floats, [&](auto elements) {
      sum.flat<float>() = elements.template cast<float>() * gradient.weight + residual->tensor()->flat<float>();
    });
    gradient.data = sum.data();
    gradient.dtype = DType::kFloat32;
    gradient.weight = 1;
    const Encoded encoded = task.codec->encode(gradient, nullptr, nullptr, n, seed, out);
    before->residual = *residual->tensor();
    *residual->tensor() = Tensor(tensorflow::DT_FLOAT, TensorShape({0}));
    return encoded;
  }

  int64_t scattered_bucket_ = -1;
  int momenta_ = 0;
};

class PackOp final : public SessionOp {
 public:
  explicit PackOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("scattered", &scattered_));
  }

 private:
  void run(OpKernelContext* context) override {
    if (context->num_inputs() == 2) {
      context->set_output(0, context->input(1));
    } else {
      context->set_output(0, joined(context));
    }
    const auto first = read_messages(context->input(1).flat<uint8_t>().data(),
                                     static_cast<size_t>(context->input(1).NumElements()), 1)[0];
    session_->sent(group_, bucket_, first.entries[0].index, scattered_);
  }

  static Tensor joined(OpKernelContext* context) {
    size_t capacity = kHeaderBytes + 1;
    for (int i = 1; i < context->num_inputs(); ++i) capacity += context->input(i).NumElements();
    Tensor message = allocate(context, tensorflow::DT_UINT8, static_cast<int64_t>(capacity));
    uint8_t* out = message.flat<uint8_t>().data();
    size_t end = kHeaderBytes;
    uint32_t flags = 0;
    uint64_t digest = 0, step = 0;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      const uint8_t* data = input.flat<uint8_t>().data();
      const auto one = read_messages(data, static_cast<size_t>(input.NumElements()), 1);
      const size_t bytes = one[0].entries[0].bytes + kEntryBytes;
      std::copy(data + kHeaderBytes, data + kHeaderBytes + bytes, out + end);
      end += bytes;
      flags |= one[0].flags;
      digest = one[0].digest;
      if (i == 1) step = one[0].step;
    }
    return message.Slice(0, static_cast<int64_t>(finish_message(out, end, flags, digest, step)));
  }

  int64_t bucket_ = -1;
  bool scattered_ = false;
};

class UnpackOp final : public SessionOp {
 public:
  explicit UnpackOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("members", &members_));
    OP_REQUIRES_OK(context, context->GetAttr("scattered", &scattered_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& gathered = context->input(1);
    const auto messages = session_->received(group_, bucket_, gathered.flat<uint8_t>().data(),
                                             static_cast<size_t>(gathered.NumElements()));
    const auto ranks = static_cast<int64_t>(messages.size());
    const auto count = static_cast<int64_t>(members_.size());
    Tensor* places;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count, ranks, kPlace}), &places));
    auto out = places->tensor<int64_t, 3>();
    out.setZero();
    const auto chunks = scattered_ ? session_->chunks(group_, bucket_, messages.size()) : nullptr;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto& entries = messages[rank].entries;
      const size_t expected = scattered_ ? chunks->pieces(static_cast<size_t>(rank)).size() : members_.size();
      bool same = entries.size() == expected;
      for (size_t i = 0, row = 0; same && i < expected; ++i, ++row) {
        const Piece piece = scattered_ ? chunks->pieces(static_cast<size_t>(rank))[i]
                                       : Piece{static_cast<uint32_t>(members_[i]), 0, 0};  // all of it
        while (members_[row] != piece.index) ++row;
        same = entries[i].index == piece.index;
        const int64_t place[kPlace] = {static_cast<int64_t>(entries[i].offset), static_cast<int64_t>(entries[i].bytes),
                                       static_cast<int64_t>(piece.begin), static_cast<int64_t>(piece.end - piece.begin)};
        for (int k = 0; k < kPlace; ++k) out(static_cast<int64_t>(row), rank, k) = place[k];
      }
      OP_REQUIRES(context, same, InvalidArgument("rank ", rank, "'s message has other segments than this rank's"));
    }
  }

  int64_t bucket_ = -1;
  std::vector<int64_t> members_;
  bool scattered_ = false;
};

class DecodeOp final : public MemberOp {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("row", &row_));
    OP_REQUIRES_OK(context, context->GetAttr("scattered", &scattered_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& grad = context->input(4);
    const int64_t n = grad.NumElements();
    const auto start = std::chrono::steady_clock::now();
    Tensor* result;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({4}, 0, grad.shape(), &result));
    Tensor total;
    if (context->input(5).scalar<bool>()()) {
      total = context->input(3);
      OP_REQUIRES(context, total.NumElements() == n,
                  InvalidArgument("a dense result of ", total.NumElements(), " elements for a gradient of ", n));
    } else {
      total = grad.dtype() == tensorflow::DT_FLOAT ? *result : allocate(context, tensorflow::DT_FLOAT, n);
      decode(context, total.flat<float>().data(), n);
    }
    if (total.data() != result->data()) {
      visit_elements(result, [&](auto elements) {
        using Element = typename decltype(elements)::Scalar;
        elements = total.flat<float>().template cast<Element>();
      });
    }
    session_->finished(group_, member_, true, seconds_since(start));
  }

  void decode(OpKernelContext* context, float* out, int64_t n) {
    const uint8_t* data = context->input(1).flat<uint8_t>().data();
    const auto places = context->input(2).tensor<int64_t, 3>();
    const auto stand_in = context->input(3).flat<float>();
    const int64_t ranks = places.dimension(1);
    if (stand_in.size() != kStandIn) {
      throw std::runtime_error("the stand-in has " + std::to_string(stand_in.size()) + " elements, not " +
                               std::to_string(kStandIn));
    }
    double weight = stand_in_factor(stand_in.data(), ranks);
    if (!scattered_) weight /= static_cast<double>(ranks);
    std::fill(out, out + n, 0.0f);
    const auto codec = session_->codec(group_, member_);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t at = places(row_, rank, 0), bytes = places(row_, rank, 1), begin = places(row_, rank, 2);
      if (bytes == 0) continue;
      const int64_t count = scattered_ ? places(row_, rank, 3) : n;
      if (begin + count > n) throw std::runtime_error("the gradient has " + std::to_string(n) + " elements, its variable more");
      codec->decode_add(data + at, static_cast<size_t>(bytes), static_cast<float>(weight), out + begin,
                        static_cast<size_t>(count));
    }
  }

  int64_t row_ = -1;
  bool scattered_ = false;
};

class ArriveOp final : public MemberOp {
 public:
  explicit ArriveOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("reduced_size", &reduced_size_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& grad = context->input(1);
    session_->arrive(group_, member_, "");
    session_->reduced(group_, member_, grad.TotalBytes(), static_cast<size_t>(grad.NumElements() * reduced_size_));
    context->set_output(0, grad);
  }

  int64_t reduced_size_ = 0;
};

class FinishOp final : public MemberOp {
 public:
  explicit FinishOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("check", &check_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& grad = context->input(1);
    session_->finished(group_, member_, !check_ || is_finite(grad), 0);
    context->set_output(0, grad);
  }

  bool check_ = true;
};

REGISTER_KERNEL_BUILDER(Name("HvdCompressEncode").Device(DEVICE_CPU), EncodeOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressPack").Device(DEVICE_CPU), PackOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressUnpack").Device(DEVICE_CPU), UnpackOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressDecode").Device(DEVICE_CPU), DecodeOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressArrive").Device(DEVICE_CPU), ArriveOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressFinish").Device(DEVICE_CPU), FinishOp);

}  // namespace
}  // namespace hvd_compress

// Connects the ops with the kernels' library: `find` looks a session up. Returns what this library was built for, which must
// be the kernels' SESSION_VERSION.
extern "C" __attribute__((visibility("default"))) int64_t hvd_compress_connect(hvd_compress::FindSession find) {
  hvd_compress::find_session = find;
  return hvd_compress::kSessionVersion;
}
