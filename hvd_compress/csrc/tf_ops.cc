// TensorFlow's ops over a session: one encodes a gradient together with its residual, one joins the messages of a bucket, one
// reads what all ranks sent, one decodes. They run on TensorFlow's own threads and see the kernels through session.h alone.
//
//   gradients --Encode--> messages --Pack--> [Horovod's allgather] --Unpack--> places --Decode--> gradients
//
// A gradient that Horovod's own allreduce carries passes through Arrive before and Finish after it, since it belongs to the
// step like the others.
//
// All are stateful, since TensorFlow must neither drop one nor run it once for all steps. In a tf.function that puts ops which
// touch the same resource, or none, one behind the other: hence each takes the `state` of its member, and a bucket's the residual
// of its first one, so that only those wait for each other that must.
#include <atomic>
#include <chrono>

#include "message.h"
#include "random.h"
#include "session.h"
#include "stand_in.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::mutex_lock;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;
using RefVar = tensorflow::core::RefCountPtr<Var>;

#define HVD_SESSION_ATTRS Attr("session: int").Attr("group: int")
#define HVD_MEMBER_ATTRS HVD_SESSION_ATTRS.Attr("member: int").Attr("T: {half, bfloat16, float, double}")
#define HVD_STATE_INPUT Input("state: resource")

tensorflow::Status vector_of_bytes(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  return tensorflow::OkStatus();
}

tensorflow::Status like_input(InferenceContext* c, int input) {
  c->set_output(0, c->input(input));
  return tensorflow::OkStatus();
}

REGISTER_OP("HvdCompressEncode")
    .HVD_MEMBER_ATTRS.Attr("N: int >= 0")
    .Input("grad: T")
    .Input("residual: resource")
    .HVD_STATE_INPUT.Input("world: int32")
    .Input("scale: float")
    .Input("variable: N * resource")
    .Output("message: uint8")
    .Output("stand_in: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(kStandIn));
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Encodes a gradient together with its residual, as a message of one segment.

grad: Any shape, n elements.
residual: A float32 variable of n elements, or of none where there is no residual yet; replaced by what was lost.
state: A float64 variable of 2 elements: how many times this was encoded, and the loss scale that the residual is in.
world: The own rank and the number of ranks.
scale: Of the loss.
variable: What it is the gradient of, to notice a second model. It is not touched.
message: Its bytes.
stand_in: What Horovod's own allreduce gets, see stand_in.h. Not a constant of the graph, since Horovod's ops are not stateful:
  TensorFlow's optimizer would run the allreduce of a constant once, when it folds constants, and never again.
)doc");

REGISTER_OP("HvdCompressPack")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
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
    .Input("residual: resource")
    .Input("gathered: uint8")
    .Output("places: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->MakeShape({InferenceContext::kUnknownDim, InferenceContext::kUnknownDim, 2}));
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Checks the messages of all ranks, which stand one behind the other.

gathered: Their bytes.
places: Of each member of the bucket and each rank, where its payload begins and how long it is.
)doc");

REGISTER_OP("HvdCompressDecode")
    .HVD_MEMBER_ATTRS.Attr("row: int")
    .HVD_STATE_INPUT.Input("gathered: uint8")
    .Input("places: int64")
    .Input("stand_in: float")
    .Input("grad: T")
    .Output("result: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return like_input(c, 4); })
    .Doc(R"doc(
Adds up what the payloads of all ranks decode to.

gathered: The messages.
places: From Unpack; its row `row` is this member's.
stand_in: What Horovod's allreduce made of the stand-ins.
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

FindSession find_session = nullptr;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

DType dtype_of(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF: return DType::kFloat16;
    case tensorflow::DT_BFLOAT16: return DType::kBFloat16;
    case tensorflow::DT_DOUBLE: return DType::kFloat64;
    default: return DType::kFloat32;
  }
}

// Calls `visit` with the tensor's elements.
template <class Visit>
void visit_elements(Tensor* tensor, Visit visit) {
  switch (tensor->dtype()) {
    case tensorflow::DT_HALF: return visit(tensor->flat<Eigen::half>());
    case tensorflow::DT_BFLOAT16: return visit(tensor->flat<tensorflow::bfloat16>());
    case tensorflow::DT_DOUBLE: return visit(tensor->flat<double>());
    default: return visit(tensor->flat<float>());
  }
}

// Whether no exponent has all its bits set, as that of Inf and NaN has.
template <class Bits>
bool is_finite(const void* data, int64_t n, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(data);
  Bits special = 0;
  for (int64_t i = 0; i < n; ++i) special |= static_cast<Bits>((bits[i] & exponent) == exponent);
  return special == 0;
}

bool is_finite(const Tensor& tensor) {
  const int64_t n = tensor.NumElements();
  switch (tensor.dtype()) {
    case tensorflow::DT_HALF: return is_finite<uint16_t>(tensor.data(), n, 0x7c00u);
    case tensorflow::DT_BFLOAT16: return is_finite<uint16_t>(tensor.data(), n, 0x7f80u);
    case tensorflow::DT_DOUBLE: return is_finite<uint64_t>(tensor.data(), n, 0x7ff0000000000000u);
    default: return is_finite<uint32_t>(tensor.data(), n, 0x7f800000u);
  }
}

// What every op has: its session, its group, and exceptions that become statuses.
class SessionOp : public OpKernel {
 public:
  explicit SessionOp(OpKernelConstruction* context) : OpKernel(context) {
    int64_t number = -1;
    OP_REQUIRES_OK(context, context->GetAttr("session", &number));
    OP_REQUIRES_OK(context, context->GetAttr("group", &group_));
    session_ = find_session == nullptr ? nullptr : find_session(number);
    OP_REQUIRES(context, session_ != nullptr,
                tensorflow::errors::FailedPrecondition(
                    "this graph was traced with an hvd_compress compression of another process: trace it again"));
  }

  void Compute(OpKernelContext* context) final {
    try {
      run(context);
    } catch (const std::exception& error) {
      context->CtxFailure(InvalidArgument("hvd_compress: ", error.what()));
    }
  }

 protected:
  virtual void run(OpKernelContext* context) = 0;

  Session* session_ = nullptr;
  int64_t group_ = -1;
};

class MemberOp : public SessionOp {
 public:
  explicit MemberOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("member", &member_));
  }

 protected:
  int64_t member_ = -1;
};

// What is kept with a segment: memory for the next residual, which holds the one before, so that a step can be undone.
struct Before {
  Tensor residual;
  std::atomic<int64_t> encodings{0};
};

// A vector of n floats that nobody else sees.
Tensor own_floats(OpKernelContext* context, Tensor candidate, int64_t n) {
  if (candidate.dtype() == tensorflow::DT_FLOAT && candidate.NumElements() == n && candidate.RefCountIsOne()) return candidate;
  Tensor fresh;
  const auto status = context->allocate_temp(tensorflow::DT_FLOAT, TensorShape({n}), &fresh);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  return fresh;
}

class EncodeOp final : public MemberOp {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : MemberOp(context) {}

 private:
  void run(OpKernelContext* context) override {
    const Tensor& grad = context->input(0);
    const auto world = context->input(3).flat<int32_t>();
    OP_REQUIRES(context, world.size() == 2, InvalidArgument("world has ", world.size(), " elements, not 2"));
    const float scale = context->input(4).scalar<float>()();
    const std::string variable =
        context->num_inputs() > 5 ? tensorflow::HandleFromInput(context, 5).container() + "/" +
                                        tensorflow::HandleFromInput(context, 5).name()
                                  : "";
    const Task task = session_->arrive(group_, member_, variable);
    RefVar residual = variable_of(context, 1);
    RefVar state = variable_of(context, 2);

    const auto start = std::chrono::steady_clock::now();
    const int64_t n = grad.NumElements();
    Tensor message;
    const size_t begin = kHeaderBytes + kEntryBytes;
    const size_t capacity = begin + task.codec->max_payload(static_cast<size_t>(n)) + 1;
    OP_REQUIRES_OK(context,
                   context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(capacity)}), &message));
    uint8_t* out = message.flat<uint8_t>().data();

    const auto [step, old_scale] = count(context, state.get(), scale);
    const uint64_t seed = mix_seed(task.seed, static_cast<uint64_t>(world(0)), static_cast<uint64_t>(step),
                                   static_cast<uint64_t>(task.segment));
    std::function<void()> undo;
    const Encoded encoded = encode(context, task, grad, std::move(residual), scale / old_scale, seed, out + begin, &undo);
    write_entry(out + kHeaderBytes, static_cast<uint32_t>(member_), encoded.bytes);
    const size_t length = finish_message(out, begin + encoded.bytes, encoded.finite ? 0 : kNonFinite, task.digest,
                                         static_cast<uint64_t>(step));
    context->set_output(0, message.Slice(0, static_cast<int64_t>(length)));  // the same memory
    Tensor* stand_in;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({kStandIn}), &stand_in));
    make_stand_in(world(0), world(1), task.digest, stand_in->flat<float>().data());
    session_->encoded(group_, member_, encoded, grad.TotalBytes(), seconds_since(start), std::move(undo));
  }

  // Made where it was never initialized: in graph mode nobody has to run an initializer.
  static RefVar variable_of(OpKernelContext* context, int input) {
    RefVar variable;
    const auto dtype = input == 1 ? tensorflow::DT_FLOAT : tensorflow::DT_DOUBLE;
    const auto status = tensorflow::LookupOrCreateResource<Var>(context, tensorflow::HandleFromInput(context, input), &variable,
                                                                [dtype](Var** made) {
                                                                  *made = new Var(dtype);
                                                                  return tensorflow::OkStatus();
                                                                });
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
    return variable;
  }

  // Counts this encoding; returns its number and the scale of the one before, and notes the scale of this one.
  static std::pair<int64_t, float> count(OpKernelContext* context, Var* state, float scale) {
    const mutex_lock lock(*state->mu());
    double before[2] = {0, 1};
    if (state->is_initialized && state->tensor()->NumElements() == 2) {
      before[0] = state->tensor()->flat<double>()(0);
      before[1] = state->tensor()->flat<double>()(1);
    }
    Tensor now;
    const auto status = context->allocate_temp(tensorflow::DT_DOUBLE, TensorShape({2}), &now);
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
    now.flat<double>()(0) = before[0] + 1;
    now.flat<double>()(1) = scale;
    *state->tensor() = now;
    state->is_initialized = true;
    return {static_cast<int64_t>(before[0]) + 1, static_cast<float>(before[1])};
  }

  Encoded encode(OpKernelContext* context, const Task& task, const Tensor& grad, RefVar residual, float ratio, uint64_t seed,
                 uint8_t* out, std::function<void()>* undo) {
    const int64_t n = grad.NumElements();
    const auto dtype = dtype_of(grad.dtype());
    auto& attachment = session_->attachment(task.segment);
    if (attachment == nullptr) attachment = std::make_shared<Before>();
    auto before = std::static_pointer_cast<Before>(attachment);

    const mutex_lock lock(*residual->mu());
    Tensor& old = *residual->tensor();
    const int64_t had = residual->is_initialized && old.dtype() == tensorflow::DT_FLOAT ? old.NumElements() : 0;
    if (had != 0 && had != n) {
      throw std::runtime_error("the residual has " + std::to_string(had) + " elements, the gradient " + std::to_string(n) +
                               ": it was restored from a checkpoint of another model");
    }
    if (!task.has_residual && had == 0) {
      return task.codec->encode({grad.data(), dtype}, nullptr, nullptr, static_cast<size_t>(n), seed, out);
    }
    if (had == 0) {
      old = own_floats(context, Tensor(), n);
      old.flat<float>().setZero();
      residual->is_initialized = true;
    } else if (ratio != 1.0f) {
      Tensor scaled = old.RefCountIsOne() ? old : own_floats(context, Tensor(), n);
      scaled.flat<float>() = old.flat<float>() * ratio;
      old = scaled;
    }

    Encoded encoded;
    if (task.has_residual) {
      Tensor left = own_floats(context, std::move(before->residual), n);
      encoded = task.codec->encode({grad.data(), dtype}, old.flat<float>().data(), left.flat<float>().data(),
                                   static_cast<size_t>(n), seed, out);
      before->residual = old;
      old = left;
    } else {  // what a codec before has left is sent
      Tensor sum = own_floats(context, std::move(before->residual), n);
      Tensor gradient = grad;
      visit_elements(&gradient, [&](auto elements) {
        sum.flat<float>() = elements.template cast<float>() + old.flat<float>();
      });
      encoded = task.codec->encode({sum.data(), DType::kFloat32}, nullptr, nullptr, static_cast<size_t>(n), seed, out);
      before->residual = old;
      old = Tensor(tensorflow::DT_FLOAT, TensorShape({0}));
    }
    const int64_t number = ++before->encodings;
    *undo = [before, number, residual = std::shared_ptr<Var>(residual.release(), [](Var* variable) { variable->Unref(); })] {
      const mutex_lock undo_lock(*residual->mu());
      if (before->encodings == number) std::swap(*residual->tensor(), before->residual);  // else it is too late
    };
    return encoded;
  }
};

class PackOp final : public SessionOp {
 public:
  explicit PackOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
  }

 private:
  void run(OpKernelContext* context) override {
    if (context->num_inputs() == 2) {
      context->set_output(0, context->input(1));
    } else {
      context->set_output(0, joined(context));
    }
    session_->sent(group_, bucket_);
  }

  static Tensor joined(OpKernelContext* context) {
    size_t capacity = kHeaderBytes + 1;
    for (int i = 1; i < context->num_inputs(); ++i) capacity += context->input(i).NumElements();
    Tensor message;
    const auto status =
        context->allocate_temp(tensorflow::DT_UINT8, TensorShape({static_cast<int64_t>(capacity)}), &message);
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
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
};

class UnpackOp final : public SessionOp {
 public:
  explicit UnpackOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("members", &members_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& gathered = context->input(1);
    const auto messages = session_->received(group_, bucket_, gathered.flat<uint8_t>().data(),
                                             static_cast<size_t>(gathered.NumElements()));
    const auto ranks = static_cast<int64_t>(messages.size());
    const auto count = static_cast<int64_t>(members_.size());
    Tensor* places;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count, ranks, 2}), &places));
    auto out = places->tensor<int64_t, 3>();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto& entries = messages[rank].entries;
      bool same = entries.size() == members_.size();
      for (int64_t row = 0; same && row < count; ++row) {
        same = entries[row].index == members_[row];
        out(row, rank, 0) = static_cast<int64_t>(entries[row].offset);
        out(row, rank, 1) = static_cast<int64_t>(entries[row].bytes);
      }
      OP_REQUIRES(context, same, InvalidArgument("rank ", rank, "'s message has other segments than this rank's"));
    }
  }

  int64_t bucket_ = -1;
  std::vector<int64_t> members_;
};

class DecodeOp final : public MemberOp {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : MemberOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("row", &row_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& gathered = context->input(1);
    const auto places = context->input(2).tensor<int64_t, 3>();
    const Tensor& grad = context->input(4);
    const int64_t n = grad.NumElements(), ranks = places.dimension(1);
    const auto stand_in = context->input(3).flat<float>();
    OP_REQUIRES(context, stand_in.size() == kStandIn,
                InvalidArgument("the stand-in has ", stand_in.size(), " elements, not ", kStandIn));
    const auto weight = static_cast<float>(stand_in_factor(stand_in.data(), ranks) / static_cast<double>(ranks));

    const auto start = std::chrono::steady_clock::now();
    Tensor* result;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({4}, 0, grad.shape(), &result));
    Tensor total = *result;
    if (grad.dtype() != tensorflow::DT_FLOAT) {
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_FLOAT, TensorShape({n}), &total));
    }
    float* out = total.flat<float>().data();
    std::fill(out, out + n, 0.0f);
    const auto codec = session_->codec(group_, member_);
    const uint8_t* data = gathered.flat<uint8_t>().data();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t at = places(row_, rank, 0), bytes = places(row_, rank, 1);
      codec->decode_add(data + at, static_cast<size_t>(bytes), weight, out, static_cast<size_t>(n));
    }
    if (grad.dtype() != tensorflow::DT_FLOAT) {
      visit_elements(result, [&](auto elements) {
        using Element = typename decltype(elements)::Scalar;
        elements = total.flat<float>().template cast<Element>();
      });
    }
    session_->finished(group_, member_, true, seconds_since(start));
  }

  int64_t row_ = -1;
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
