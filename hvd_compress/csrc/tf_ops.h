// What TensorFlow's ops have in common; see tf_ops.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "session.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {

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

inline tensorflow::Status vectors(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  return tensorflow::OkStatus();
}

inline tensorflow::Status like_input(InferenceContext* c, int input) {
  c->set_output(0, c->input(input));
  return tensorflow::OkStatus();
}

extern FindSession find_session;  // in the kernels' library

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline DType dtype_of(tensorflow::DataType dtype) {
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

inline bool is_finite(const Tensor& tensor) {
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

// Allocates, or throws.
inline Tensor allocate(OpKernelContext* context, tensorflow::DataType dtype, int64_t n) {
  Tensor fresh;
  const auto status = context->allocate_temp(dtype, TensorShape({n}), &fresh);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  return fresh;
}

// A vector of n floats that nobody else sees.
inline Tensor own_floats(OpKernelContext* context, Tensor candidate, int64_t n) {
  if (candidate.dtype() == tensorflow::DT_FLOAT && candidate.NumElements() == n && candidate.RefCountIsOne()) return candidate;
  return allocate(context, tensorflow::DT_FLOAT, n);
}

// Makes what the variable holds its own, so that it can be written to.
inline void make_own(OpKernelContext* context, Tensor* value) {
  if (value->RefCountIsOne()) return;
  Tensor copy = allocate(context, tensorflow::DT_FLOAT, value->NumElements());
  copy.flat<float>() = value->flat<float>();
  *value = copy;
}

// A variable that is an input; made where it was never initialized: in graph mode nobody has to run an initializer.
inline RefVar variable_of(OpKernelContext* context, int input, tensorflow::DataType dtype) {
  RefVar variable;
  const auto status = tensorflow::LookupOrCreateResource<Var>(context, tensorflow::HandleFromInput(context, input), &variable,
                                                              [dtype](Var** made) {
                                                                *made = new Var(dtype);
                                                                return tensorflow::OkStatus();
                                                              });
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  return variable;
}

// How many floats a variable holds; under its lock.
inline int64_t floats_of(Var* variable) {
  return variable->is_initialized && variable->tensor()->dtype() == tensorflow::DT_FLOAT ? variable->tensor()->NumElements() : 0;
}

// The elements of a `state`, see HvdCompressEncode.
struct State {
  double encodings = 0, scale = 1, piece_begin = 0;

  static State read(Var* variable) {
    State state;
    if (!variable->is_initialized || variable->tensor()->NumElements() != 3) return state;
    const auto values = variable->tensor()->flat<double>();
    return {values(0), values(1), values(2)};
  }

  void write(OpKernelContext* context, Var* variable) const {
    Tensor now = allocate(context, tensorflow::DT_DOUBLE, 3);
    auto values = now.flat<double>();
    values(0) = encodings;
    values(1) = scale;
    values(2) = piece_begin;
    *variable->tensor() = now;
    variable->is_initialized = true;
  }
};

// Memory for the next residual, which holds the one before, so that a step can be undone.
struct Before {
  Tensor residual;
  std::atomic<int64_t> encodings{0};
};

// What is kept with a segment.
struct Kept {
  std::shared_ptr<Before> gradient = std::make_shared<Before>(), piece = std::make_shared<Before>();
};

inline std::shared_ptr<Kept> kept_of(Session* session, int64_t segment) {
  auto& attachment = session->attachment(segment);
  if (attachment == nullptr) attachment = std::make_shared<Kept>();
  return std::static_pointer_cast<Kept>(attachment);
}

inline std::shared_ptr<Var> shared(RefVar variable) {
  return std::shared_ptr<Var>(variable.release(), [](Var* released) { released->Unref(); });
}

// What takes back that a residual was replaced by another one, unless it has been replaced again since. Under its lock.
inline std::function<void()> undo_of(std::shared_ptr<Var> variable, std::shared_ptr<Before> before) {
  const int64_t number = ++before->encodings;
  return [before = std::move(before), variable = std::move(variable), number] {
    const mutex_lock lock(*variable->mu());
    if (before->encodings == number) std::swap(*variable->tensor(), before->residual);
  };
}

// Calls run(residual_in, residual_out) with a residual of n elements, zeros where there is none yet, and keeps what it leaves.
template <class Run>
Encoded encode_with(OpKernelContext* context, Var* residual, Before* before, int64_t n, Run run) {
  Tensor& old = *residual->tensor();
  if (floats_of(residual) == 0) {
    old = allocate(context, tensorflow::DT_FLOAT, n);
    old.flat<float>().setZero();
    residual->is_initialized = true;
  }
  Tensor left = own_floats(context, std::move(before->residual), n);
  const Encoded encoded = run(old.flat<float>().data(), left.flat<float>().data());
  before->residual = old;
  old = left;
  return encoded;
}

}  // namespace hvd_compress
