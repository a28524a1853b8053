// Elements that were drawn of a segment, as bits: there may be so many that a list of their indices would be the longest part of
// the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "floats.h"
#include "indices.h"
#include "random.h"
#include "selected.h"

namespace hvd_compress {

// Moves the bits of x at which m is 1 together, down to the lowest; x is 0 at the others. For many words at once (Hacker's
// Delight, 7-4), since not every processor has an instruction for it.
HVD_SIMD static void gather_bits(const uint64_t* __restrict mask, uint64_t* __restrict words, size_t count) {
  for (size_t w = 0; w < count; ++w) {
    uint64_t m = mask[w], x = words[w] & m, zeros = ~m << 1;
    for (int shift = 1; shift < 64; shift *= 2) {
      uint64_t odd = zeros ^ (zeros << 1);  // whether the number of zeros below is odd
      for (int by = 2; by < 64; by *= 2) odd ^= odd << by;
      const uint64_t moved = odd & m, there = x & moved;
      m = (m ^ moved) | (moved >> shift);
      x = (x ^ there) | (there >> shift);
      zeros &= ~odd;
    }
    words[w] = x;
  }
}

class Drawn {
 public:
  static constexpr size_t kMost = 1024;  // that can be drawn at once

  void clear() {
    drawn_.clear();
    signs_.clear();
    size_ = 0;
  }
  size_t size() const { return size_; }

  // Draws `count` numbers with probability |x| / level, from the hash of their indices. Those of at least that magnitude are
  // selected as they are instead. All calls but the last are for kMost.
  void draw(const float* v, size_t count, size_t begin, int32_t least, float level, Random random, Selected& selected) {
    uint64_t drawn[kMost / 64], negative[kMost / 64];
    selected.grow(count);
    draw_bits(v, count, begin, least, level, random, selected, drawn, negative);
    const size_t words = (count + 63) / 64;
    gather_bits(drawn, negative, words);
    drawn_.insert(drawn_.end(), drawn, drawn + words);
    signs_.resize((size_ + count) / 64 + 2);
    for (size_t w = 0; w < words; ++w) {
      const size_t at = size_ / 64, used = size_ % 64;
      signs_[at] |= negative[w] << used;
      if (used > 0) signs_[at + 1] = negative[w] >> (64 - used);
      size_ += static_cast<size_t>(__builtin_popcountll(drawn[w]));
    }
  }

  void write_indices(const IndexLayout& layout, uint8_t* out) {
    if (layout.is_bitmap()) {
      std::memcpy(out, drawn_.data(), layout.bytes());
      return;
    }
    if (indices_.size() < size_) indices_.resize(size_);
    uint32_t* next = indices_.data();
    for (size_t w = 0; w < drawn_.size(); ++w) {
      for (uint64_t bits = drawn_[w]; bits; bits &= bits - 1) {
        *next++ = static_cast<uint32_t>(64 * w + static_cast<size_t>(__builtin_ctzll(bits)));
      }
    }
    layout.write(indices_.data(), out);
  }

  // See Selected.
  void write_signs(uint8_t* out) const { std::memcpy(out, signs_.data(), (size_ + 7) / 8); }

 private:
  HVD_SIMD static void draw_bits(const float* __restrict v, size_t count, size_t begin, int32_t least, float level, Random random,
                                 Selected& selected, uint64_t* __restrict drawn, uint64_t* __restrict negative) {
    Selected::Writer writer(selected);
    const float sure = std::min(float_of(static_cast<uint32_t>(least)), level);
    int32_t hit[64];
    float padded[64];
    for (size_t i = 0; i < count; i += 64) {
      const float* from = v + i;
      if (count - i < 64) {
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, from, (count - i) * sizeof(float));
        from = padded;
      }
      for (size_t j = 0; j < 64; ++j) {
        const float magnitude = float_of(bits_of(from[j]) & ~kSign);
        const auto threshold = static_cast<int32_t>(std::min(magnitude / level, 0x0.ffffffp0f) * 0x1p31f);
        const auto number = static_cast<int32_t>(random(static_cast<uint32_t>(begin + i + j)) >> 1);
        hit[j] = magnitude >= sure || number < threshold ? -1 : 0;
      }
      uint64_t hits = 0, signs = 0;
      for (int q = 0; q < 64 / kLanes; ++q) {
        hits |= lane_bits(load_vector<Ints>(hit + q * kLanes)) << (q * kLanes);
        signs |= lane_bits(load_vector<Ints>(from + q * kLanes)) << (q * kLanes);
      }
      const uint64_t large = at_least(from, 64, least);
      for (uint64_t bits = large; bits; bits &= bits - 1) {
        const size_t at = i + static_cast<size_t>(__builtin_ctzll(bits));
        writer.push(begin + at, v[at]);
      }
      drawn[i / 64] = hits & ~large;
      negative[i / 64] = signs;
    }
  }

  std::vector<uint64_t> drawn_;  // a bit for each element
  std::vector<uint64_t> signs_;  // a bit for each that was drawn
  size_t size_ = 0;
  std::vector<uint32_t> indices_;  // working memory, kept
};

}  // namespace hvd_compress
