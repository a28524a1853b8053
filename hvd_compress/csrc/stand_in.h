// What Horovod's own allreduce gets instead of a gradient, to tell what the user's op makes of it: each rank gives 1 and its
// rank / n. A mean makes (1, (n-1) / 2n) of them, a sum n times that, and no other op either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace hvd_compress {

// The factor that makes of a mean what the op gives: 1 for op=Average, n for op=Sum. Throws where it is another op.
inline double stand_in_factor(double one, double rank, int64_t ranks) {
  const double n = static_cast<double>(ranks);
  const double factor = std::floor(one + 0.5);  // predivided, it may be off by a rounding
  const double off = std::max(std::abs(one - factor), std::abs(rank - factor * (n - 1) / (2 * n)));
  // A sum over thousands of ranks rounds in proportion. NaN fails every comparison.
  if (!((factor == 1 || factor == n) && off <= 1e-3 * factor)) {
    throw std::invalid_argument(
        "hvd_compress takes op=hvd.Average and op=hvd.Sum, no other op: what it sends is summed");
  }
  return factor;
}

}  // namespace hvd_compress
