// AdaComp (Chen et al., AAAI 2018, arXiv 1712.02679), algorithm 2: adaptive selection of the largest elements of each bin.
//
// Payload: checksum, float32 scale, then for each bin its selected elements in order, one word each. A word holds the
// index in the bin, a bit "last of its bin" and the sign; an index of all ones is an empty bin. Words have 8 bits for bins
// up to 63 elements (6-bit index), 16 bits for bins up to 16383 (14-bit index). No words at all: nothing was selected.
// A scale of NaN: the gradient was not finite, and everything decodes to NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "floats.h"

namespace hvd_compress {
namespace {

constexpr size_t kHeaderBytes = kChecksumBytes + 4;
constexpr size_t kMaxBin = 16383;
constexpr size_t kTile = 1024;  // elements that are worked on while they sit in L1; at least a bin
constexpr size_t kTileCapacity = kMaxBin + 1 + 64;  // comparisons read past the end

template <typename Word>
struct Layout {
  static constexpr int kIndexBits = 8 * sizeof(Word) - 2;
  static constexpr Word kIndexMask = (1u << kIndexBits) - 1;
  static constexpr Word kLast = 1u << kIndexBits;
  static constexpr int kSignShift = kIndexBits + 1;
};

// Walks the words and adds value with each one's sign to its element. Every word is checked, so that a payload that no
// encoder wrote is refused before the write that would go astray.
template <typename Word>
void scatter_add(const uint8_t* words, size_t count, size_t bin, float value, float* out, size_t n) {
  using L = Layout<Word>;
  size_t begin = 0;       // first element of the bin
  size_t next = 0;        // smallest index that may follow in it
  const uint32_t magnitude = bits_of(value);
  for (size_t k = 0; k < count; ++k) {
    Word word;
    std::memcpy(&word, words + k * sizeof(Word), sizeof(Word));
    const size_t index = word & L::kIndexMask;
    const size_t length = std::min(bin, n - begin);
    if (begin >= n) throw MalformedPayload("AdaComp payload has words behind its last bin");
    if (index == L::kIndexMask) {
      if (next != 0 || !(word & L::kLast)) throw MalformedPayload("AdaComp payload has an empty bin that is not empty");
    } else {
      if (index < next || index >= length)
        throw MalformedPayload("AdaComp payload has index " + std::to_string(index) + " in a bin of " +
                               std::to_string(length) + ", not above the one before");
      out[begin + index] += float_of(magnitude ^ static_cast<uint32_t>(word >> L::kSignShift) << 31);
    }
    next = index + 1;
    if (word & L::kLast) {
      begin += length;
      next = 0;
    }
  }
  if (count > 0 && begin < n) throw MalformedPayload("AdaComp payload ends before its last bin");
}

// The word behind that many bins.
template <typename Word>
size_t skip_bins(const uint8_t* words, size_t count, size_t from, size_t bins) {
  for (; from < count && bins > 0; ++from) {
    Word word;
    std::memcpy(&word, words + from * sizeof(Word), sizeof(Word));
    if (word & Layout<Word>::kLast) --bins;
  }
  return from;
}

template <typename Word>
bool is_empty(const uint8_t* at) {
  Word word;
  std::memcpy(&word, at, sizeof(Word));
  return (word & Layout<Word>::kIndexMask) == Layout<Word>::kIndexMask;
}

struct Selection {
  size_t words = 0;         // written, the marks of empty bins included
  int64_t selected = 0;
  double sum_gmax = 0;      // over the bins
  double sum_selected = 0;  // of |G| over the selected elements
  double sum_sq = 0;        // of G over all elements
  int32_t largest = 0;      // magnitude bits of the largest |G|
};

// One tile of whole bins. Pass A: G = R + dW and |H|; pass B, bin by bin: gmax, then the elements with |H| >= gmax.
template <typename Word>
HVD_INLINE void select_tile(const float* __restrict dw, const float* __restrict r, float* __restrict g, size_t count,
                            size_t bin, float c, int32_t* __restrict h, Word* __restrict words, Selection& s) {
  using L = Layout<Word>;
  Floats sq = {};
  const auto accumulate = [&](const Floats& x, const Floats& residual) {
    const Floats sum = residual + x;
    sq += sum * sum;
    const Ints soft = magnitudes(sum + (c - 1.0f) * x);
    return std::pair{sum, magnitudes(sum) == 0 ? soft - soft - 1 : soft};  // sign(0) = 0: nothing to send
  };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    __builtin_prefetch(dw + i + kTile);  // the next tile, while this one is searched
    __builtin_prefetch(r + i + kTile);
    const auto [sum, soft] = accumulate(load_vector<Floats>(dw + i), load_vector<Floats>(r + i));
    store_vector(g + i, sum);
    store_vector(h + i, soft);
  }
  if (i < count) {
    float x[kLanes] = {}, residual[kLanes] = {};
    std::memcpy(x, dw + i, (count - i) * sizeof(float));
    std::memcpy(residual, r + i, (count - i) * sizeof(float));
    const auto [sum, soft] = accumulate(load_vector<Floats>(x), load_vector<Floats>(residual));
    std::memcpy(g + i, &sum, (count - i) * sizeof(float));
    store_vector(h + i, soft);
    i += kLanes;
  }
  double sum_sq = sum_lanes(sq);
  if (!(sum_sq > 0x1p-60 && sum_sq < 0x1p120)) {  // squares may have left float32's range
    sum_sq = 0;
    for (i = 0; i < count; ++i) sum_sq += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  }
  s.sum_sq += sum_sq;

  size_t written = 0, selected = 0;
  double sum_selected = 0, sum_gmax = 0;
  int32_t largest = 0;
  for (size_t begin = 0; begin < count; begin += bin) {
    const size_t length = std::min(bin, count - begin);
    const float* gb = g + begin;
    Ints lanes = {};
    size_t k = 0;
    for (; k + kLanes <= length; k += kLanes) lanes = max(lanes, magnitudes(load_vector<Floats>(gb + k)));
    if (k < length && length >= kLanes)  // the rest, together with some that were seen
      lanes = max(lanes, magnitudes(load_vector<Floats>(gb + length - kLanes)));
    int32_t gmax = largest_lane(lanes);
    if (length < kLanes)
      for (; k < length; ++k) gmax = std::max(gmax, magnitude_bits(gb[k]));
    largest = std::max(largest, gmax);
    sum_gmax += static_cast<double>(float_of(gmax));

    // Compared 64 at a time, past the end of the bin; what lies there is masked.
    const size_t before = written;
    for (k = 0; k < length; k += 64) {
      uint64_t hits = 0;
      for (int q = 0; q < 64 / kLanes; ++q)
        hits |= lane_bits(load_vector<Ints>(h + begin + k + q * kLanes) >= gmax) << (q * kLanes);
      if (length - k < 64) hits &= (uint64_t{1} << (length - k)) - 1;
      for (; hits; hits &= hits - 1) {
        const size_t index = k + static_cast<size_t>(__builtin_ctzll(hits));
        const uint32_t bits = bits_of(gb[index]);
        words[written++] = static_cast<Word>(index | bits >> 31 << L::kSignShift);
        sum_selected += static_cast<double>(float_of(bits & ~kSign));
      }
    }
    selected += written - before;
    if (written == before) words[written++] = L::kIndexMask;
    words[written - 1] |= L::kLast;
  }
  s.words = written;
  s.selected += static_cast<int64_t>(selected);
  s.sum_selected += sum_selected;
  s.sum_gmax += sum_gmax;
  s.largest = std::max(s.largest, largest);
}

template <typename Word>
HVD_INLINE void select_all(const Gradient& grad, const float* residual_in, float* residual_out, size_t n,
                           size_t bin, float c, uint8_t* out, Selection& s) {
  alignas(64) float converted[kTileCapacity];
  alignas(64) int32_t h[kTileCapacity];
  Word words[kTileCapacity];
  const size_t tile = std::max(bin, kTile / bin * bin);
  size_t written = 0;
  for (size_t begin = 0; begin < n && s.largest < static_cast<int32_t>(kInfinity); begin += tile) {
    const size_t count = std::min(tile, n - begin);
    const float* dw = load(grad, begin, count, converted);
    select_tile(dw, residual_in + begin, residual_out + begin, count, bin, c, h, words, s);
    std::memcpy(out + written * sizeof(Word), words, s.words * sizeof(Word));
    written += s.words;
  }
  s.words = written;
}

HVD_SIMD void select8(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, size_t bin,
                      float c, uint8_t* out, Selection& s) {
  select_all<uint8_t>(grad, residual_in, residual_out, n, bin, c, out, s);
}

HVD_SIMD void select16(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, size_t bin,
                       float c, uint8_t* out, Selection& s) {
  select_all<uint16_t>(grad, residual_in, residual_out, n, bin, c, out, s);
}

class AdaComp final : public Codec {
 public:
  explicit AdaComp(const Options& options)
      : bin_(static_cast<size_t>(options.bin)), c_(options.c), width_(options.bin < 64 ? 1 : 2) {
    if (options.bin < 1 || bin_ > kMaxBin) throw std::invalid_argument("AdaComp: bin out of range");
  }

  size_t max_payload(size_t n) const override { return kHeaderBytes + n * width_; }

  Encoded encode(const Gradient& grad, const float* residual_in, float* residual_out, size_t n, const Step&,
                 uint8_t* out) const override {
    if (n > 0 && (!residual_in || !residual_out)) throw std::invalid_argument("AdaComp needs a residual");
    Selection s;
    uint8_t* words = out + kHeaderBytes;
    (width_ == 1 ? select8 : select16)(grad, residual_in, residual_out, n, bin_, c_, words, s);

    Encoded encoded;
    encoded.finite = s.largest < static_cast<int32_t>(kInfinity);
    const size_t bins = (n + bin_ - 1) / bin_;
    float scale = bins == 0 ? 0.0f : static_cast<float>(s.sum_gmax / static_cast<double>(bins));
    if (!encoded.finite) scale = std::numeric_limits<float>::quiet_NaN();
    const size_t count = encoded.finite && s.selected > 0 ? s.words : 0;
    if (count > 0) {
      scatter(words, count, -scale, residual_out, n);
      // Of each selected element |G| is replaced by |G| - scale.
      const double k = static_cast<double>(s.selected), sent = static_cast<double>(scale);
      encoded.residual_sq = std::max(0.0, s.sum_sq + sent * (k * sent - 2 * s.sum_selected));
    } else {
      encoded.residual_sq = s.sum_sq;
    }
    encoded.selected = encoded.finite ? s.selected : 0;
    encoded.bytes = kHeaderBytes + count * width_;
    std::memcpy(out + kChecksumBytes, &scale, 4);
    seal(out, encoded.bytes);
    return encoded;
  }

  void decode(const uint8_t* payload, size_t bytes, float weight, bool add, float* out, size_t n) const override {
    check_seal(payload, bytes);
    if (bytes < kHeaderBytes || (bytes - kHeaderBytes) % width_ != 0)
      throw MalformedPayload("AdaComp payload of " + std::to_string(bytes) + " bytes is not a header and whole words");
    float scale;
    std::memcpy(&scale, payload + kChecksumBytes, 4);
    const size_t count = (bytes - kHeaderBytes) / width_;
    if (!std::isfinite(scale)) {
      if (!std::isnan(scale) || count > 0) throw MalformedPayload("AdaComp payload has a scale that is not finite");
      std::fill(out, out + n, scale);
      return;
    }
    if (!add) std::fill(out, out + n, 0.0f);
    scatter(payload + kHeaderBytes, count, weight * scale, out, n);
  }

  size_t grain() const override { return bin_; }

  // cursor counts the words of the pieces before.
  size_t cut(const uint8_t* payload, size_t bytes, size_t, size_t begin, size_t end, size_t& cursor,
             uint8_t* out) const override {
    check_head(bytes, kHeaderBytes);
    const uint8_t* words = payload + kHeaderBytes;
    const size_t count = (bytes - kHeaderBytes) / width_;
    const size_t bins = (end - begin + bin_ - 1) / bin_;
    const size_t stop = (width_ == 1 ? skip_bins<uint8_t> : skip_bins<uint16_t>)(words, count, cursor, bins);
    const size_t kept = stop - cursor == bins && all_empty(words, cursor, stop) ? 0 : stop - cursor;
    std::memcpy(out + kChecksumBytes, payload + kChecksumBytes, 4);
    std::memcpy(out + kHeaderBytes, words + cursor * width_, kept * width_);
    cursor = stop;
    seal(out, kHeaderBytes + kept * width_);
    return kHeaderBytes + kept * width_;
  }

 private:
  bool all_empty(const uint8_t* words, size_t begin, size_t end) const {
    for (size_t i = begin * width_; i < end * width_; i += width_) {
      const bool empty = width_ == 1 ? is_empty<uint8_t>(words + i) : is_empty<uint16_t>(words + i);
      if (!empty) return false;
    }
    return true;
  }

  void scatter(const uint8_t* words, size_t count, float value, float* out, size_t n) const {
    (width_ == 1 ? scatter_add<uint8_t> : scatter_add<uint16_t>)(words, count, bin_, value, out, n);
  }

  size_t bin_;
  float c_;
  size_t width_;
};

}  // namespace

std::unique_ptr<Codec> create_adacomp(const Options& options) { return std::make_unique<AdaComp>(options); }

}  // namespace hvd_compress
