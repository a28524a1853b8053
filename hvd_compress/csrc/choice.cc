#include "choice.h"

#include <algorithm>
#include <cmath>

#include "indices.h"

namespace hvd_compress {

double PayloadSize::of(uint64_t values, uint64_t signs) const {
  const size_t indices = IndexLayout(n_, values).bytes() + IndexLayout(n_, signs).bytes();
  return heads_ + static_cast<double>(indices + 4 * values + (signs + 7) / 8);
}

namespace {

constexpr double kRounding = 1 + 1e-12;  // of sums that should be whole multiples
constexpr uint64_t kEach = 16;  // of up to so many numbers all are tried, of more
constexpr uint64_t kStep = 32;  // each that is larger by this part of what is drawn
constexpr uint64_t kPlateaus = 8;

// Walks through the numbers of elements that can be the best, and keeps that one.
class Chooser {
 public:
  Chooser(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost)
      : scheme_(scheme), bins_(bins), size_(size), cost_(cost) {
    Sums all;
    for (const auto& bin : bins) all.add(bin);
    nonzero_ = all.count;
    total_ = all.sum;
    total_sq_ = all.sum_sq;
  }

  // All T, or `only` that one.
  Choice run(uint64_t only = 0) {
    if (nonzero_ == 0) return {};
    only = std::min(only, only < size_.n() ? nonzero_ : size_.n());
    scheme_ == Scheme::kStochastic ? water_fill(only) : select(only);
    return best_;
  }

 private:
  struct Sums {
    uint64_t count = 0;
    double sum = 0, sum_sq = 0;

    void add(const Magnitudes::Bin& bin) {
      count += bin.count;
      sum += static_cast<double>(bin.count) * bin.mean;
      sum_sq += static_cast<double>(bin.count) * bin.mean * bin.mean;
    }
  };

  void select(uint64_t only) {
    Sums above;
    for (const auto& bin : bins_) {
      const uint64_t last = above.count + bin.count;
      if (only == 0 || (above.count < only && only <= last)) {
        const bool signs = scheme_ == Scheme::kTopKSign;
        // A ratio of linear functions is largest at an end; only of a few numbers bytes that are not full decide.
        consider_range(
            only > 0 ? only : above.count + 1, only > 0 ? only : last, kNone,
            [&](uint64_t count) { return signs ? size_.of(0, count) : size_.of(count, 0); },
            [&](uint64_t count, double bytes) { consider_largest(count, bytes, above, bin); });
      }
      above.add(bin);
    }
    if (only == 0 || only == size_.n()) {  // all, with the zeros: no index has to be sent
      const bool signs = scheme_ == Scheme::kTopKSign;
      consider_largest(size_.n(), signs ? size_.of(0, size_.n()) : size_.of(size_.n(), 0), above, {0, size_.n() - nonzero_, 0, 0});
    }
  }

  void consider_largest(uint64_t count, double bytes, const Sums& above, const Magnitudes::Bin& bin) {
    Choice choice;
    choice.count = count;
    choice.threshold = bin.edge;
    choice.within = count - above.count;
    choice.in_bin = bin.count;
    choice.mean = bin.mean;
    choice.sum_above = above.sum;
    choice.sum_sq_above = above.sum_sq;
    choice.total_sq = total_sq_;
    const double within = static_cast<double>(choice.within) * bin.mean;
    choice.improvement = choice.improvement_of(scheme_, within, within * bin.mean);
    choice.cost = cost_.of(bytes);
    consider(choice);
  }

  // Whole bins are sent as they are. The elements below share what is left of T in proportion to their magnitudes: of each the
  // probability is its part of `level`, which none of them exceeds.
  void water_fill(uint64_t only) {
    Sums above;
    uint64_t done = 0;
    uint32_t threshold = kInfinity;
    for (const auto& bin : bins_) {
      const double rest = total_ - above.sum;
      const uint64_t first = std::max(done, above.count) + 1;
      const auto last = std::min(above.count + static_cast<uint64_t>(rest / bin.bound * kRounding), nonzero_);
      if (first <= last && (only == 0 || (first <= only && only <= last))) {
        consider_range(
            only > 0 ? only : first, only > 0 ? only : last, above.count,
            [&](uint64_t count) { return size_.of(above.count, count - above.count); },
            [&](uint64_t count, double bytes) {
              Choice choice;
              choice.count = count;
              choice.threshold = threshold;
              choice.level = std::max(rest / static_cast<double>(count - above.count), bin.bound);
              choice.improvement = total_sq_ / (above.sum_sq + rest * choice.level);
              choice.cost = cost_.of(bytes);
              consider(choice);
            });
      }
      done = std::max(done, last);
      above.add(bin);
      threshold = bin.edge;
    }
    for (const uint64_t count : {nonzero_, size_.n()}) {  // all of them, as they are, with or without the zeros
      if (only != 0 && only != count && best_.count > 0) continue;
      Choice choice;
      choice.count = count;
      choice.threshold = count < size_.n() ? threshold : 0;
      choice.improvement = 1;
      choice.cost = cost_.of(size_.of(count, 0));
      consider(choice);
    }
  }

  // Calls consider(count, bytes) for numbers in [first, last], of which `bytes` tells the size: of a few for each, of more for
  // both ends; and where what is above `certain` is drawn, for some in between.
  template <class Bytes, class Consider>
  void consider_range(uint64_t first, uint64_t last, uint64_t certain, Bytes bytes, Consider consider) {
    const bool each = last - first < kEach;
    for (uint64_t count = first; count < last;) {
      consider(count, bytes(count));
      if (!each && certain == kNone) break;
      count += each ? 1 : std::max<uint64_t>((count - certain) / kStep, 1);
    }
    consider(last, bytes(last));
    plateau_ends(first, last, bytes, [&](uint64_t count) { consider(count, bytes(count)); });
  }

  // Where the cost is one of packets: the numbers in [first, last) that fill a packet; of many the outer ones, since between
  // them there is no maximum.
  template <class Bytes, class Consider>
  void plateau_ends(uint64_t first, uint64_t last, Bytes bytes, Consider consider) {
    if (cost_.kind != CostKind::kPackets || first >= last) return;
    const auto packets = [&](uint64_t count) { return std::ceil(bytes(count) / cost_.packet_bytes); };
    const double least = packets(first), most = packets(last);
    for (double k = least; k < most; ++k) {
      if (k == least + kPlateaus && most - kPlateaus > k) k = most - kPlateaus;
      uint64_t low = first, high = last;  // the last one that takes k packets
      while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        (packets(middle) <= k ? low : high) = middle;
      }
      if (packets(low) <= k) consider(low);
    }
  }

  void consider(const Choice& choice) {
    if (best_.count == 0 || choice.improvement * best_.cost > best_.improvement * choice.cost) best_ = choice;
  }

  static constexpr uint64_t kNone = ~uint64_t{0};

  Scheme scheme_;
  const std::vector<Magnitudes::Bin>& bins_;
  const PayloadSize& size_;
  const CostModel& cost_;
  uint64_t nonzero_ = 0;
  double total_ = 0, total_sq_ = 0;
  Choice best_;
};

}  // namespace

Choice choose(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost) {
  return Chooser(scheme, bins, size, cost).run();
}

Choice choose_count(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost,
                    uint64_t count) {
  return Chooser(scheme, bins, size, cost).run(std::max<uint64_t>(count, 1));
}

}  // namespace hvd_compress
