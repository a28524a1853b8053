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
  // The T largest: those of at least `threshold` (magnitude bits), but of the bin that begins there only the `within` largest.
  uint32_t threshold = 0;
  uint64_t within = 0, in_bin = 0;
  double mean = 0;          // of the magnitudes in that bin
  double sum = 0;           // of their magnitudes; of the bin in question as if they were its mean
  double level = 0;         // stochastic: what is larger is sent as it is, the rest at random, as this or not at all
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

// The T that has the largest improvement / cost; all T are considered, since that is not unimodal.
Choice choose(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost);

// The choice of that T, of what is not 0 at most.
Choice choose_count(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost,
                    uint64_t count);

}  // namespace hvd_compress
