// Sparsification: the T elements of largest magnitude, or T at random, and what CAT (Khirirat et al., arXiv 2003.06377) makes of
// it, which chooses T at every step.
//
//   kTopK        the T largest, as they are
//   kTopKSign    the sign of each of the T largest, times their mean magnitude
//   kStochastic  each with a probability p proportional to its magnitude, but 1 at most, so that E[Q] = g: the largest as they
//                are; of the others, which are no larger than `level`, x becomes sign(x) level with probability |x| / level
//
// Payload: checksum; where there are values uint32 how many; where there are signs uint32 how many, float32 level; then the
// indices of the values (see indices.h), the values as float32, the indices of the signs, and a bit for each sign, 1 where it is
// negative. A number of values, or where there are none of signs, of 2^32 - 1: it was not finite, and decodes to NaN.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "choice.h"
#include "drawn.h"
#include "indices.h"
#include "moments.h"
#include "pool.h"
#include "random.h"
#include "selected.h"

namespace hvd_compress {
namespace {

constexpr size_t kTile = Drawn::kMost;
constexpr uint32_t kNotFinite = 0xffffffffu;
constexpr uint64_t kAll = uint64_t{1} << 32;  // more than there are
constexpr uint32_t kBin = ~Magnitudes::kRest;  // the bits that tell a bin

bool has_values(Scheme scheme) { return scheme != Scheme::kTopKSign; }
bool has_signs(Scheme scheme) { return scheme != Scheme::kTopK; }
size_t head_bytes(Scheme scheme) { return kChecksumBytes + (has_values(scheme) ? 4 : 0) + (has_signs(scheme) ? 8 : 0); }

// The memory of it, kept.
struct Scratch {
  Selected values, signs;
  Drawn drawn;
};
Scratch& scratch() {
  thread_local Scratch kept;
  kept.values.clear();
  kept.signs.clear();
  kept.drawn.clear();
  return kept;
}

uint8_t* write_number(uint8_t* at, uint32_t number) {
  std::memcpy(at, &number, 4);
  return at + 4;
}

template <class Signs>
size_t write(Scheme scheme, size_t n, const Selected& values, Signs& signs, float level, uint8_t* out) {
  uint8_t* at = out + kChecksumBytes;
  if (has_values(scheme)) at = write_number(at, static_cast<uint32_t>(values.size()));
  if (has_signs(scheme)) at = write_number(write_number(at, static_cast<uint32_t>(signs.size())), bits_of(level));
  if (has_values(scheme)) {
    const IndexLayout layout(n, values.size());
    values.write_indices(layout, at);
    at += layout.bytes();
    std::memcpy(at, values.values(), values.size() * sizeof(float));
    at += values.size() * sizeof(float);
  }
  if (has_signs(scheme)) {
    const IndexLayout layout(n, signs.size());
    signs.write_indices(layout, at);
    at += layout.bytes();
    signs.write_signs(at);
    at += (signs.size() + 7) / 8;
  }
  seal(out, static_cast<size_t>(at - out));
  return static_cast<size_t>(at - out);
}

// Where everything is in a payload.
struct Layout {
  bool finite = true;
  uint32_t values = 0, signs = 0;
  float level = 0;
  const uint8_t *value_indices = nullptr, *value_numbers = nullptr, *sign_indices = nullptr, *sign_bits = nullptr;

  // Throws MalformedPayload.
  Layout(Scheme scheme, const uint8_t* payload, size_t bytes, size_t n) {
    check_head(bytes, head_bytes(scheme));
    const uint8_t* at = payload + kChecksumBytes;
    if (has_values(scheme)) values = read_number(at);
    if (has_signs(scheme)) {
      signs = read_number(at);
      level = float_of(read_number(at));
    }
    finite = (has_values(scheme) ? values : signs) != kNotFinite;
    if (!finite) {
      check_length(bytes, head_bytes(scheme), n);
      return;
    }
    if (values > n || signs > n) {
      throw MalformedPayload("a payload has " + std::to_string(std::max(values, signs)) + " of " + std::to_string(n) +
                             " elements");
    }
    if (!std::isfinite(level)) throw MalformedPayload("a payload has a level that is not finite");
    value_indices = at;
    value_numbers = value_indices + IndexLayout(n, values).bytes();
    sign_indices = value_numbers + values * sizeof(float);
    sign_bits = sign_indices + IndexLayout(n, signs).bytes();
    check_length(bytes, static_cast<size_t>(sign_bits + (signs + 7) / 8 - payload), n);
  }

  float value(size_t k) const {
    float x;
    std::memcpy(&x, value_numbers + k * sizeof(float), sizeof(float));
    return x;
  }
  bool negative(size_t k) const { return sign_bits[k / 8] >> k % 8 & 1; }

 private:
  static uint32_t read_number(const uint8_t*& at) {
    uint32_t number;
    std::memcpy(&number, at, 4);
    at += 4;
    return number;
  }
};

// See Scope in codec.h. A histogram of all magnitudes would take longer than all else. So of large segments it is one of a sample;
// what that finds tells which magnitudes are worth being looked at one by one, and of those the choice is made.
class SparseScope final : public Scope {
 public:
  SparseScope(Scheme scheme, double fraction, const CostModel& cost) : scheme_(scheme), fraction_(fraction), cost_(cost) {}

  bool add(uint32_t index, const Gradient& grad, const float* residual_in, float* residual_out, size_t n) override {
    if (n >= kNotFinite) throw std::invalid_argument("a segment of " + std::to_string(n) + " elements is too large to index");
    Part part{grad, residual_out, n};
    const uint64_t one_of = n >= kLarge ? kOneOf : 1;
    const Pool<Magnitudes>::Handle own = n > kSmall ? Pool<Magnitudes>::take() : nullptr;
    Moments moments;
    float tile[kTile];
    for (size_t begin = 0; begin < n; begin += kTile) {
      const size_t count = std::min(kTile, n - begin);
      const float* v = load_sum(grad, residual_in, begin, count, residual_out != nullptr ? residual_out + begin : tile);
      add_moments(v, count, moments);
      if (scheme_ == Scheme::kStochastic) add_magnitudes(v, count, part.sum);
      if (own == nullptr) continue;
      prefetch(grad, residual_in, residual_out, begin + kTile);  // while this one is counted
      const size_t some = count / one_of;
      own->add(one_of == 1 ? v : v + mix64(begin) % one_of * some, some);
    }
    part.finite = moments.largest < static_cast<int32_t>(kInfinity);
    part.energy = moments.sum_sq;
    const std::lock_guard lock(mutex_);
    if (part.finite) {
      if (own != nullptr) magnitudes_->add(*own, one_of);
      for (size_t begin = 0; own == nullptr && begin < n; begin += kTile) {
        const size_t count = std::min(kTile, n - begin);
        magnitudes_->add(sum_of(part, begin, count, tile), count);
      }
      n_ += n;
      largest_ = std::max(largest_, moments.largest);
      sampled_ = sampled_ || one_of > 1;
    }
    parts_[index] = part;
    return part.finite;
  }

  void choose(const Step& step) override {
    const std::lock_guard lock(mutex_);
    if (largest_ == 0) return;  // nothing to send
    choice_ = choice_of(magnitudes_->descending(largest_), step);
    if (sampled_) {
      choose_exactly(step);
    } else if (choice_.count > 0 && !is_drawn()) {
      collect(choice_.threshold, nullptr);
    }
    if (choice_.count > 0) least_ = static_cast<int32_t>(choice_.threshold);
    level_ = static_cast<float>(std::min(choice_.level, static_cast<double>(FLT_MAX)));
    if (choice_.within > 0) select_within();
  }

  Encoded encode(uint32_t index, uint64_t seed, uint8_t* out) override {
    const Part& part = parts_.at(index);
    Scratch& selected = scratch();
    Encoded encoded;
    encoded.finite = part.finite;
    encoded.selected = 0;
    if (!part.finite) {
      uint8_t* at = out + kChecksumBytes;
      if (has_values(scheme_)) at = write_number(at, kNotFinite);
      if (has_signs(scheme_)) write_number(write_number(at, has_values(scheme_) ? 0 : kNotFinite), 0);
      encoded.bytes = head_bytes(scheme_);
      seal(out, encoded.bytes);
      return encoded;
    }
    if (is_drawn()) {
      draw_from(part, seed, selected);
      encoded.bytes = write(scheme_, part.n, selected.values, selected.drawn, level_, out);
    } else {
      take_largest(part, has_values(scheme_) ? selected.values : selected.signs);
      encoded.bytes = write(scheme_, part.n, selected.values, selected.signs, level_, out);
    }
    encoded.selected = static_cast<int64_t>(selected.values.size() + selected.signs.size() + selected.drawn.size());
    if (part.residual != nullptr) encoded.residual_sq = subtract(part, selected);
    encoded.energy = part.energy;
    encoded.improvement = choice_.improvement;
    return encoded;
  }

 private:
  static constexpr size_t kSmall = 16384;  // elements that are worth no histogram of their own
  static constexpr size_t kLarge = size_t{1} << 18;  // elements of which a sample is enough:
  static constexpr uint64_t kOneOf = 16;   // that part of each tile
  static constexpr size_t kAhead = 32;     // elements, in a residual that is not in the cache
  static constexpr uint32_t kNonzero = 1;  // the magnitude bits of the smallest
  static constexpr double kMargin = 0.9;   // of the sample's threshold: what is not below is looked at

  struct Part {
    Gradient grad;
    float* residual;  // holds its sum with the gradient, or null
    size_t n;
    bool finite = true;
    double energy = 0, sum = 0;  // the latter where it is needed
    size_t first = 0, last = 0;  // of collected_
  };

  // A tile, as load_sum reads it.
  static void prefetch(const Gradient& grad, const float* residual_in, const float* residual_out, size_t begin) {
    const size_t width = grad.dtype == DType::kFloat32 ? 4 : grad.dtype == DType::kFloat64 ? 8 : 2;
    const char* from = static_cast<const char*>(grad.data) + begin * width;
    for (size_t i = 0; i < kTile * width; i += 64) __builtin_prefetch(from + i);
    if (residual_in == nullptr) return;
    for (size_t i = 0; i < kTile; i += 16) {
      __builtin_prefetch(residual_in + begin + i);
      __builtin_prefetch(residual_out + begin + i, 1);
    }
  }

  // What is to be sent.
  static const float* sum_of(const Part& part, size_t begin, size_t count, float* tile) {
    return part.residual != nullptr ? part.residual + begin : load_sum(part.grad, nullptr, begin, count, tile);
  }

  Choice choice_of(const std::vector<Magnitudes::Bin>& bins, const Step& step) const {
    const PayloadSize size(n_, parts_.size(), head_bytes(scheme_));
    const CostModel cost = cost_.measured(step);
    const double explored = scheme_ == Scheme::kStochastic ? step.explore_unbiased() : step.explore;
    const double fraction = fraction_ == 0 && cost.kind == CostKind::kMeasured ? explored : fraction_;
    if (fraction == 0) return hvd_compress::choose(scheme_, bins, size, cost);
    return choose_count(scheme_, bins, size, cost, static_cast<uint64_t>(std::llround(fraction * static_cast<double>(n_))));
  }

  // Whether it is left to chance what is sent of the smaller ones.
  bool is_drawn() const { return scheme_ == Scheme::kStochastic && choice_.level > 0; }

  // What has to be known exactly: all magnitudes from here on; below it only what they are altogether, which the sample tells.
  double reach() const { return is_drawn() ? choice_.level : static_cast<double>(float_of(choice_.threshold)); }

  // Replaces a choice that a sample led to.
  void choose_exactly(const Step& step) {
    const std::vector<Magnitudes::Bin> estimated = magnitudes_->descending(largest_);
    uint32_t edge = margin();
    for (bool again = false;; again = true) {
      const Pool<Magnitudes>::Handle exact = Pool<Magnitudes>::take();
      collect(edge, exact.get());
      std::vector<Magnitudes::Bin> bins = exact->descending(largest_);
      append_below(edge, estimated, bins);
      choice_ = choice_of(bins, step);
      uint64_t all = 0;
      for (const auto& bin : bins) all += bin.count;
      const bool is_known = edge == kNonzero ? reach() > 0 : reach() >= static_cast<double>(float_of(edge)) && choice_.count < all;
      if (edge == 0 || is_known) break;
      edge = edge == kNonzero ? 0 : again || choice_.count >= all ? kNonzero : margin();
    }
    choice_.total_sq = 0;
    for (const auto& [_, part] : parts_) choice_.total_sq += part.finite ? part.energy : 0;
  }

  // From where on magnitudes are worth being looked at, for all that is known; 0: all.
  uint32_t margin() const {
    if (reach() == 0) return 0;
    return std::max(bits_of(static_cast<float>(std::min(kMargin * reach(), static_cast<double>(FLT_MAX)))) & kBin, kNonzero);
  }

  // Adds what is estimated of the magnitudes below; where their sum matters, so that it is right.
  void append_below(uint32_t edge, const std::vector<Magnitudes::Bin>& estimated, std::vector<Magnitudes::Bin>& bins) const {
    double right = 0, sum = 0;
    for (const auto& [_, part] : parts_) right += part.finite ? part.sum : 0;
    for (const auto& bin : bins) right -= static_cast<double>(bin.count) * bin.mean;
    const size_t exact = bins.size();
    for (const auto& bin : estimated) {
      if (bin.edge >= edge) continue;
      sum += static_cast<double>(bin.count) * bin.mean;
      bins.push_back(bin);
    }
    if (scheme_ != Scheme::kStochastic || !(right > 0)) return;
    for (size_t b = exact; b < bins.size(); ++b) bins[b].mean *= right / sum;
  }

  // Puts all of at least that magnitude into collected_, and counts them.
  void collect(uint32_t edge, Magnitudes* counted) {
    collected_->clear();
    float tile[kTile];
    for (auto& [_, part] : parts_) {
      part.first = collected_->size();
      for (size_t begin = 0; part.finite && begin < part.n; begin += kTile) {
        const size_t count = std::min(kTile, part.n - begin);
        select_largest(sum_of(part, begin, count, tile), count, begin, static_cast<int32_t>(edge), *collected_);
      }
      part.last = collected_->size();
    }
    for (size_t k = 0; counted != nullptr && k < collected_->size(); k += kTile) {
      counted->add(collected_->values() + k, std::min(kTile, collected_->size() - k));
    }
  }

  // Of the bin that the threshold is the edge of, some may be sent: finds the least of them, and how many are equal to it.
  void select_within() {
    double sum = static_cast<double>(choice_.within) * choice_.mean, sum_sq = sum * choice_.mean;
    if (choice_.within < choice_.in_bin) {
      std::vector<uint32_t> bin;
      for (size_t k = 0; k < collected_->size(); ++k) {
        const uint32_t magnitude = bits_of(collected_->value(k)) & ~kSign;
        if ((magnitude & kBin) == choice_.threshold) bin.push_back(magnitude);
      }
      const auto last = bin.begin() + static_cast<std::ptrdiff_t>(choice_.within) - 1;
      std::nth_element(bin.begin(), last, bin.end(), std::greater<>());
      least_ = static_cast<int32_t>(*last);
      ties_ = static_cast<uint64_t>(std::count(bin.begin(), last + 1, *last));
      sum = sum_sq = 0;
      for (auto at = bin.begin(); at <= last; ++at) {
        const double magnitude = float_of(*at);
        sum += magnitude;
        sum_sq += magnitude * magnitude;
      }
    }
    choice_.improvement = std::min(choice_.improvement_of(scheme_, sum, sum_sq), 1.0);
    if (scheme_ == Scheme::kTopKSign) level_ = static_cast<float>((choice_.sum_above + sum) / static_cast<double>(choice_.count));
  }

  void take_largest(const Part& part, Selected& selected) {
    selected.grow(part.last - part.first);
    Selected::Writer writer(selected);
    uint64_t ties = ties_;
    for (size_t k = part.first; k < part.last; ++k) {
      const int32_t magnitude = magnitude_bits(collected_->value(k));
      const bool tie = magnitude == least_ && ties > 0;
      writer.push(collected_->index(k), collected_->value(k), magnitude > least_ || tie);
      ties -= tie ? 1 : 0;
    }
    ties_ = ties;
  }

  void draw_from(const Part& part, uint64_t seed, Scratch& selected) const {
    const Random random(seed, 0);
    float tile[kTile];
    for (size_t begin = 0; begin < part.n; begin += kTile) {
      const size_t count = std::min(kTile, part.n - begin);
      selected.drawn.draw(sum_of(part, begin, count, tile), count, begin, least_, level_, random, selected.values);
    }
  }

  // Takes what is sent off the residual; returns the square of its norm.
  double subtract(const Part& part, const Scratch& selected) const {
    double sent = 0;
    const auto fetch = [&](const Selected& all, size_t k) {
      if (k + kAhead < all.size()) __builtin_prefetch(part.residual + all.index(k + kAhead), 1);
    };
    for (size_t k = 0; k < selected.values.size(); ++k) {
      fetch(selected.values, k);
      part.residual[selected.values.index(k)] = 0;
      sent += static_cast<double>(selected.values.value(k)) * static_cast<double>(selected.values.value(k));
    }
    for (size_t k = 0; k < selected.signs.size(); ++k) {
      fetch(selected.signs, k);
      const float x = selected.signs.value(k), left = x - float_of(bits_of(level_) | (bits_of(x) & kSign));
      part.residual[selected.signs.index(k)] = left;
      sent += static_cast<double>(x) * static_cast<double>(x) - static_cast<double>(left) * static_cast<double>(left);
    }
    if (sent < 0.9 * part.energy) return part.energy - sent;
    Moments moments;  // else what is left is too small a difference
    for (size_t begin = 0; begin < part.n; begin += kTile) {
      add_moments(part.residual + begin, std::min(kTile, part.n - begin), moments);
    }
    return moments.sum_sq;
  }

  const Scheme scheme_;
  const double fraction_;
  const CostModel cost_;
  std::mutex mutex_;
  const Pool<Magnitudes>::Handle magnitudes_ = Pool<Magnitudes>::take();
  std::map<uint32_t, Part> parts_;
  // Of all that are finite: how many elements, the magnitude bits of the largest, and whether they were but sampled.
  uint64_t n_ = 0;
  int32_t largest_ = 0;
  bool sampled_ = false;
  Choice choice_;
  const Pool<Selected>::Handle collected_ = Pool<Selected>::take();  // from all parts
  int32_t least_ = static_cast<int32_t>(kInfinity);  // magnitude bits of the smallest that is selected,
  uint64_t ties_ = kAll;                             // of which so many are still to be selected
  float level_ = 0;
};

class Sparsifier final : public Codec {
 public:
  Sparsifier(Scheme scheme, double fraction, const CostModel& cost, bool joint)
      : scheme_(scheme), fraction_(fraction), cost_(cost), joint_(joint) {}

  size_t max_payload(size_t n) const override {
    const size_t bits = (n + 7) / 8;
    return head_bytes(scheme_) + (has_values(scheme_) ? bits + 4 * n : 0) + (has_signs(scheme_) ? 2 * bits : 0);
  }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step& step,
                 uint8_t* out) const override {
    SparseScope scope(scheme_, fraction_, cost_);
    scope.add(0, grad, residual_in, residual_out, n);
    scope.choose(step);
    return scope.encode(0, step.seed, out);
  }

  std::unique_ptr<Scope> scope() const override {
    return joint_ ? std::make_unique<SparseScope>(scheme_, fraction_, cost_) : nullptr;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    const Layout layout(scheme_, payload, bytes, n);
    if (!layout.finite) {
      std::fill(out, out + n, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    if (!add) std::fill(out, out + n, 0.0f);
    IndexLayout(n, layout.values).read(layout.value_indices, [&](size_t k, size_t i) { out[i] += weight * layout.value(k); });
    const float level = weight * layout.level;
    IndexLayout(n, layout.signs).read(layout.sign_indices, [&](size_t k, size_t i) {
      out[i] += layout.negative(k) ? -level : level;
    });
  }

  size_t grain() const override { return 1; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t& cursor,
             uint8_t* out) const override {
    const Layout layout(scheme_, payload, bytes, n);
    if (!layout.finite) {
      std::memcpy(out, payload, bytes);
      return bytes;
    }
    // The cursor: how many values, and above them how many signs, have gone before.
    const size_t values = cursor & 0xffffffffu, signs = cursor >> 32;
    Scratch& selected = scratch();
    const auto keep = [&](Selected& kept, size_t i, float value) {
      kept.grow(1);
      kept.push(i - begin, value);
    };
    const size_t to = IndexLayout(n, layout.values).read(layout.value_indices, values, begin, end, [&](size_t k, size_t i) {
      keep(selected.values, i, layout.value(k));
    });
    const size_t signs_to = IndexLayout(n, layout.signs).read(layout.sign_indices, signs, begin, end, [&](size_t k, size_t i) {
      keep(selected.signs, i, layout.negative(k) ? -1.0f : 1.0f);
    });
    cursor = to | signs_to << 32;
    return write(scheme_, end - begin, selected.values, selected.signs, layout.level, out);
  }

 private:
  Scheme scheme_;
  double fraction_;
  CostModel cost_;
  bool joint_;
};

}  // namespace

std::unique_ptr<Codec> create_sparsifier(const Options& options) {
  return std::make_unique<Sparsifier>(options.scheme, options.fraction, options.cost, options.joint);
}

}  // namespace hvd_compress
