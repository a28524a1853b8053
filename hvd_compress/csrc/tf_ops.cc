// TensorFlow's ops over a session: one encodes a gradient together with its residual, one joins the messages of a bucket, one
// reads what all ranks sent, one decodes. They run on TensorFlow's own threads and see the kernels through session.h alone.
//
//   gradients --Encode--> messages --Pack--> [Horovod's allgather] --Unpack--> places --Decode--> gradients
//
// Encode is in tf_encode.cc; between Pack and the allgather, tf_scatter.cc has what a scatter-gather does first.
//
// A gradient that Horovod's own allreduce carries passes through Arrive before and Finish after it, since it belongs to the
// step like the others.
//
// All are stateful, since TensorFlow must neither drop one nor run it once for all steps. In a tf.function that puts ops which
// touch the same resource, or none, one behind the other: hence each takes the `state` of its member, and a bucket's the residual
// of its first one, so that only those wait for each other that must.
#include <map>
#include <set>

#include "message.h"
#include "scatter.h"
#include "stand_in.h"
#include "tf_ops.h"

namespace hvd_compress {
namespace {

constexpr int kPlace = 4;  // numbers of a place, see HvdCompressUnpack

REGISTER_OP("HvdCompressPack")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
    .Attr("scattered: bool")
    .Attr("N: int >= 1")
    .Input("residual: resource")
    .Input("messages: N * uint8")
    .Output("message: uint8")
    .SetIsStateful()
    .SetShapeFn(vectors)
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

class PackOp final : public SessionOp {
 public:
  explicit PackOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("scattered", &scattered_));
  }

 private:
  void run(OpKernelContext* context) override {
    auto deferred = session_->take_deferred(group_, bucket_);
    if (context->num_inputs() == 2 && deferred.empty()) {
      context->set_output(0, context->input(1));
    } else {
      context->set_output(0, joined(context, deferred));
    }
    const auto first = read_messages(context->input(1).flat<uint8_t>().data(),
                                     static_cast<size_t>(context->input(1).NumElements()), 1)[0];
    session_->sent(group_, bucket_, first.entries[0].index, scattered_);
  }

  Tensor joined(OpKernelContext* context, const std::map<int64_t, Deferred>& deferred) {
    size_t capacity = kHeaderBytes + 1;
    for (int i = 1; i < context->num_inputs(); ++i) capacity += context->input(i).NumElements();
    std::set<Scope*> chosen;
    for (const auto& [member, each] : deferred) {
      capacity += each.room;
      if (chosen.insert(each.scope.get()).second) each.scope->choose(session_->task(group_, member).measured);
    }
    Tensor message = allocate(context, tensorflow::DT_UINT8, static_cast<int64_t>(capacity));
    uint8_t* out = message.flat<uint8_t>().data();
    size_t end = kHeaderBytes;
    Head head;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      const uint8_t* data = input.flat<uint8_t>().data();
      const auto one = read_messages(data, static_cast<size_t>(input.NumElements()), 1);
      const uint32_t flags = head.flags | one[0].flags;
      if (i == 1) head = one[0];
      head.flags = flags;
      const int64_t member = one[0].entries[0].index;
      const auto later = deferred.find(member);
      size_t bytes = one[0].entries[0].bytes;
      if (later != deferred.end()) {
        const auto start = std::chrono::steady_clock::now();
        const Encoded encoded = later->second.encode(out + end + kEntryBytes);
        bytes = encoded.bytes;
        session_->encoded_now(group_, member, encoded, scattered_, seconds_since(start));
      } else {
        const uint8_t* payload = data + one[0].entries[0].offset;
        std::copy(payload, payload + bytes, out + end + kEntryBytes);
      }
      write_entry(out + end, static_cast<uint32_t>(member), bytes);
      end += kEntryBytes + bytes;
    }
    return message.Slice(0, static_cast<int64_t>(finish_message(out, end, head)));
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
    const bool dense = context->input(5).scalar<bool>()();
    if (dense) {
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
    session_->finished(group_, member_, !dense || is_finite(*result), seconds_since(start));
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
    const auto codec = session_->codec(group_, member_);
    std::vector<Bytes> payloads;
    int64_t done = 0;  // elements of the pieces so far, which stand one behind the other
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t at = places(row_, rank, 0), bytes = places(row_, rank, 1), begin = places(row_, rank, 2);
      if (bytes == 0) continue;
      payloads.emplace_back(data + at, static_cast<size_t>(bytes));
      if (!scattered_) continue;
      const int64_t count = places(row_, rank, 3);
      if (begin < done || begin + count > n) {
        throw std::runtime_error("the gradient has " + std::to_string(n) + " elements, its variable more");
      }
      std::fill(out + done, out + begin, 0.0f);
      decode_sum(*codec, payloads, static_cast<float>(weight), out + begin, static_cast<size_t>(count));
      payloads.clear();
      done = begin + count;
    }
    decode_sum(*codec, payloads, static_cast<float>(weight), out + done, static_cast<size_t>(n - done));
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
