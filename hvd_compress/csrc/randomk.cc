// Random sparsification (Stich et al., NeurIPS 2018, arXiv 1809.07599, "rand-k"; here stratified): of every `bin` consecutive
// elements, one. All ranks draw the same ones, from a seed that they share, so that no index is sent, and the mean of what they
// send is that of as few.
//
// Payload: checksum, uint64 key, for each bin the element as float32: that of bin b is drawn from key + b. Values of NaN: it was
// not finite.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "moments.h"
#include "random.h"

namespace hvd_compress {
namespace {

constexpr size_t kTile = 1024;
constexpr size_t kHead = kChecksumBytes + sizeof(uint64_t);

class RandomK final : public Codec {
 public:
  RandomK(size_t bin, bool feedback) : bin_(bin), feedback_(feedback) {
    if (bin < 1) throw std::invalid_argument("randomk: bin out of range");
  }

  size_t max_payload(size_t n) const override { return kHead + bins(n) * sizeof(float); }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step& step,
                 uint8_t* out) const override {
    // Without feedback it is unbiased: an element is drawn once in so many times.
    return encode_drawn(grad, residual_in, residual_out, n, step.seed, !feedback_, out);
  }

  // The same elements again: nothing else is in the mean.
  Encoded encode_mean(const uint8_t* like, const float* mean, const float* residual_in, float* residual_out, size_t n,
                      const Step&, uint8_t* out) const override {
    return encode_drawn({mean, DType::kFloat32}, residual_in, residual_out, n, read_key(like), false, out);
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    check_length(bytes, max_payload(n), n);
    if (!add) std::fill(out, out + n, 0.0f);
    if (n > 0 && std::isnan(read_value(payload, 0))) {
      std::fill(out, out + n, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    const uint64_t key = read_key(payload);
    for (size_t b = 0; b < bins(n); ++b) out[drawn(key, b, n)] += weight * read_value(payload, b);
  }

  size_t grain() const override { return bin_; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t&, uint8_t* out) const override {
    check_length(bytes, max_payload(n), n);
    const size_t size = max_payload(end - begin);
    const uint64_t key = read_key(payload) + begin / bin_;
    std::memcpy(out + kChecksumBytes, &key, sizeof(key));
    std::memcpy(out + kHead, payload + kHead + begin / bin_ * sizeof(float), size - kHead);
    seal(out, size);
    return size;
  }

  bool shares_seed() const override { return true; }

 private:
  Encoded encode_drawn(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, uint64_t key,
                       bool unbiased, uint8_t* out) const {
    if (n > 0 && feedback_ != (residual_out != nullptr)) throw std::invalid_argument("randomk has a residual under error feedback");
    Moments moments;
    float tile[kTile];
    for (size_t begin = 0; begin < n; begin += kTile) {
      const size_t count = std::min(kTile, n - begin);
      add_moments(load_sum(grad, residual_in, begin, count, feedback_ ? residual_out + begin : tile), count, moments);
    }
    Encoded encoded;
    encoded.finite = moments.largest < static_cast<int32_t>(kInfinity);
    encoded.bytes = max_payload(n);
    encoded.selected = encoded.finite ? static_cast<int64_t>(bins(n)) : 0;
    for (size_t b = 0; b < bins(n); ++b) {
      const size_t at = drawn(key, b, n);
      float x = feedback_ ? residual_out[at] : *load_sum(grad, nullptr, at, 1, tile);
      if (feedback_) residual_out[at] = 0;
      if (unbiased) x = std::clamp(x * static_cast<float>(std::min(bin_, n - b * bin_)), -FLT_MAX, FLT_MAX);
      if (!encoded.finite) x = std::numeric_limits<float>::quiet_NaN();
      std::memcpy(out + kHead + b * sizeof(float), &x, sizeof(float));
    }
    if (feedback_) {
      Moments left;
      for (size_t begin = 0; begin < n; begin += kTile) add_moments(residual_out + begin, std::min(kTile, n - begin), left);
      encoded.residual_sq = left.sum_sq;
    }
    std::memcpy(out + kChecksumBytes, &key, sizeof(key));
    seal(out, encoded.bytes);
    return encoded;
  }

  size_t bins(size_t n) const { return (n + bin_ - 1) / bin_; }

  // The element that is drawn of a bin.
  size_t drawn(uint64_t key, size_t b, size_t n) const {
    const size_t size = std::min(bin_, n - b * bin_);
    return b * bin_ + static_cast<size_t>((mix64(key + b) >> 32) * size >> 32);
  }

  static uint64_t read_key(const uint8_t* payload) {
    uint64_t key;
    std::memcpy(&key, payload + kChecksumBytes, sizeof(key));
    return key;
  }

  static float read_value(const uint8_t* payload, size_t b) {
    float x;
    std::memcpy(&x, payload + kHead + b * sizeof(float), sizeof(float));
    return x;
  }

  size_t bin_;
  bool feedback_;
};

}  // namespace

std::unique_ptr<Codec> create_randomk(const Options& options) {
  return std::make_unique<RandomK>(static_cast<size_t>(options.bin), options.feedback);
}

}  // namespace hvd_compress
