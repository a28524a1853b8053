// How the kernels are vectorized: plain loops, and the compilers' generic vectors of kLanes where a loop keeps partial sums
// or maxima, compiled once for AVX-512, once for AVX2 and once for the baseline, and chosen when the library is loaded.
// The number of lanes is the same in each, so that every version adds in the same order and gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define HVD_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HVD_SIMD
#endif

// Into every version of a HVD_SIMD function its helpers must be inlined, or they stay at the baseline.
#define HVD_INLINE inline __attribute__((always_inline))

namespace hvd_compress {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <typename Vector, typename T>
HVD_INLINE Vector load_vector(const T* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <typename Vector, typename T>
HVD_INLINE void store_vector(T* to, const Vector& v) {
  std::memcpy(to, &v, sizeof(v));
}

// |x| as integers, see magnitude_bits.
HVD_INLINE Ints magnitudes(const Floats& x) { return reinterpret_cast<Ints>(x) & 0x7fffffff; }

HVD_INLINE Ints max(const Ints& a, const Ints& b) { return a > b ? a : b; }

HVD_INLINE int32_t largest_lane(const Ints& v) {
  int32_t most = v[0];
  for (int j = 1; j < kLanes; ++j) most = v[j] > most ? v[j] : most;
  return most;
}

// Bit j of the result: whether lane j of a comparison holds.
HVD_INLINE uint64_t lane_bits(const Ints& comparison) {
  uint64_t bits = 0;
#if defined(__SSE2__)
  __m128 quad[kLanes / 4];
  std::memcpy(quad, &comparison, sizeof(quad));
  for (int i = 0; i < kLanes / 4; ++i) bits |= static_cast<uint64_t>(_mm_movemask_ps(quad[i])) << (4 * i);
#else
  for (int j = 0; j < kLanes; ++j) bits |= static_cast<uint64_t>(comparison[j] & 1) << j;
#endif
  return bits;
}

HVD_INLINE double sum_lanes(const Floats& v) {
  double sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(v[j]);
  return sum;
}

}  // namespace hvd_compress
