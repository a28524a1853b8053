// Counter-based randomness: a number is a hash of (seed, bucket, index), so that there is no state to keep, and a resumed
// run, another framework or another device draws the same ones.
#pragma once

#include <cstdint>

#include "simd.h"

namespace hvd_compress {

// The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64 bits with full avalanche.
HVD_INLINE uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The seed of one segment's encoding, from what tells encodings apart.
inline uint64_t mix_seed(uint64_t seed, uint64_t rank, uint64_t step, uint64_t segment) {
  return mix64(mix64(mix64(mix64(seed) ^ rank) ^ step) ^ segment);
}

// The random numbers of one bucket: 32 bits for each index in it.
class Random {
 public:
  HVD_INLINE Random(uint64_t seed, uint64_t bucket) {
    const uint64_t key = mix64(seed ^ mix64(bucket));
    first_ = static_cast<uint32_t>(key);
    second_ = static_cast<uint32_t>(key >> 32);
  }

  // A 32-bit multiply-xorshift hash; its second key comes between the two multiplications, so that two buckets never share
  // a shifted stretch of the same sequence.
  HVD_INLINE uint32_t operator()(uint32_t index) const {
    uint32_t x = index + first_;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15) ^ second_) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

 private:
  uint32_t first_, second_;
};

}  // namespace hvd_compress
