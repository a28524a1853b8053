// A quantizer that chooses its bits by CAT's rule (Khirirat et al., arXiv 2003.06377): the largest improvement over cost. Of an
// unbiased Q the improvement is ||g||^2 / E||Q||^2 = 1 / (1 + w), w = E||Q - g||^2 / ||g||^2, as of a stochastic sparsification;
// under error feedback it is the part of g's energy that contracted values take, 2 c - c^2 (1 + w). w is that of the gradient
// itself, of a sample of it where it is large.
//
// Payload: the number of bits in each of four bytes, then the payload of that quantizer.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "quantizer.h"

namespace hvd_compress {
namespace {

constexpr int kLeast = 2, kMost = 8;
constexpr size_t kHead = 4;
constexpr size_t kTile = 512;
constexpr size_t kSample = 16384;  // elements that tell enough

class AutoQuantizer final : public Codec {
 public:
  AutoQuantizer(Kind kind, const Options& options)
      : kind_(kind), bucket_(static_cast<size_t>(options.bucket)), coding_(options.coding), feedback_(options.feedback),
        cost_(options.cost) {
    Options with = options;
    for (with.bits = kLeast; with.bits <= kMost; ++with.bits) of_bits_[with.bits] = create_quantizer(kind, with);
  }

  size_t max_payload(size_t n) const override { return kHead + of_bits_[kMost]->max_payload(n); }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step& step,
                 uint8_t* out) const override {
    const auto [bits, improvement] = choose(grad, residual_in, n, step);
    std::memset(out, bits, kHead);
    Encoded encoded = of_bits_[bits]->encode(grad, residual_in, residual_out, n, step, out + kHead);
    encoded.bytes += kHead;
    encoded.improvement = improvement;
    if (!encoded.finite) encoded.energy = 0;  // or it would be NaN in every sum
    return encoded;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    of(payload, bytes).decode(payload + kHead, bytes - kHead, weight, add, out, n);
  }

  size_t grain() const override { return bucket_; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t& cursor,
             uint8_t* out) const override {
    const Codec& codec = of(payload, bytes);  // which checks that there is a head
    std::memmove(out, payload, kHead);
    return kHead + codec.cut(payload + kHead, bytes - kHead, n, begin, end, cursor, out + kHead);
  }

 private:
  using OfBits = std::array<double, kMost + 1>;

  struct Choice {
    int bits;
    double improvement;
  };

  // The part of a gradient that is looked at: every bucket, or one in so many, and of its tiles one in so many.
  struct Sample {
    double energy = 0;
    OfBits error = {};  // E||Q - g||^2
  };

  const Codec& of(const uint8_t* payload, size_t bytes) const {
    check_head(bytes, kHead);
    const int bits = payload[0];
    for (size_t i = 0; i < kHead; ++i) {
      if (payload[i] != bits || bits < kLeast || bits > kMost) {
        throw MalformedPayload("a payload of " + std::to_string(bits) + " bits, or of several numbers of bits");
      }
    }
    return *of_bits_[bits];
  }

  Choice choose(const Gradient& grad, const float* residual, size_t n, const Step& step) const {
    if (step.explore > 0 && cost_.kind == CostKind::kMeasured) {
      const int least = feedback_ ? kLeast : 5;  // what fewer bits make of a gradient may be several times as long
      const int more = step.explore > 0.05 ? kMost : step.explore > 0.005 ? 2 : step.explore > 0.0005 ? 1 : 0;
      return {std::min(least + more, kMost), 0};
    }
    const Sample sample = look_at(grad, residual, n);
    if (!(sample.energy > 0)) return {kLeast, 0};
    const CostModel cost = cost_.measured(step);
    Choice best{kLeast, -1};
    double best_cost = 1;
    for (int bits = kLeast; bits <= kMost; ++bits) {
      const double w = sample.error[bits] / sample.energy;
      const double c = contraction(kind_, bits, bucket_);
      const double improvement = feedback_ ? std::max(0.0, 2 * c - c * c * (1 + w)) : 1 / (1 + w);
      const double of_bits = cost.of(static_cast<double>(kHead) + bytes_of(bits, grad, residual, n));
      if (improvement * best_cost <= best.improvement * of_bits) continue;
      best = {bits, improvement};
      best_cost = of_bits;
    }
    return best;
  }

  Sample look_at(const Gradient& grad, const float* residual, size_t n) const {
    Sample sample;
    float tile[kTile];
    const size_t buckets = (n + bucket_ - 1) / bucket_;
    const size_t step = std::min(std::max<size_t>(n / kSample, 1), std::max<size_t>(buckets, 1));
    for (size_t b = 0; b < buckets; b += step) {
      const size_t start = b * bucket_, length = std::min(bucket_, n - start);
      Moments moments;
      for (size_t t = 0; t < length; t += kTile) {
        const size_t count = std::min(kTile, length - t);
        add_moments(load_sum(grad, residual, start + t, count, tile), count, moments);
      }
      const float norm = bucket_norm(kind_, moments);
      if (!(norm > 0)) continue;  // nothing to round, or not finite
      sample.energy += moments.sum_sq;
      const size_t tile_step = std::max<size_t>(length / kSample, 1);
      for (size_t t = 0; t < length; t += kTile * tile_step) {
        const size_t count = std::min(kTile, length - t);
        const float* v = load_sum(grad, residual, start + t, count, tile);
        for (int bits = kLeast; bits <= kMost; ++bits) {
          sample.error[bits] += static_cast<double>(tile_step) * rounding_error(kind_, bits, v, count, norm);
        }
      }
    }
    return sample;
  }

  // What a payload takes with so many bits. Of Elias codes that shows where some buckets are encoded.
  double bytes_of(int bits, const Gradient& grad, const float* residual, size_t n) const {
    const Codec& codec = *of_bits_[bits];
    if (coding_ == Coding::kFixed) return static_cast<double>(codec.max_payload(n));
    const size_t whole = std::max<size_t>(kSample / bucket_, 1) * bucket_, count = std::min(n, whole);
    std::vector<float> some(count), left(feedback_ ? count : 0);
    const std::vector<float> none(left.size());
    const float* v = load_sum(grad, residual, 0, count, some.data());
    std::vector<uint8_t> out(codec.max_payload(count));
    const Encoded encoded = codec.encode({v, DType::kFloat32}, feedback_ ? none.data() : nullptr,
                                         feedback_ ? left.data() : nullptr, count, Step(), out.data());
    return static_cast<double>(encoded.bytes) * static_cast<double>(n) / static_cast<double>(std::max<size_t>(count, 1));
  }

  Kind kind_;
  size_t bucket_;
  Coding coding_;
  bool feedback_;
  CostModel cost_;
  std::array<std::unique_ptr<Codec>, kMost + 1> of_bits_;
};

}  // namespace

std::unique_ptr<Codec> create_auto_quantizer(Kind kind, const Options& options) {
  return std::make_unique<AutoQuantizer>(kind, options);
}

}  // namespace hvd_compress
