// Elements that were selected of a segment, as their indices and values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "floats.h"
#include "indices.h"

namespace hvd_compress {

static_assert(kLanes == 8, "the signs of a vector are a byte");

// In the order of their indices.
class Selected {
 public:
  void clear() { size_ = 0; }
  size_t size() const { return size_; }
  uint32_t index(size_t k) const { return indices_[k]; }
  float value(size_t k) const { return values_[k]; }
  const float* values() const { return values_.get(); }

  // Room for so many more.
  void grow(size_t more) {
    ++more;  // for what is pushed, but not meant
    if (size_ + more <= capacity_) return;
    capacity_ = 2 * (size_ + more);
    std::unique_ptr<uint32_t[]> indices(new uint32_t[capacity_]);
    std::unique_ptr<float[]> values(new float[capacity_]);
    std::copy(indices_.get(), indices_.get() + size_, indices.get());
    std::copy(values_.get(), values_.get() + size_, values.get());
    indices_ = std::move(indices);
    values_ = std::move(values);
  }

  void push(size_t index, float value) { Writer(*this).push(index, value); }

  void write_indices(const IndexLayout& layout, uint8_t* out) const { layout.write(indices_.get(), out); }

  // A bit for each, 1 where it is negative: (size() + 7) / 8 bytes.
  void write_signs(uint8_t* out) const {
    for (size_t k = 0; k < size_; k += kLanes) {
      float rest[kLanes] = {};
      if (size_ - k < kLanes) std::memcpy(rest, values_.get() + k, (size_ - k) * sizeof(float));
      out[k / 8] = static_cast<uint8_t>(lane_bits(load_vector<Floats>(size_ - k < kLanes ? rest : values_.get() + k) < 0));
    }
  }

  // Writes behind what is there, in registers; what it has written counts when it goes.
  class Writer {
   public:
    HVD_INLINE explicit Writer(Selected& selected)
        : selected_(selected), indices_(selected.indices_.get()), values_(selected.values_.get()), size_(selected.size_) {}
    HVD_INLINE ~Writer() { selected_.size_ = size_; }

    HVD_INLINE void push(size_t index, float value, bool whether = true) {  // without a branch, which would be a coin's
      indices_[size_] = static_cast<uint32_t>(index);
      values_[size_] = value;
      size_ += whether ? 1 : 0;
    }

   private:
    Selected& selected_;
    uint32_t* indices_;
    float* values_;
    size_t size_;
  };

 private:
  std::unique_ptr<uint32_t[]> indices_;
  std::unique_ptr<float[]> values_;
  size_t size_ = 0, capacity_ = 0;
};

// Of 64 numbers from v on, of which `count` are there, those of at least that magnitude, as bits.
HVD_INLINE uint64_t at_least(const float* v, size_t count, int32_t least) {
  float padded[64];
  if (count < 64) {
    std::memset(padded, 0, sizeof(padded));
    std::memcpy(padded, v, count * sizeof(float));
    v = padded;
  }
  uint64_t hits = 0;
  for (int q = 0; q < 64 / kLanes; ++q) {
    hits |= lane_bits(magnitudes(load_vector<Floats>(v + q * kLanes)) >= least) << (q * kLanes);
  }
  return count < 64 ? hits & ((uint64_t{1} << count) - 1) : hits;
}

// Selects the numbers of at least that magnitude.
HVD_SIMD static void select_largest(const float* v, size_t count, size_t begin, int32_t least, Selected& selected) {
  selected.grow(count);
  Selected::Writer writer(selected);
  for (size_t i = 0; i < count; i += 64) {
    for (uint64_t hits = at_least(v + i, std::min<size_t>(64, count - i), least); hits; hits &= hits - 1) {
      const size_t at = i + static_cast<size_t>(__builtin_ctzll(hits));
      writer.push(begin + at, v[at]);
    }
  }
}

}  // namespace hvd_compress
