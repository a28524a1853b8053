#include "codec.h"

#include <cstring>
#include <string>

#include "simd.h"

namespace hvd_compress {

std::unique_ptr<Codec> create(Kind kind, const Options& options) {
  switch (kind) {
    case Kind::kNone:
    case Kind::kFp16:
    case Kind::kBf16:
      return create_cast(kind);
    case Kind::kAdaComp:
      return create_adacomp(options);
    case Kind::kQsgd:
    case Kind::kQsgdInf:
    case Kind::kNuqsgd:
      return create_quantizer(kind, options);
    case Kind::kOneBit:
      return create_onebit(options);
    case Kind::kTopK:
    case Kind::kCat:
      return create_sparsifier(options);
    case Kind::kRandomK:
      return create_randomk(options);
  }
  throw std::invalid_argument("unknown codec kind");
}

// A polynomial in an odd multiplier modulo 2^32, in interleaved lanes: multiplying by an odd number is a bijection,
// so one changed word always changes the sum. The length goes in first, so that appended zeros change it too.
HVD_SIMD uint32_t checksum(const uint8_t* data, size_t bytes) {
  constexpr uint32_t kOdd = 0x9e3779b1u;
  constexpr int kWords = 32;  // as many as hide the multiplication's latency
  uint32_t lane[kWords] = {};
  const size_t stride = 4 * kWords;
  size_t i = 0;
  for (; i + stride <= bytes; i += stride) {
    uint32_t words[kWords];
    std::memcpy(words, data + i, stride);
    for (int j = 0; j < kWords; ++j) lane[j] = lane[j] * kOdd + words[j];
  }
  if (i < bytes) {
    uint32_t words[kWords] = {};
    std::memcpy(words, data + i, bytes - i);
    for (int j = 0; j < kWords; ++j) lane[j] = lane[j] * kOdd + words[j];
  }
  uint32_t sum = static_cast<uint32_t>(bytes) + 1;
  for (int j = 0; j < kWords; ++j) sum = sum * kOdd + lane[j];
  return sum;
}

void seal(uint8_t* payload, size_t bytes) {
  const uint32_t sum = checksum(payload + kChecksumBytes, bytes - kChecksumBytes);
  std::memcpy(payload, &sum, kChecksumBytes);
}

void check_seal(const uint8_t* payload, size_t bytes) {
  check_head(bytes, kChecksumBytes);
  uint32_t expected;
  std::memcpy(&expected, payload, kChecksumBytes);
  if (checksum(payload + kChecksumBytes, bytes - kChecksumBytes) != expected)
    throw MalformedPayload("payload of " + std::to_string(bytes) + " bytes does not match its checksum");
}

void check_head(size_t bytes, size_t head) {
  if (bytes < head)
    throw MalformedPayload("payload of " + std::to_string(bytes) + " bytes has no head of " + std::to_string(head));
}

void check_length(size_t bytes, size_t expected, size_t n) {
  if (bytes != expected)
    throw MalformedPayload("payload has " + std::to_string(bytes) + " bytes, " + std::to_string(n) + " elements take " +
                           std::to_string(expected));
}

}  // namespace hvd_compress
