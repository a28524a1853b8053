// TensorFlow's op that encodes a gradient together with its residual; see tf_ops.cc.
#include "message.h"
#include "random.h"
#include "scatter.h"
#include "stand_in.h"
#include "tf_ops.h"

namespace hvd_compress {
namespace {

REGISTER_OP("HvdCompressEncode")
    .HVD_MEMBER_ATTRS.Attr("bucket: int")
    .Attr("scattered: bool")
    .Attr("M: int >= 0")
    .Attr("N: int >= 0")
    .Input("grad: T")
    .Input("residual: resource")
    .Input("piece_residual: resource")
    .HVD_STATE_INPUT.Input("world: int32")
    .Input("scale: float")
    .Input("dense: bool")
    .Input("weights: float")
    .Input("momentum: M * float")
    .Input("variable: N * resource")
    .Output("message: uint8")
    .Output("stand_in: float")
    .SetIsStateful()
    .SetShapeFn(vectors)
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
momentum: n elements, which the gradient is averaged with before it is encoded; not looked at where it is dense.
variable: What it is the gradient of, to notice a second model. It is not touched.
message: Its bytes; where the codec chooses for all of the bucket, without a payload yet.
stand_in: What Horovod's own allreduce gets, see stand_in.h, or the gradient (float32, flat). Not a constant of the graph, since
  Horovod's ops are not stateful: TensorFlow's optimizer would run the allreduce of a constant once, when it folds constants,
  and never again.
)doc");

class EncodeOp final : public MemberOp {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("scattered", &scattered_));
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
    const std::shared_ptr<Scope> scope = dense ? nullptr : session_->scope(group_, bucket_, *task.codec);
    const size_t room = dense ? 0 : task.codec->max_payload(static_cast<size_t>(n));
    const size_t capacity = begin + (scope == nullptr ? room : 0) + 1;
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
      const auto rank = static_cast<uint64_t>(task.codec->shares_seed() ? 0 : world(0));
      Step now = task.measured;
      now.seed = mix_seed(task.seed, rank, step, static_cast<uint64_t>(task.segment));
      const std::shared_ptr<Var> residual = shared(variable_of(context, 1, tensorflow::DT_FLOAT));
      const mutex_lock lock(*residual->mu());
      prepare(context, task, residual.get(), n, ratio, static_cast<int64_t>(state.piece_begin));
      const auto size = static_cast<size_t>(n);
      const auto write = [&](const Gradient& gradient, const float* in, float* left) {
        return task.codec->encode(gradient, in, left, size, now, out + begin);
      };
      const auto add = [&](const Gradient& gradient, const float* in, float* left) {
        Encoded added;
        added.finite = scope->add(static_cast<uint32_t>(member_), gradient, in, left, size);
        return added;
      };
      std::vector<Tensor> used;
      bool changed = true;
      encoded = scope == nullptr ? encode(context, task, grad, residual.get(), write, &used, &changed)
                                 : encode(context, task, grad, residual.get(), add, &used, &changed);
      if (changed) undo = undo_of(residual, kept_of(session_, task.segment)->gradient);
      if (scope != nullptr) {
        const auto later = [scope, residual, used, member = member_, seed = now.seed](uint8_t* payload) {
          const mutex_lock again(*residual->mu());
          return scope->encode(static_cast<uint32_t>(member), seed, payload);
        };
        session_->defer(group_, bucket_, {member_, scope, room, later});
      }
    }
    write_entry(out + kHeaderBytes, static_cast<uint32_t>(member_), encoded.bytes);
    const size_t length = finish_message(
        out, begin + encoded.bytes, {encoded.finite ? 0 : kNonFinite, task.digest, step, session_->seconds(group_, bucket_)});
    context->set_output(0, message.Slice(0, static_cast<int64_t>(length)));  // the same memory
    if (!dense) {
      Tensor* stand_in;
      OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({kStandIn}), &stand_in));
      make_stand_in(world(0), world(1), task.digest, stand_in->flat<float>().data());
      session_->encoded(group_, member_, encoded, scattered_, grad.TotalBytes(), seconds_since(start),
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
    if (!scattered_) return false;
    const auto chunks = session_->chunks(group_, bucket_, static_cast<size_t>(ranks));
    for (const Piece& piece : chunks->pieces(static_cast<size_t>(rank))) {
      if (piece.index == member_) return static_cast<int64_t>(piece.begin) == begin && static_cast<int64_t>(piece.end) == begin + n;
    }
    return false;
  }

  // Calls run(gradient, residual_in, residual_out). `used`: the memory that those are in.
  template <class Run>
  Encoded encode(OpKernelContext* context, const Task& task, const Tensor& grad, Var* residual, const Run& run,
                 std::vector<Tensor>* used, bool* changed) {
    const int64_t n = grad.NumElements();
    Gradient gradient{grad.data(), dtype_of(grad.dtype())};
    if (momenta_ > 0) {
      const Tensor& momentum = context->input(kMomentum);
      if (momentum.NumElements() != grad.NumElements()) {
        throw std::runtime_error("a momentum of " + std::to_string(momentum.NumElements()) + " elements for a gradient of " +
                                 std::to_string(n));
      }
      const auto weights = context->input(7).flat<float>();
      if (weights.size() != 2) throw std::runtime_error("weights has " + std::to_string(weights.size()) + " elements, not 2");
      used->push_back(momentum);
      gradient.momentum = momentum.flat<float>().data();
      gradient.weight = weights(0);
      gradient.momentum_weight = weights(1);
    }
    if (!task.has_residual && floats_of(residual) == 0) {
      *changed = false;
      used->push_back(grad);
      return run(gradient, nullptr, nullptr);
    }
    Before* before = kept_of(session_, task.segment)->gradient.get();
    if (task.has_residual) {
      const Encoded encoded =
          encode_with(context, residual, before, n, [&](const float* in, float* left) { return run(gradient, in, left); });
      used->push_back(*residual->tensor());
      return encoded;
    }
    // What a codec before has left is sent.
    Tensor sum = own_floats(context, std::move(before->residual), n);
    Tensor floats = grad;
    visit_elements(&floats, [&](auto elements) {
      sum.flat<float>() = elements.template cast<float>() * gradient.weight + residual->tensor()->flat<float>();
    });
    gradient.data = sum.data();
    gradient.dtype = DType::kFloat32;
    gradient.weight = 1;
    used->push_back(sum);
    const Encoded encoded = run(gradient, nullptr, nullptr);
    before->residual = *residual->tensor();
    *residual->tensor() = Tensor(tensorflow::DT_FLOAT, TensorShape({0}));
    return encoded;
  }

  int64_t bucket_ = -1;
  bool scattered_ = false;
  int momenta_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("HvdCompressEncode").Device(DEVICE_CPU), EncodeOp);

}  // namespace
}  // namespace hvd_compress
