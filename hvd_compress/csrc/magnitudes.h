// A histogram of magnitudes: by the upper 15 bits of |x|, its exponent and 7 bits of mantissa. A bin also knows exactly what its
// magnitudes add up to, since they lie evenly spaced in it: it adds up their other 16 bits. So sums over the largest are
// exact at the edges of bins; squares are taken to be those of a bin's mean, off by 5e-6 of them at most.
//
// All that it holds are integers: the same in any order of adding.
#pragma once

#include <cstdint>
#include <vector>

#include "floats.h"

namespace hvd_compress {

class Magnitudes {
 public:
  static constexpr int kShift = 16;
  static constexpr uint32_t kRest = (1u << kShift) - 1;
  static constexpr size_t kBins = size_t{1} << (31 - kShift);

  struct Bin {
    uint32_t edge;   // magnitude bits of the smallest that falls into it
    uint64_t count;
    double mean;     // of the magnitudes
    double bound;    // what none of them exceeds
  };

  Magnitudes() : cells_(kBins), count_(kBins), rest_(kBins) {}

  void add(const float* v, size_t n);  // finite numbers, fewer than 2^24
  void add(Magnitudes& other, uint64_t times = 1);

  void clear();

  // The bins that are not empty, from the largest magnitudes down; except that of 0, which takes what is below 2^-133 too.
  // `largest` are the bits of the largest one.
  std::vector<Bin> descending(int32_t largest);

 private:
  static constexpr int kCountShift = 40;
  static constexpr uint64_t kMostCells = (uint64_t{1} << (64 - kCountShift)) - 1;  // elements that the cells have room for

  void settle();

  std::vector<uint64_t> cells_;  // of the last elements: count << kCountShift | sum of the other bits; one addition does both
  std::vector<uint64_t> count_, rest_;
  uint64_t size_ = 0, in_cells_ = 0;
  size_t low_ = kBins, high_ = 0;  // all bins that are not empty are from low_ to high_, or that of 0
};

}  // namespace hvd_compress
