// QSGD and QSGDinf (Alistarh et al., NeurIPS 2017, arXiv 1610.02132) and NUQSGD (Ramezani-Kebrya et al., JMLR 2021,
// arXiv 1908.06077): each bucket of consecutive values is divided by its norm, and every magnitude is rounded at random to
// one of the two levels around it, so that the expectation is the value.
//
// Fixed payload: checksum, then per bucket a float32 norm and its codes (level | sign << (bits - 1)), see bitpack.h.
// Elias payload: checksum, then one stream of bits, per bucket the 32 bits of the norm, omega(nonzeros + 1), and for each
// nonzero omega(distance from the one before), a sign bit, omega(level).
// A norm of NaN: the bucket was not finite, and it decodes to NaN.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bitpack.h"
#include "elias.h"
#include "moments.h"
#include "quantizer.h"
#include "random.h"

namespace hvd_compress {
namespace {

constexpr size_t kTile = 512;  // codes that are made, and packed, while they sit in L1

// Levels k / s, k = 0..s (QSGD).
struct Uniform {
  int32_t levels;  // s = 2^(bits-1) - 1
  float unit;      // value of level 1, norm / s
  HVD_INLINE Uniform(int bits, float norm) : levels((1 << (bits - 1)) - 1), unit(norm / static_cast<float>(levels)) {}

  // ratio = |v| / norm in [0, 1]; up with probability the fraction.
  HVD_INLINE uint32_t level(float ratio, uint32_t random) const {
    const float x = ratio * static_cast<float>(levels);
    const int32_t low = static_cast<int32_t>(x);
    const int32_t threshold = static_cast<int32_t>((x - static_cast<float>(low)) * 0x1p24f);
    return static_cast<uint32_t>(low + (static_cast<int32_t>(random >> 8) < threshold));
  }
  HVD_INLINE float value(uint32_t level) const {
    return std::min(static_cast<float>(static_cast<int32_t>(level)) * unit, FLT_MAX);
  }
};

// Levels 0 and 2^-s, ..., 1/2, 1, numbered 0..s+1 (NUQSGD). Between 2^e and 2^(e+1) the probability of going up is the
// float's own mantissa, so that the rounding is exact.
struct Exponential {
  int32_t s;       // 2^(bits-1) - 2
  int32_t lowest;  // biased exponent of 2^-s
  float norm;
  HVD_INLINE Exponential(int bits, float norm) : s((1 << (bits - 1)) - 2), lowest(127 - s), norm(norm) {}

  HVD_INLINE uint32_t level(float ratio, uint32_t random) const {
    const int32_t bits = static_cast<int32_t>(bits_of(ratio));
    const int32_t exponent = (bits >> 23) - lowest;
    const int32_t up = static_cast<int32_t>(random >> 9) < (bits & 0x7fffff);
    const float below = ratio * float_of(static_cast<uint32_t>(127 + s) << 23);  // in [0, 1) where exponent < 0
    const int32_t threshold = static_cast<int32_t>(std::min(below, 1.0f) * 0x1p24f);
    const int32_t first = static_cast<int32_t>(random >> 8) < threshold;
    return static_cast<uint32_t>(exponent >= 0 ? exponent + 1 + up : first);
  }
  HVD_INLINE float value(uint32_t level) const {
    const uint32_t power = static_cast<uint32_t>(lowest + static_cast<int32_t>(level) - 1) << 23;
    return norm * float_of(level == 0 ? 0u : power);
  }
};

// The expected square of what rounding changes: between neighbours l < a < u that is (a - l) (u - a).
template <typename Levels>
HVD_INLINE double error_of(const float* v, size_t count, float norm, int bits) {
  const Levels levels(bits, norm);
  float sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const float a = float_of(bits_of(v[i]) & ~kSign);
    const uint32_t low = levels.level(a / norm, 0xffffffffu);  // never up
    sum += (a - levels.value(low)) / norm * ((levels.value(low + 1) - a) / norm);
  }
  return static_cast<double>(sum) * static_cast<double>(norm) * static_cast<double>(norm);
}

HVD_SIMD double error_uniform(const float* v, size_t count, float norm, int bits) {
  return error_of<Uniform>(v, count, norm, bits);
}

HVD_SIMD double error_exponential(const float* v, size_t count, float norm, int bits) {
  return error_of<Exponential>(v, count, norm, bits);
}

// At least the largest magnitude, so that no ratio exceeds 1, and at most FLT_MAX; NaN where a value is not finite.
float norm_of(const Moments& m, bool l2) {
  if (m.largest >= static_cast<int32_t>(kInfinity)) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = float_of(static_cast<uint32_t>(m.largest));
  if (!l2) return maximum;
  return std::max(static_cast<float>(std::min(std::sqrt(m.sum_sq), static_cast<double>(FLT_MAX))), maximum);
}

// code[i] = level of |v[i]| / norm | sign << (bits - 1); index is the place of v[0] in its bucket.
template <typename Levels>
HVD_INLINE void round_tile(const float* __restrict v, size_t count, float norm, int bits, const Random& random,
                           uint32_t index, uint32_t* __restrict code) {
  const Levels levels(bits, norm);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t u = bits_of(v[i]);
    code[i] = levels.level(float_of(u & ~kSign) / norm, random(index + static_cast<uint32_t>(i))) | u >> 31 << (bits - 1);
  }
}

HVD_SIMD void round_uniform(const float* v, size_t count, float norm, int bits, Random random, uint32_t index,
                            uint32_t* code) {
  round_tile<Uniform>(v, count, norm, bits, random, index, code);
}

HVD_SIMD void round_exponential(const float* v, size_t count, float norm, int bits, Random random, uint32_t index,
                                uint32_t* code) {
  round_tile<Exponential>(v, count, norm, bits, random, index, code);
}

// out[i] = base[i] + weight * decoded[i]; base may be out, or null for zeros.
template <typename Levels, bool based>
HVD_INLINE void value_tile(const uint32_t* __restrict code, size_t count, float norm, int bits, float weight,
                           const float* base, float* out) {
  const Levels levels(bits, norm);
  const uint32_t mask = (1u << (bits - 1)) - 1;
  for (size_t i = 0; i < count; ++i) {
    const float q = levels.value(code[i] & mask);
    out[i] = (based ? base[i] : 0.0f) + weight * float_of(bits_of(q) ^ code[i] >> (bits - 1) << 31);
  }
}

HVD_SIMD void add_uniform(const uint32_t* code, size_t count, float norm, int bits, float weight, const float* base,
                          float* out) {
  base ? value_tile<Uniform, true>(code, count, norm, bits, weight, base, out)
       : value_tile<Uniform, false>(code, count, norm, bits, weight, base, out);
}

HVD_SIMD void add_exponential(const uint32_t* code, size_t count, float norm, int bits, float weight, const float* base,
                              float* out) {
  base ? value_tile<Exponential, true>(code, count, norm, bits, weight, base, out)
       : value_tile<Exponential, false>(code, count, norm, bits, weight, base, out);
}

// Takes the codes of one bucket after the other: begin(norm), then codes(...) tile by tile; finish() gives the bytes.
class FixedWriter {
 public:
  FixedWriter(uint8_t* out, int bits, size_t) : begin_(out), out_(out), bits_(bits) {}
  void begin(float norm) {
    std::memcpy(out_, &norm, 4);
    out_ += 4;
  }
  void codes(const uint32_t* code, size_t count) {
    pack(bits_, code, count, out_);
    out_ += packed_bytes(count, bits_);
  }
  size_t finish() { return static_cast<size_t>(out_ - begin_); }

 private:
  uint8_t* begin_;
  uint8_t* out_;
  int bits_;
};

// Collects the nonzeros of a bucket first: their number comes before them on the wire.
class EliasWriter {
 public:
  EliasWriter(uint8_t* out, int bits, size_t bucket) : writer_(out), bits_(bits) { nonzeros_.reserve(bucket); }
  void begin(float norm) {
    flush();
    writer_.put(bits_of(norm), 32);
    open_ = true;
    distance_ = 1;
  }
  void codes(const uint32_t* code, size_t count) {
    const uint32_t mask = (1u << (bits_ - 1)) - 1;
    for (size_t i = 0; i < count; ++i, ++distance_)
      if (code[i] & mask) {
        nonzeros_.emplace_back(distance_, code[i]);
        distance_ = 0;
      }
  }
  size_t finish() {
    flush();
    return writer_.finish();
  }

 private:
  void flush() {
    if (!open_) return;
    writer_.put(omega(static_cast<uint32_t>(nonzeros_.size() + 1)));
    for (const auto& [distance, code] : nonzeros_) {
      writer_.put(omega(distance));
      writer_.put(code >> (bits_ - 1), 1);
      writer_.put(omega(code & ((1u << (bits_ - 1)) - 1)));
    }
    nonzeros_.clear();
  }

  BitWriter writer_;
  int bits_;
  std::vector<std::pair<uint32_t, uint32_t>> nonzeros_;  // distance from the one before, code
  uint32_t distance_ = 1;
  bool open_ = false;
};

template <typename Levels>
void decode_elias(int bits, const uint8_t* in, size_t bytes, size_t bucket, float weight, float* out, size_t n) {
  BitReader reader(in, bytes);
  const uint32_t top = (1u << (bits - 1)) - 1;
  for (size_t start = 0; start < n; start += bucket) {
    const size_t length = std::min(bucket, n - start);
    const float norm = float_of(reader.get(32));
    const Levels levels(bits, norm);
    const uint32_t count = reader.get_omega() - 1;
    if (count > length) throw MalformedPayload("Elias payload has more nonzeros than its bucket has elements");
    size_t position = 0;  // one past the element before
    for (uint32_t k = 0; k < count; ++k) {
      const size_t distance = reader.get_omega();
      const uint32_t sign = reader.get(1);
      const uint32_t level = reader.get_omega();
      if (distance > length - position || level > top)
        throw MalformedPayload("Elias payload has an element or a level out of range");
      position += distance;
      out[start + position - 1] += weight * float_of(bits_of(levels.value(level)) ^ sign << 31);
    }
    if (norm != norm) std::fill(out + start, out + start + length, norm);
  }
  reader.finish();
}

// E||Q - v||^2 <= bound * ||v||^2 for a bucket of d values: QSGD lemma 3.1; NUQSGD's tight form, algorithms of the paper's
// theorem 4, with L = 2^-s sqrt(d).
double variance_bound(Kind kind, int bits, double d) {
  if (kind == Kind::kNuqsgd) {
    const double level = std::ldexp(std::sqrt(d), -((1 << (bits - 1)) - 2));
    return level <= 2.25 ? 0.125 + 2.0 / 9.0 * level * level : level - 1;
  }
  const double s = (1 << (bits - 1)) - 1;
  return std::min(d / (4 * s * s), std::sqrt(d) / s);
}

class Quantizer final : public Codec {
 public:
  Quantizer(Kind kind, const Options& options)
      : kind_(kind), bits_(options.bits), bucket_(static_cast<size_t>(options.bucket)), coding_(options.coding),
        feedback_(options.feedback) {
    if (bits_ < 2 || bits_ > 8 || options.bucket < 1 || options.bucket > INT32_MAX)
      throw std::invalid_argument("quantizer: bits or bucket out of range");
    if (feedback_) contraction_ = static_cast<float>(contraction(kind, bits_, bucket_));
  }

  size_t max_payload(size_t n) const override {
    // Elias: an element takes at most 1 + 1 + 13 bits (distance 1, sign, level 127); a bucket 32 bits and a count.
    return kChecksumBytes + (coding_ == Coding::kFixed ? fixed_bytes(n) : 2 * n + 12 * (n / bucket_ + 1) + 8);
  }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step& step,
                 uint8_t* out) const override {
    if (n > 0 && (feedback_ != (residual_in != nullptr) || feedback_ != (residual_out != nullptr)))
      throw std::invalid_argument("a quantizer has a residual under error feedback, and only then");
    const auto run = coding_ == Coding::kFixed ? &Quantizer::encode_with<FixedWriter> : &Quantizer::encode_with<EliasWriter>;
    Encoded encoded;
    (this->*run)(grad, residual_in, residual_out, n, step.seed, out + kChecksumBytes, encoded);
    encoded.bytes += kChecksumBytes;
    seal(out, encoded.bytes);
    return encoded;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    const uint8_t* in = payload + kChecksumBytes;
    if (coding_ == Coding::kElias) {
      if (!add) std::fill(out, out + n, 0.0f);
      (kind_ == Kind::kNuqsgd ? decode_elias<Exponential> : decode_elias<Uniform>)(bits_, in, bytes - kChecksumBytes, bucket_,
                                                                                  weight, out, n);
      return;
    }
    check_length(bytes, max_payload(n), n);
    alignas(64) uint32_t code[kTile];
    const auto put = kind_ == Kind::kNuqsgd ? add_exponential : add_uniform;
    for (size_t start = 0; start < n; start += bucket_) {
      const size_t length = std::min(bucket_, n - start);
      float norm;
      std::memcpy(&norm, in, 4);
      in += 4;
      for (size_t t = 0; t < length; t += kTile) {
        const size_t count = std::min(kTile, length - t);
        float* o = out + start + t;
        unpack(bits_, in, count, code);
        in += packed_bytes(count, bits_);
        if (norm != norm) std::fill(o, o + count, norm);
        else put(code, count, norm, bits_, weight, add ? o : nullptr, o);
      }
    }
  }

  size_t grain() const override { return bucket_; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t& cursor,
             uint8_t* out) const override {
    check_head(bytes, kChecksumBytes);
    const uint8_t* in = payload + kChecksumBytes;
    size_t size = kChecksumBytes;
    if (coding_ == Coding::kElias) {
      size += cut_elias(in, bytes - kChecksumBytes, n, begin, end, cursor, out + kChecksumBytes);
    } else {
      check_length(bytes, max_payload(n), n);
      std::memcpy(out + kChecksumBytes, in + fixed_bytes(begin), fixed_bytes(end) - fixed_bytes(begin));
      size += fixed_bytes(end) - fixed_bytes(begin);
    }
    seal(out, size);
    return size;
  }

 private:
  // The bits of whole buckets; cursor is where the first one begins.
  size_t cut_elias(const uint8_t* in, size_t bytes, size_t n, size_t begin, size_t end, size_t& cursor, uint8_t* out) const {
    BitReader reader(in, bytes, cursor);
    for (size_t start = begin; start < end; start += bucket_) {
      reader.get(32);
      const uint32_t count = reader.get_omega() - 1;
      if (count > std::min(bucket_, n - start)) throw MalformedPayload("Elias payload has more nonzeros than elements");
      for (uint32_t k = 0; k < count; ++k) {
        reader.get_omega();
        reader.get(1);
        reader.get_omega();
      }
    }
    BitWriter writer(out);
    BitReader copied(in, bytes, cursor);
    for (; cursor + 32 <= reader.position(); cursor += 32) writer.put(copied.get(32), 32);
    const int rest = static_cast<int>(reader.position() - cursor);
    if (rest > 0) writer.put(copied.get(rest), rest);
    cursor = reader.position();
    return writer.finish();
  }

  template <typename Writer>
  void encode_with(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, uint64_t seed,
                   uint8_t* out, Encoded& encoded) const {
    alignas(64) float tile[kTile];
    alignas(64) uint32_t code[kTile];
    const bool nonuniform = kind_ == Kind::kNuqsgd;
    Writer writer(out, bits_, std::min(bucket_, n));
    for (size_t bucket = 0, start = 0; start < n; ++bucket, start += bucket_) {
      const size_t length = std::min(bucket_, n - start);
      Moments moments;
      for (size_t t = 0; t < length; t += kTile) {
        const size_t count = std::min(kTile, length - t);
        add_moments(load_sum(grad, residual_in, start + t, count, tile), count, moments);
      }
      const float norm = norm_of(moments, kind_ != Kind::kQsgdInf);
      const float sent = norm * contraction_;
      encoded.finite &= norm == norm;
      encoded.energy += moments.sum_sq;
      writer.begin(sent);
      const Random random(seed, bucket);
      for (size_t t = 0; t < length; t += kTile) {
        const size_t count = std::min(kTile, length - t);
        const float* v = load_sum(grad, residual_in, start + t, count, tile);
        if (norm > 0)
          (nonuniform ? round_exponential : round_uniform)(v, count, norm, bits_, random, static_cast<uint32_t>(t), code);
        else  // all zero, or not finite
          std::fill(code, code + count, 0u);
        writer.codes(code, count);
        if (residual_out) {
          float* left = residual_out + start + t;
          (nonuniform ? add_exponential : add_uniform)(code, count, sent, bits_, -1.0f, v, left);
          for (size_t i = 0; i < count; ++i) encoded.residual_sq += static_cast<double>(left[i]) * static_cast<double>(left[i]);
        }
      }
    }
    encoded.bytes = writer.finish();
  }

  // Each tile of a bucket ends on a whole byte; only the last one of a bucket can have bits to fill.
  size_t fixed_bytes(size_t n) const {
    const size_t rest = n % bucket_;
    return n / bucket_ * (4 + packed_bytes(bucket_, bits_)) + (rest ? 4 + packed_bytes(rest, bits_) : 0);
  }

  Kind kind_;
  int bits_;
  size_t bucket_;
  Coding coding_;
  bool feedback_;
  float contraction_ = 1.0f;
};

}  // namespace

float bucket_norm(Kind kind, const Moments& moments) { return norm_of(moments, kind != Kind::kQsgdInf); }

double rounding_error(Kind kind, int bits, const float* v, size_t n, float norm) {
  return (kind == Kind::kNuqsgd ? error_exponential : error_uniform)(v, n, norm, bits);
}

double contraction(Kind kind, int bits, size_t bucket) { return 1 / (1 + variance_bound(kind, bits, static_cast<double>(bucket))); }

std::unique_ptr<Codec> create_quantizer(Kind kind, const Options& options) {
  if (options.bits == 0) return create_auto_quantizer(kind, options);
  return std::make_unique<Quantizer>(kind, options);
}

}  // namespace hvd_compress
