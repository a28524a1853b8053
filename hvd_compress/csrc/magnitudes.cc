#include "magnitudes.h"

#include <algorithm>

namespace hvd_compress {
namespace {

constexpr size_t kMany = size_t{1} << 17;

// The smallest magnitude that is not 0, and the largest, as bits.
HVD_SIMD void range(const float* v, size_t n, int32_t& smallest, int32_t& largest) {
  Ints most = {}, least = Ints{} + INT32_MIN;  // the largest of the negated ones
  const auto add = [&](const float* from) {
    const Ints m = magnitudes(load_vector<Floats>(from));
    most = max(most, m);
    least = max(least, m == 0 ? Ints{} + INT32_MIN : -m);
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(v + i);
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, v + i, (n - i) * sizeof(float));
    add(rest);
  }
  largest = largest_lane(most);
  const int32_t negated = largest_lane(least);
  smallest = negated == INT32_MIN ? INT32_MAX : -negated;
}

}  // namespace

void Magnitudes::add(const float* v, size_t n) {
  if (in_cells_ + n > kMostCells) settle();
  size_ += n;
  if (size_ > kMany) {  // to go through all bins takes less time than to find out which ones that are
    low_ = 1;
    high_ = kBins - 1;
  } else {
    int32_t smallest, largest;
    range(v, n, smallest, largest);
    low_ = std::min(low_, static_cast<size_t>(smallest) >> kShift);
    high_ = std::max(high_, static_cast<size_t>(largest) >> kShift);
  }
  uint64_t* cells = cells_.data();
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(v[i]) & ~kSign;
    cells[magnitude >> kShift] += uint64_t{1} << kCountShift | (magnitude & kRest);
  }
  in_cells_ += n;
}

void Magnitudes::add(Magnitudes& other, uint64_t times) {
  other.settle();
  for (size_t b = other.low_; b <= other.high_; ++b) {
    count_[b] += times * other.count_[b];
    rest_[b] += times * other.rest_[b];
  }
  low_ = std::min(low_, other.low_);
  high_ = std::max(high_, other.high_);
  size_ += other.size_;
}

void Magnitudes::settle() {
  for (size_t b = low_; b <= high_; ++b) {
    count_[b] += cells_[b] >> kCountShift;
    rest_[b] += cells_[b] & ((uint64_t{1} << kCountShift) - 1);
    cells_[b] = 0;
  }
  cells_[0] = 0;
  in_cells_ = 0;
}

void Magnitudes::clear() {
  settle();
  for (size_t b = low_; b <= high_; ++b) count_[b] = rest_[b] = 0;
  low_ = kBins;
  high_ = size_ = 0;
}

std::vector<Magnitudes::Bin> Magnitudes::descending(int32_t largest) {
  settle();
  std::vector<Bin> bins;
  for (size_t b = high_; b >= std::max<size_t>(low_, 1); --b) {
    if (count_[b] == 0) continue;
    const auto edge = static_cast<uint32_t>(b << kShift);
    const double first = float_of(edge), step = float_of(edge | 1) - first;
    const double mean = first + step * (static_cast<double>(rest_[b]) / static_cast<double>(count_[b]));
    double bound = float_of(edge | kRest);
    if (bins.empty()) bound = float_of(static_cast<uint32_t>(largest));
    if (count_[b] == 1 || rest_[b] == 0) bound = mean;  // and so are all
    bins.push_back({edge, count_[b], mean, bound});
  }
  return bins;
}

}  // namespace hvd_compress
