// What Horovod's own allreduce gets instead of a gradient, to tell what the user's op makes of it, and whether all ranks have the
// same plan. Each rank gives 1, its rank / n, and two marks of its plan's digest. A mean makes (1, (n-1) / 2n, the same marks) of
// them, a sum n times that, and no other op either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace hvd_compress {

constexpr int kStandIn = 4;  // floats

inline float mark_of(uint64_t digest, int i) { return static_cast<float>(digest >> 8 * i & 0xff) / 256; }

inline void make_stand_in(int64_t rank, int64_t ranks, uint64_t digest, float* out) {
  out[0] = 1;
  out[1] = static_cast<float>(static_cast<double>(rank) / static_cast<double>(ranks));
  for (int i = 0; i < 2; ++i) out[2 + i] = mark_of(digest, i);
}

// The factor that makes of a mean what the op gives: 1 for op=Average, n for op=Sum. Throws where it is another op, and where
// ranks have called hvd.join(), whose stand-ins are zeros.
inline double stand_in_factor(const float* reduced, int64_t ranks) {
  const double n = static_cast<double>(ranks), one = reduced[0];
  const double factor = std::floor(one + 0.5);  // predivided, it may be off by a rounding
  const double off = std::max(std::abs(one - factor), std::abs(reduced[1] - factor * (n - 1) / (2 * n)));
  if (one > 0 && one < n && std::abs(one - 1) > 1e-3) {
    throw std::runtime_error(
        "hvd.join() is not supported together with hvd_compress: another rank has called it, and ranks that have joined can take "
        "no part in an exchange. Give every rank the same number of steps.");
  }
  // A sum over thousands of ranks rounds in proportion. NaN fails every comparison.
  if (!((factor == 1 || factor == n) && off <= 1e-3 * factor)) {
    throw std::invalid_argument(
        "hvd_compress takes op=hvd.Average and op=hvd.Sum, no other op, and hvd.join() of no rank: what it sends is summed");
  }
  return factor;
}

// Whether the ranks' plans are the same, as far as the marks tell: ranks that exchange in different ways would wait for each other
// for ever, and so must know of it before they wait for a message.
inline bool stand_in_agrees(const float* reduced, double factor, int64_t ranks, uint64_t digest) {
  // One mark of one rank off by one makes 1/256n in the mean.
  const double least = std::max(factor / (512.0 * static_cast<double>(ranks)), 4e-6 * factor);
  for (int i = 0; i < 2; ++i) {
    if (!(std::abs(reduced[2 + i] - factor * mark_of(digest, i)) <= least)) return false;
  }
  return true;
}

}  // namespace hvd_compress
