// One bit an element, and one scale: EF-signSGD (Karimireddy et al., ICML 2019, arXiv 1901.09847), and the compression of
// APMSqueeze (Tang et al., arXiv 2008.11343). What is sent of u = gradient + residual is sign(u) times its mean magnitude
// ("l1") or its root mean square ("l2"); sign(0) = +1.
//
// Payload: checksum, float32 scale, one bit an element from the low bit up, 1 where it is negative; what fills the last byte
// is 0. A scale of NaN: u was not finite, and it decodes to NaN.
#include <cmath>
#include <limits>

#include "moments.h"

namespace hvd_compress {
namespace {

constexpr size_t kTile = 1024;
constexpr size_t kHead = kChecksumBytes + sizeof(float);

HVD_SIMD void write_signs(const float* u, size_t count, uint8_t* out) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) out[i / 8] = static_cast<uint8_t>(lane_bits(load_vector<Floats>(u + i) < 0.0f));
  if (i < count) {
    uint8_t last = 0;
    for (size_t j = i; j < count; ++j) last = static_cast<uint8_t>(last | (u[j] < 0.0f) << (j - i));
    out[i / 8] = last;
  }
}

// u[i] -= sign(u[i]) scale.
HVD_SIMD void subtract_signs(float* u, size_t count, float scale) {
  for (size_t i = 0; i < count; ++i) u[i] -= u[i] < 0.0f ? -scale : scale;
}

// out[i] = value, with the sign that stands in bit i; or it is added.
template <bool add>
HVD_INLINE void put_signed(const uint8_t* bits, size_t count, float value, float* out) {
  const Ints place = {1, 2, 4, 8, 16, 32, 64, 128};
  const Floats plus = value - Floats{}, minus = -plus;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints set = (static_cast<int32_t>(bits[i / 8]) - Ints{}) & place;
    const Floats decoded = set != 0 ? minus : plus;
    store_vector(out + i, add ? load_vector<Floats>(out + i) + decoded : decoded);
  }
  for (; i < count; ++i) out[i] = (add ? out[i] : 0.0f) + (bits[i / 8] >> i % 8 & 1 ? -value : value);
}

HVD_SIMD void decode_signs(const uint8_t* bits, size_t count, float value, bool add, float* out) {
  add ? put_signed<true>(bits, count, value, out) : put_signed<false>(bits, count, value, out);
}

class OneBit final : public Codec {
 public:
  explicit OneBit(Scale scale) : scale_(scale) {}

  size_t max_payload(size_t n) const override { return kHead + (n + 7) / 8; }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step&,
                 uint8_t* out) const override {
    if (n > 0 && (residual_in == nullptr || residual_out == nullptr))
      throw std::invalid_argument("onebit needs a residual");
    Moments moments;
    double magnitudes = 0;
    for (size_t begin = 0; begin < n; begin += kTile) {
      const size_t count = std::min(kTile, n - begin);
      float* u = residual_out + begin;  // where it is needed again
      load_sum(grad, residual_in, begin, count, u);
      add_moments(u, count, moments);
      if (scale_ == Scale::kL1) add_magnitudes(u, count, magnitudes);
      write_signs(u, count, out + kHead + begin / 8);
    }
    Encoded encoded;
    encoded.bytes = max_payload(n);
    encoded.finite = moments.largest < static_cast<int32_t>(kInfinity);
    const double mean = n == 0                    ? 0
                        : scale_ == Scale::kL1 ? magnitudes / static_cast<double>(n)
                                               : std::sqrt(moments.sum_sq / static_cast<double>(n));
    const float scale = encoded.finite ? static_cast<float>(mean) : std::numeric_limits<float>::quiet_NaN();
    Moments left;
    for (size_t begin = 0; begin < n; begin += kTile) {
      const size_t count = std::min(kTile, n - begin);
      subtract_signs(residual_out + begin, count, scale);
      add_moments(residual_out + begin, count, left);
    }
    encoded.residual_sq = left.sum_sq;
    std::memcpy(out + kChecksumBytes, &scale, sizeof(scale));
    seal(out, encoded.bytes);
    return encoded;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    check_length(bytes, max_payload(n), n);
    float scale;
    std::memcpy(&scale, payload + kChecksumBytes, sizeof(scale));
    decode_signs(payload + kHead, n, weight * scale, add, out);
  }

  size_t grain() const override { return 8; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t&, uint8_t* out) const override {
    check_length(bytes, max_payload(n), n);
    const size_t size = max_payload(end - begin);
    std::memcpy(out, payload, kHead);
    std::memcpy(out + kHead, payload + kHead + begin / 8, size - kHead);
    seal(out, size);
    return size;
  }

 private:
  Scale scale_;
};

}  // namespace

std::unique_ptr<Codec> create_onebit(const Options& options) { return std::make_unique<OneBit>(options.scale); }

}  // namespace hvd_compress
