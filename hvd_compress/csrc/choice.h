// How much to send: CAT's rule (Khirirat et al., arXiv 2003.06377, section 3), and what it comes to for a fixed number.
#pragma once

#include <cstdint>
#include <vector>

#include "codec.h"
#include "magnitudes.h"

namespace hvd_compress {

// What is chosen for numbers of which the histogram is known.
struct Choice {
  uint64_t count = 0;       // T; of a stochastic selection, the expected number
  double improvement = 0;   // alpha, beta or omega of T; 0 where there is nothing to send
  double cost = 0;          // in the cost model's unit
  // Those of at least `threshold` (magnitude bits), but of the bin that begins there only the `within` largest.
  uint32_t threshold = 0;
  uint64_t within = 0, in_bin = 0;
  double mean = 0;          // of the magnitudes in that bin
  // Of the magnitudes of the bins above; their squares; the squares of all.
  double sum_above = 0, sum_sq_above = 0, total_sq = 0;
  double level = 0;         // stochastic: what is below the threshold is sent at random, as this or not at all; 0: not at all

  // Where the T largest are sent: the improvement, given the sums over the `within`.
  double improvement_of(Scheme scheme, double sum_within, double sum_sq_within) const {
    if (scheme == Scheme::kTopK) return (sum_sq_above + sum_sq_within) / total_sq;
    const double sum = sum_above + sum_within;
    return sum * sum / (static_cast<double>(count) * total_sq);
  }
};

// The size of a payload, or of several.
class PayloadSize {
 public:
  // Of `segments` payloads of n elements together, taken as one; each has `head` bytes besides.
  PayloadSize(uint64_t n, uint64_t segments, size_t head) : n_(n), heads_(static_cast<double>(segments * head)) {}

  // With so many values, and so many signs.
  double of(uint64_t values, uint64_t signs) const;

  uint64_t n() const { return n_; }

 private:
  uint64_t n_;
  double heads_;
};

// The T that has the largest improvement / cost, over the whole range, since that is not unimodal: the edges of all bins,
// between them where that can be better, and what fills a packet.
Choice choose(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost);

// The choice of that T, of what is not 0 at most.
Choice choose_count(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost,
                    uint64_t count);

}  // namespace hvd_compress
