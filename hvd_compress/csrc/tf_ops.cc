// TensorFlow's ops over the same four functions: one segment is encoded, or decoded from the payloads of all ranks.
#include <limits>

#include "codec.h"
#include "random.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

#define HVD_CODEC_ATTRS       \
  Attr("kind: int")           \
      .Attr("bin: int = 0")   \
      .Attr("c: float = 2.0") \
      .Attr("bits: int = 0")  \
      .Attr("bucket: int = 0") \
      .Attr("coding: int = 0") \
      .Attr("feedback: bool = false")

REGISTER_OP("HvdCompressEncode")
    .Attr("T: {half, bfloat16, float, double}")
    .HVD_CODEC_ATTRS.Input("grad: T")
    .Input("residual: float")
    .Input("counter: int64")
    .Output("payload: uint8")
    .Output("residual_left: float")
    .Output("finite: bool")
    .Output("selected: int64")
    .Output("residual_sq: double")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(1));
      for (int i = 2; i < 5; ++i) c->set_output(i, c->Scalar());
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Encodes one segment.

grad: Any shape, n elements.
residual: n elements; empty where the codec has none.
counter: Seed, rank, step and segment, which make the randomness.
payload: Its bytes.
residual_left: What was lost, in the shape of residual.
finite: False where the gradient or its sum with the residual was not finite: residual_left is then to be thrown away.
selected: Number of elements sent, -1 where the codec does not choose.
residual_sq: Squared L2 norm of residual_left.
)doc");

REGISTER_OP("HvdCompressDecode")
    .HVD_CODEC_ATTRS.Input("payloads: uint8")
    .Input("sizes: int64")
    .Input("weight: float")
    .Input("elements: int64")
    .Output("total: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return tensorflow::OkStatus();
    })
    .Doc(R"doc(
Adds up what several payloads of one segment decode to.

payloads: One behind the other.
sizes: The length of each in bytes; one of length 0 adds nothing.
weight: Of each.
elements: Of the segment.
total: The weighted sum, in the order of the payloads.
)doc");

// Reads the attributes that describe the codec; the Python dataclasses have validated them.
std::unique_ptr<Codec> codec_of(OpKernelConstruction* context) {
  int64_t kind = 0, bits = 0, coding = 0;
  Options options;
  const auto read = [&](const char* name, auto* value) { OP_REQUIRES_OK(context, context->GetAttr(name, value)); };
  read("kind", &kind);
  read("bin", &options.bin);
  read("c", &options.c);
  read("bits", &bits);
  read("bucket", &options.bucket);
  read("coding", &coding);
  read("feedback", &options.feedback);
  if (!context->status().ok()) return nullptr;
  options.bits = static_cast<int>(bits);
  options.coding = static_cast<Coding>(coding);
  try {
    return create(static_cast<Kind>(kind), options);
  } catch (const std::invalid_argument& error) {
    context->CtxFailure(InvalidArgument(error.what()));
    return nullptr;
  }
}

DType dtype_of(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF: return DType::kFloat16;
    case tensorflow::DT_BFLOAT16: return DType::kBFloat16;
    case tensorflow::DT_DOUBLE: return DType::kFloat64;
    default: return DType::kFloat32;
  }
}

class EncodeOp final : public OpKernel {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : OpKernel(context), codec_(codec_of(context)) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& grad = context->input(0);
    const Tensor& residual = context->input(1);
    const Tensor& counter = context->input(2);
    const int64_t n = grad.NumElements();
    OP_REQUIRES(context, counter.NumElements() == 4, InvalidArgument("counter has ", counter.NumElements(), " elements, not 4"));
    const bool with_residual = residual.NumElements() > 0;
    OP_REQUIRES(context, !with_residual || residual.NumElements() == n,
                InvalidArgument("residual has ", residual.NumElements(), " elements, the gradient ", n));

    Tensor payload;
    const auto capacity = static_cast<int64_t>(codec_->max_payload(static_cast<size_t>(n)));
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8, TensorShape({capacity}), &payload));
    Tensor *left, *finite, *selected, *residual_sq;
    OP_REQUIRES_OK(context, context->allocate_output(1, residual.shape(), &left));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape(), &finite));
    OP_REQUIRES_OK(context, context->allocate_output(3, TensorShape(), &selected));
    OP_REQUIRES_OK(context, context->allocate_output(4, TensorShape(), &residual_sq));

    const auto c = counter.flat<int64_t>();
    const uint64_t seed = mix_seed(static_cast<uint64_t>(c(0)), static_cast<uint64_t>(c(1)), static_cast<uint64_t>(c(2)),
                                   static_cast<uint64_t>(c(3)));
    Encoded encoded;
    try {
      encoded = codec_->encode(grad.data(), dtype_of(grad.dtype()), with_residual ? residual.flat<float>().data() : nullptr,
                               with_residual ? left->flat<float>().data() : nullptr, static_cast<size_t>(n), seed,
                               payload.flat<uint8_t>().data());
    } catch (const std::invalid_argument& error) {
      context->CtxFailure(InvalidArgument(error.what()));
      return;
    }
    context->set_output(0, payload.Slice(0, static_cast<int64_t>(encoded.bytes)));  // the same memory
    finite->scalar<bool>()() = encoded.finite;
    selected->scalar<int64_t>()() = encoded.selected;
    residual_sq->scalar<double>()() = encoded.residual_sq;
  }

 private:
  std::unique_ptr<Codec> codec_;
};

class DecodeOp final : public OpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : OpKernel(context), codec_(codec_of(context)) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& payloads = context->input(0);
    const Tensor& sizes = context->input(1);
    const float weight = context->input(2).scalar<float>()();
    const int64_t n = context->input(3).scalar<int64_t>()();
    OP_REQUIRES(context, n >= 0, InvalidArgument("elements is ", n));
    Tensor* total;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &total));
    float* out = total->flat<float>().data();
    std::fill(out, out + n, 0.0f);
    const uint8_t* next = payloads.flat<uint8_t>().data();
    int64_t rest = payloads.NumElements();
    for (int64_t rank = 0; rank < sizes.NumElements(); ++rank) {
      const int64_t size = sizes.flat<int64_t>()(rank);
      OP_REQUIRES(context, size >= 0 && size <= rest,
                  InvalidArgument("rank ", rank, "'s payload is said to have ", size, " bytes, ", rest, " are left"));
      try {
        if (size > 0) codec_->decode_add(next, static_cast<size_t>(size), weight, out, static_cast<size_t>(n));
      } catch (const MalformedPayload& error) {
        context->CtxFailure(InvalidArgument("rank ", rank, ": ", error.what()));
        return;
      }
      next += size;
      rest -= size;
    }
    OP_REQUIRES(context, rest == 0, InvalidArgument(rest, " bytes follow the last payload"));
  }

 private:
  std::unique_ptr<Codec> codec_;
};

REGISTER_KERNEL_BUILDER(Name("HvdCompressEncode").Device(DEVICE_CPU), EncodeOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressDecode").Device(DEVICE_CPU), DecodeOp);

}  // namespace
}  // namespace hvd_compress
