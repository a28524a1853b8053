// The codecs that only convert: none (float32), fp16 and bf16. They are the baselines of every benchmark, and what a
// bfloat16 exchange needs, since Horovod itself reduces no bfloat16.
//
// Payload: checksum, n numbers.
#include <cstring>
#include <vector>

#include "floats.h"

namespace hvd_compress {
namespace {

constexpr size_t kTile = 1024;

template <Kind kind>
using Wire = std::conditional_t<kind == Kind::kNone, float, uint16_t>;

template <Kind kind>
HVD_INLINE Wire<kind> to_wire(float x) {
  if constexpr (kind == Kind::kNone) return x;
  else if constexpr (kind == Kind::kFp16) return to_float16(x);
  else return to_bfloat16(x);
}

template <Kind kind>
HVD_INLINE float from_wire(Wire<kind> x) {
  if constexpr (kind == Kind::kNone) return x;
  else if constexpr (kind == Kind::kFp16) return from_float16(x);
  else return from_bfloat16(x);
}

// Returns the largest magnitude as bits, to tell whether all were finite. The output may be unaligned: it is written
// through a tile.
template <Kind kind>
HVD_INLINE int32_t encode_all(const Gradient& grad, size_t n, uint8_t* out) {
  int32_t largest = 0;
  float tile[kTile];
  Wire<kind> wire[kTile];
  for (size_t begin = 0; begin < n; begin += kTile) {
    const size_t count = std::min(kTile, n - begin);
    const float* x = load(grad, begin, count, tile);
    for (size_t i = 0; i < count; ++i) {
      largest = std::max(largest, magnitude_bits(x[i]));
      wire[i] = to_wire<kind>(x[i]);
    }
    std::memcpy(out + begin * sizeof(wire[0]), wire, count * sizeof(wire[0]));
  }
  return largest;
}

template <Kind kind, bool add>
HVD_INLINE void decode_all(const uint8_t* in, float weight, float* __restrict out, size_t n) {
  Wire<kind> wire[kTile];
  for (size_t begin = 0; begin < n; begin += kTile) {
    const size_t count = std::min(kTile, n - begin);
    std::memcpy(wire, in + begin * sizeof(wire[0]), count * sizeof(wire[0]));
    for (size_t i = 0; i < count; ++i) out[begin + i] = (add ? out[begin + i] : 0.0f) + weight * from_wire<kind>(wire[i]);
  }
}

HVD_SIMD int32_t encode_any(Kind kind, const Gradient& grad, size_t n, uint8_t* out) {
  switch (kind) {
    case Kind::kFp16: return encode_all<Kind::kFp16>(grad, n, out);
    case Kind::kBf16: return encode_all<Kind::kBf16>(grad, n, out);
    default: return encode_all<Kind::kNone>(grad, n, out);
  }
}

template <bool add>
HVD_INLINE void decode_any(Kind kind, const uint8_t* in, float weight, float* out, size_t n) {
  switch (kind) {
    case Kind::kFp16: return decode_all<Kind::kFp16, add>(in, weight, out, n);
    case Kind::kBf16: return decode_all<Kind::kBf16, add>(in, weight, out, n);
    default: return decode_all<Kind::kNone, add>(in, weight, out, n);
  }
}

HVD_SIMD void decode_into(Kind kind, const uint8_t* in, float weight, bool add, float* out, size_t n) {
  add ? decode_any<true>(kind, in, weight, out, n) : decode_any<false>(kind, in, weight, out, n);
}

class Cast final : public Codec {
 public:
  explicit Cast(Kind kind) : kind_(kind), width_(kind == Kind::kNone ? 4 : 2) {}

  size_t max_payload(size_t n) const override { return kChecksumBytes + width_ * n; }

  Encoded encode(const Gradient& grad, const float* residual_in, float*, size_t n, const Step&,
                 uint8_t* out) const override {
    if (n > 0 && residual_in) throw std::invalid_argument("a cast keeps no residual");
    Encoded encoded;
    encoded.bytes = max_payload(n);
    encoded.finite = encode_any(kind_, grad, n, out + kChecksumBytes) < static_cast<int32_t>(kInfinity);
    seal(out, encoded.bytes);
    return encoded;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    check_length(bytes, max_payload(n), n);
    decode_into(kind_, payload + kChecksumBytes, weight, add, out, n);
  }

  size_t grain() const override { return 1; }

  size_t cut(const uint8_t* payload, size_t bytes, size_t n, size_t begin, size_t end, size_t&, uint8_t* out) const override {
    check_length(bytes, max_payload(n), n);
    const size_t size = max_payload(end - begin);
    std::memcpy(out + kChecksumBytes, payload + kChecksumBytes + width_ * begin, size - kChecksumBytes);
    seal(out, size);
    return size;
  }

 private:
  Kind kind_;
  size_t width_;
};

}  // namespace

std::unique_ptr<Codec> create_cast(Kind kind) { return std::make_unique<Cast>(kind); }

}  // namespace hvd_compress
