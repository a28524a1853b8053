// Floating-point bits, and the loading of a gradient of any dtype as float32. Conversions are integer arithmetic: they
// vectorize on every instruction set and give the same bits on each.
#pragma once

#include <cstring>

#include "codec.h"
#include "simd.h"

namespace hvd_compress {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7f800000u;

HVD_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

HVD_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// |x| as an integer orders as |x| does, with NaN above Inf above all numbers: a maximum over it also finds non-finite values.
HVD_INLINE int32_t magnitude_bits(float x) { return static_cast<int32_t>(bits_of(x) & ~kSign); }

HVD_INLINE float from_bfloat16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// The exponent is rebased by a multiplication, which also normalizes subnormals; Inf and NaN then need their exponent back.
HVD_INLINE float from_float16(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t rebased = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? kInfinity : 0u;
  return float_of(rebased | special | static_cast<uint32_t>(h & 0x8000u) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
HVD_INLINE uint16_t to_bfloat16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & ~kSign) > kInfinity ? nan : rounded);
}

// Round to nearest, ties to even; too large becomes Inf, NaN stays NaN.
HVD_INLINE uint16_t to_float16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & ~kSign;
  const uint32_t sign = (u >> 16) & 0x8000u;
  // Normal result: rebias the exponent and round the 13 bits away.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal result: adding 0.5 leaves the rounded mantissa in the low bits.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;
  h = magnitude > kInfinity ? 0x7e00u : h;
  return static_cast<uint16_t>(h | sign);
}

// Elements [begin, begin + count) of numbers of any dtype as float32: the memory itself where it is float32, else converted
// into tile.
HVD_INLINE const float* load_numbers(const void* grad, DType dtype, size_t begin, size_t count, float* __restrict tile) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(grad) + begin;
    case DType::kFloat16: {
      const uint16_t* h = static_cast<const uint16_t*>(grad) + begin;
      for (size_t i = 0; i < count; ++i) tile[i] = from_float16(h[i]);
      return tile;
    }
    case DType::kBFloat16: {
      const uint16_t* h = static_cast<const uint16_t*>(grad) + begin;
      for (size_t i = 0; i < count; ++i) tile[i] = from_bfloat16(h[i]);
      return tile;
    }
    case DType::kFloat64: {
      const double* d = static_cast<const double*>(grad) + begin;
      for (size_t i = 0; i < count; ++i) tile[i] = static_cast<float>(d[i]);
      return tile;
    }
  }
  return nullptr;  // unreachable: the enum is exhausted
}

// Elements [begin, begin + count) of a gradient as float32, with its momentum where it has one; in tile, or where they are.
HVD_INLINE const float* load(const Gradient& grad, size_t begin, size_t count, float* __restrict tile) {
  const float* v = load_numbers(grad.data, grad.dtype, begin, count, tile);
  if (grad.momentum == nullptr) return v;
  const float* m = grad.momentum + begin;
  for (size_t i = 0; i < count; ++i) tile[i] = grad.weight * v[i] + grad.momentum_weight * m[i];
  return tile;
}

}  // namespace hvd_compress
