// Elias omega codes of positive integers (Elias 1975): 1 -> 0, 2 -> 100, 3 -> 110, 4 -> 101000, 16 -> 10100100000.
// Bits are written from the high bit of each byte down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec.h"

namespace hvd_compress {

struct OmegaCode {
  uint64_t bits;
  int length;
};

// value < 2^32, so that a code has at most 32 + 5 + 3 + 2 + 1 bits.
inline OmegaCode omega(uint32_t value) {
  OmegaCode code{0, 1};
  while (value > 1) {
    const int width = 32 - __builtin_clz(value);
    code.bits |= static_cast<uint64_t>(value) << code.length;
    code.length += width;
    value = static_cast<uint32_t>(width - 1);
  }
  return code;
}

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : begin_(out), out_(out) {}

  // length <= 56
  void put(uint64_t bits, int length) {
    buffer_ = buffer_ << length | bits;
    filled_ += length;
    while (filled_ >= 8) {
      filled_ -= 8;
      *out_++ = static_cast<uint8_t>(buffer_ >> filled_);
    }
  }
  void put(OmegaCode code) { put(code.bits, code.length); }

  // Fills the last byte with zeros and returns the number of bytes.
  size_t finish() {
    if (filled_ > 0) put(0, 8 - filled_);
    return static_cast<size_t>(out_ - begin_);
  }

 private:
  uint8_t* begin_;
  uint8_t* out_;
  uint64_t buffer_ = 0;
  int filled_ = 0;
};

class BitReader {
 public:
  // Begins at that bit, which must not lie behind the end.
  BitReader(const uint8_t* in, size_t bytes, size_t bit = 0) : begin_(in), in_(in + bit / 8), end_(in + bytes) {
    get(static_cast<int>(bit % 8));
  }

  // The bit that is next.
  size_t position() const { return static_cast<size_t>(in_ - begin_) * 8 - static_cast<size_t>(filled_); }

  // length <= 32
  uint32_t get(int length) {
    while (filled_ < length) {
      if (in_ == end_) throw MalformedPayload("Elias payload ends in the middle of a code");
      buffer_ = buffer_ << 8 | *in_++;
      filled_ += 8;
    }
    filled_ -= length;
    return static_cast<uint32_t>(buffer_ >> filled_ & ((uint64_t{1} << length) - 1));
  }

  uint32_t get_omega() {
    uint32_t value = 1;
    while (get(1)) {
      if (value > 31) throw MalformedPayload("Elias payload has a code of more than 32 bits");
      value = 1u << value | (value == 0 ? 0 : get(static_cast<int>(value)));
    }
    return value;
  }

  // Nothing but the zeros that fill the last byte may follow.
  void finish() const {
    if (in_ != end_ || (buffer_ & ((uint64_t{1} << filled_) - 1)) != 0)
      throw MalformedPayload("Elias payload goes on behind its last code");
  }

 private:
  const uint8_t* begin_;
  const uint8_t* in_;
  const uint8_t* end_;
  uint64_t buffer_ = 0;
  int filled_ = 0;
};

}  // namespace hvd_compress
