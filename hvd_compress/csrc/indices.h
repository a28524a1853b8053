// Which elements of a segment were sent: `count` of `n`, ascending. The size depends on the two numbers alone, so that what a
// choice will cost is known before it is made. All of them, or none: nothing. Else whichever is shorter of
//
// - a bitmap: n bits;
// - Elias-Fano (Elias, JACM 1974): the low `width` bits of each index, one behind the other; then a bitmap in which, for the
//   k-th index, bit k + (index >> width) is set. That is a unary code of the distances between the high parts. Altogether it
//   takes at most .6 bits an index more than the entropy of a random subset up to a twentieth of the elements, .8 up to a fourth.
//
// Streams are padded to bytes, bits run from the low one up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec.h"
#include "simd.h"

namespace hvd_compress {

class IndexLayout {
 public:
  IndexLayout(size_t n, size_t count) : n_(n), count_(count) {
    if (count == 0 || count >= n) return;
    bytes_ = (n + 7) / 8;
    const int about = 63 - __builtin_clzll(n / count);  // the best is n ln 2 / count, but bytes are rounded up
    for (int width = std::max(about - 2, 0); width <= about + 2; ++width) {
      const size_t bytes = low_bytes(width) + high_bytes(width);
      if (bytes >= bytes_) continue;
      bytes_ = bytes;
      width_ = width;
    }
  }

  size_t bytes() const { return bytes_; }
  bool is_bitmap() const { return bytes_ > 0 && width_ < 0; }

  // Writes bytes().
  HVD_INLINE void write(const uint32_t* indices, uint8_t* out) const {
    if (bytes_ == 0) return;
    const size_t low = width_ < 0 ? 0 : low_bytes(width_);
    if (low > 0) write_low(indices, out);
    std::memset(out + low, 0, bytes_ - low);
    if (width_ < 0) {
      set_bits(out, bytes_, [&](size_t k) { return indices[k]; });
    } else {
      set_bits(out + low, bytes_ - low, [&](size_t k) { return k + (indices[k] >> width_); });
    }
  }

  // Calls visit(k, index) for each. Throws MalformedPayload where they are not `count`, ascending and below n; what was visited
  // before was in order.
  template <class Visit>
  HVD_INLINE void read(const uint8_t* in, Visit visit) const {
    if (read(in, 0, 0, n_, visit) != count_) throw MalformedPayload("a payload has fewer indices than it says");
  }

  // Calls it for those in [begin, end), the first of which, if there is one, is the k-th; returns the k of the first behind.
  template <class Visit>
  HVD_INLINE size_t read(const uint8_t* in, size_t k, size_t begin, size_t end, Visit visit) const {
    if (bytes_ == 0) {
      for (k = std::min(begin, count_); k < std::min(end, count_); ++k) visit(k, k);
      return k;
    }
    const size_t low = width_ < 0 ? 0 : low_bytes(width_);
    const uint8_t* high = in + low;
    const size_t high_size = bytes_ - low;
    const size_t width = width_ < 0 ? 0 : static_cast<size_t>(width_);
    const uint64_t mask = (uint64_t{1} << width) - 1;
    const size_t first = width_ < 0 ? begin : k + (begin >> width);  // where the k-th is, or behind
    size_t next = begin;
    uint64_t wanted = ~uint64_t{0} << first % 64;
    for (size_t at = first / 64 * 8; at < high_size; at += 8, wanted = ~uint64_t{0}) {
      for (uint64_t word = load_word(high + at, high_size - at) & wanted; word; word &= word - 1, ++k) {
        if (k == count_) throw MalformedPayload("a payload has more indices than it says");
        size_t index = 8 * at + static_cast<size_t>(__builtin_ctzll(word));
        if (width_ >= 0) {
          const size_t bit = k * width;
          index = (index - k) << width | (load_word(in + bit / 8, bytes_ - bit / 8) >> bit % 8 & mask);
        }
        if (index < next || index >= n_) throw MalformedPayload("a payload has an index that is out of order or out of range");
        if (index >= end) return k;
        next = index + 1;
        visit(k, index);
      }
    }
    return k;
  }

 private:
  size_t low_bytes(int width) const { return (count_ * static_cast<size_t>(width) + 7) / 8; }
  size_t high_bytes(int width) const { return (count_ + ((n_ - 1) >> width) + 7) / 8; }

  HVD_INLINE void write_low(const uint32_t* indices, uint8_t* out) const {
    const uint32_t mask = (1u << width_) - 1;
    const auto width = static_cast<size_t>(width_);
    size_t k = 0;
    for (; width <= 8 && (k + 8) * width + 64 <= 8 * bytes_ && k + 8 <= count_; k += 8) {  // eight at a time are whole bytes
      uint64_t word = 0;
      for (size_t j = 0; j < 8; ++j) word |= static_cast<uint64_t>(indices[k + j] & mask) << j * width;
      std::memcpy(out, &word, 8);  // what is too much is written over
      out += width;
    }
    uint64_t buffer = 0;
    size_t filled = 0;
    for (; k < count_; ++k) {
      buffer |= static_cast<uint64_t>(indices[k] & mask) << filled;
      filled += width;
      if (filled >= 32) {
        std::memcpy(out, &buffer, 4);
        out += 4;
        buffer >>= 32;
        filled -= 32;
      }
    }
    for (; filled > 0; filled -= std::min<size_t>(filled, 8), buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
  }

  // Sets the bit that `bit` tells for each k, ascending. What was just written is not read again, which would have to wait for it,
  // and there is no branch, which would be a coin's.
  template <class Bit>
  HVD_INLINE void set_bits(uint8_t* out, size_t size, Bit bit) const {
    const size_t words = size / 8;
    size_t k = 0, at = 0;
    uint64_t word = 0;
    for (; k < count_; ++k) {
      const size_t next = bit(k), next_at = next / 64;
      if (next_at >= words) break;
      word = (word & (uint64_t{0} - (next_at == at))) | uint64_t{1} << next % 64;
      at = next_at;
      std::memcpy(out + 8 * at, &word, 8);
    }
    for (; k < count_; ++k) out[bit(k) / 8] = static_cast<uint8_t>(out[bit(k) / 8] | 1u << bit(k) % 8);
  }

  static HVD_INLINE uint64_t load_word(const uint8_t* from, size_t available) {
    uint64_t word = 0;
    if (available >= 8) {
      std::memcpy(&word, from, 8);
    } else {
      std::memcpy(&word, from, available);
    }
    return word;
  }

  size_t n_, count_;
  size_t bytes_ = 0;
  int width_ = -1;  // -1: a bitmap
};

}  // namespace hvd_compress
