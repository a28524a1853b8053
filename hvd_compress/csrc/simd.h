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

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

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
  const Bytes bytes = __builtin_convertvector(comparison, Bytes);
#if defined(__SSE2__)
  return static_cast<uint64_t>(_mm_movemask_epi8(reinterpret_cast<__m128i>(bytes)));
#else
  uint64_t half[2], bits[2];
  std::memcpy(half, &bytes, sizeof(half));
  // The multiplication gathers the low bit of each byte in the top byte.
  for (int i = 0; i < 2; ++i) bits[i] = (half[i] & 0x0101010101010101u) * 0x0102040810204080u >> 56;
  return bits[0] | bits[1] << 8;
#endif
}

HVD_INLINE double sum_lanes(const Floats& v) {
  double sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(v[j]);
  return sum;
}

}  // namespace hvd_compress
