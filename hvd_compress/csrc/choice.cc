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
constexpr uint64_t kSteps = 8;  // numbers of elements that are tried inside a bin, where the best may be there

// Walks through the numbers of elements that can be the best, and keeps that one.
class Chooser {
 public:
  Chooser(Scheme scheme, const std::vector<Magnitudes::Bin>& bins, const PayloadSize& size, const CostModel& cost)
      : scheme_(scheme), bins_(bins), size_(size), cost_(cost) {
    for (const auto& bin : bins) {
      const double count = static_cast<double>(bin.count);
      nonzero_ += bin.count;
      total_ += count * bin.mean;
      total_sq_ += count * bin.mean * bin.mean;
    }
  }

  // All T, or `only` that one.
  Choice run(uint64_t only = 0) {
    if (nonzero_ == 0) return {};
    only = std::min(only, only < size_.n() ? nonzero_ : size_.n());
    scheme_ == Scheme::kStochastic ? water_fill(only) : select(only);
    return best_;
  }

 private:
  // The state of a walk: what the bins above hold.
  struct Above {
    uint64_t count = 0;
    double sum = 0, sum_sq = 0;

    void add(const Magnitudes::Bin& bin) {
      count += bin.count;
      sum += static_cast<double>(bin.count) * bin.mean;
      sum_sq += static_cast<double>(bin.count) * bin.mean * bin.mean;
    }
  };

  void select(uint64_t only) {
    Above above;
    for (const auto& bin : bins_) {
      const auto consider_within = [&](uint64_t count) { consider_selection(count, above, bin); };
      const uint64_t last = above.count + bin.count;
      if (only > 0) {
        if (only > above.count && only <= last) consider_within(only);
      } else {
        consider_within(last);
        const auto signs = scheme_ == Scheme::kTopKSign;
        plateau_ends(above.count + 1, last, [&](uint64_t count) { return signs ? size_.of(0, count) : size_.of(count, 0); },
                     consider_within);
      }
      above.add(bin);
    }
    // All, with the zeros: no index has to be sent.
    if (size_.n() > nonzero_ && (only == 0 || only == size_.n())) {
      consider_selection(size_.n(), above, {0, size_.n() - nonzero_, 0.0});
    }
  }

  void consider_selection(uint64_t count, const Above& above, const Magnitudes::Bin& bin) {
    const uint64_t within = count - above.count;
    const double sum = above.sum + static_cast<double>(within) * bin.mean;
    const double sum_sq = above.sum_sq + static_cast<double>(within) * bin.mean * bin.mean;
    Choice choice;
    choice.count = count;
    choice.threshold = bin.edge;
    choice.within = within;
    choice.in_bin = bin.count;
    choice.mean = bin.mean;
    choice.sum = sum;
    const bool signs = scheme_ == Scheme::kTopKSign;
    choice.improvement = signs ? sum * sum / (static_cast<double>(count) * total_sq_) : sum_sq / total_sq_;
    choice.cost = cost_.of(signs ? size_.of(0, count) : size_.of(count, 0));
    consider(choice);
  }

  // Between two bins the same elements are sent as they are. The others share what is left of T, in proportion to their
  // magnitudes; `level` is what the probability of 1 would belong to.
  void water_fill(uint64_t only) {
    Above above;
    uint64_t done = 0;
    for (const auto& bin : bins_) {
      const double rest = total_ - above.sum;
      const uint64_t first = std::max(done, above.count) + 1;
      const auto last = std::min(above.count + static_cast<uint64_t>(rest / bin.mean * kRounding), nonzero_);
      const auto consider_filled = [&](uint64_t count) {
        const double signs = static_cast<double>(count - above.count);
        Choice choice;
        choice.count = count;
        choice.level = rest / signs;
        choice.improvement = total_sq_ / (above.sum_sq + rest * choice.level);
        choice.cost = cost_.of(size_.of(above.count, count - above.count));
        consider(choice);
      };
      if (only > 0) {
        if (first <= only && only <= last) consider_filled(only);
      } else if (first <= last) {
        for (uint64_t k = 0; k <= kSteps; ++k) consider_filled(first + (last - first) * k / kSteps);
        plateau_ends(first, last, [&](uint64_t count) { return size_.of(above.count, count - above.count); }, consider_filled);
      }
      done = std::max(done, last);
      above.add(bin);
    }
    if (only == 0 || best_.count == 0) {  // all of them, as they are, with or without the zeros
      for (const uint64_t count : {nonzero_, size_.n()}) {
        Choice choice;
        choice.count = count;
        choice.improvement = 1;
        choice.cost = cost_.of(size_.of(count, 0));
        consider(choice);
      }
    }
  }

  // Where the cost is one of packets: the numbers in [first, last) that fill a packet; of many the outer ones, since between
  // them there is no maximum.
  template <class Bytes, class Consider>
  void plateau_ends(uint64_t first, uint64_t last, Bytes bytes, Consider consider) {
    if (cost_.kind != CostKind::kPackets || first >= last) return;
    const auto packets = [&](uint64_t count) { return std::ceil(bytes(count) / cost_.packet_bytes); };
    const double least = packets(first), most = packets(last);
    for (double k = least; k < most; ++k) {
      if (k == least + kSteps && most - kSteps > k) k = most - kSteps;
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
