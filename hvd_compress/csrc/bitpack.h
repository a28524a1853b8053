// Packing of b-bit codes, b = 2..8.
//
// Full groups of 512 codes are packed vertically: code 16 k + j goes to lane j, and a lane's 32 codes fill its b 32-bit
// words from the low bit up; word w of lane j is stored at 16 w + j. So every step works on 16 lanes alike, which is what
// SIMD wants. What is left, and the groups of 128 codes in it (4 lanes, the same way), then the last codes one after the
// other from the low bit up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace hvd_compress {

constexpr size_t packed_bytes(size_t count, int bits) { return (count * static_cast<size_t>(bits) + 7) / 8; }

template <int Bits, int Lanes>
HVD_INLINE void pack_group(const uint32_t* __restrict code, uint8_t* __restrict out) {
  uint32_t words[Bits * Lanes] = {};
#pragma GCC unroll 32
  for (int k = 0; k < 32; ++k) {
    const int word = k * Bits / 32, shift = k * Bits % 32;
    for (int j = 0; j < Lanes; ++j) words[word * Lanes + j] |= code[k * Lanes + j] << shift;
    if (shift + Bits > 32)
      for (int j = 0; j < Lanes; ++j) words[(word + 1) * Lanes + j] |= code[k * Lanes + j] >> ((32 - shift) & 31);
  }
  std::memcpy(out, words, sizeof(words));
}

template <int Bits, int Lanes>
HVD_INLINE void unpack_group(const uint8_t* __restrict in, uint32_t* __restrict code) {
  constexpr uint32_t kMask = (1u << Bits) - 1;
  uint32_t words[Bits * Lanes];
  std::memcpy(words, in, sizeof(words));
#pragma GCC unroll 32
  for (int k = 0; k < 32; ++k) {
    const int word = k * Bits / 32, shift = k * Bits % 32;
    if (shift + Bits <= 32)
      for (int j = 0; j < Lanes; ++j) code[k * Lanes + j] = words[word * Lanes + j] >> shift & kMask;
    else
      for (int j = 0; j < Lanes; ++j)
        code[k * Lanes + j] =
            (words[word * Lanes + j] >> shift | words[(word + 1) * Lanes + j] << ((32 - shift) & 31)) & kMask;
  }
}

template <int Bits>
HVD_INLINE void pack_bits(const uint32_t* code, size_t count, uint8_t* out) {
  size_t i = 0;
  for (; i + 512 <= count; i += 512, out += 64 * Bits) pack_group<Bits, 16>(code + i, out);
  for (; i + 128 <= count; i += 128, out += 16 * Bits) pack_group<Bits, 4>(code + i, out);
  uint32_t buffer = 0;
  int filled = 0;
  for (; i < count; ++i) {
    buffer |= code[i] << filled;
    for (filled += Bits; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
  }
  if (filled > 0) *out = static_cast<uint8_t>(buffer);
}

template <int Bits>
HVD_INLINE void unpack_bits(const uint8_t* in, size_t count, uint32_t* code) {
  size_t i = 0;
  for (; i + 512 <= count; i += 512, in += 64 * Bits) unpack_group<Bits, 16>(in, code + i);
  for (; i + 128 <= count; i += 128, in += 16 * Bits) unpack_group<Bits, 4>(in, code + i);
  uint32_t buffer = 0;
  int filled = 0;
  for (; i < count; ++i) {
    if (filled < Bits) {
      buffer |= static_cast<uint32_t>(*in++) << filled;
      filled += 8;
    }
    code[i] = buffer & ((1u << Bits) - 1);
    buffer >>= Bits;
    filled -= Bits;
  }
}

// Writes packed_bytes(count, bits) bytes.
HVD_SIMD static void pack(int bits, const uint32_t* code, size_t count, uint8_t* out) {
  switch (bits) {
    case 2: return pack_bits<2>(code, count, out);
    case 3: return pack_bits<3>(code, count, out);
    case 4: return pack_bits<4>(code, count, out);
    case 5: return pack_bits<5>(code, count, out);
    case 6: return pack_bits<6>(code, count, out);
    case 7: return pack_bits<7>(code, count, out);
    default: return pack_bits<8>(code, count, out);
  }
}

// Reads packed_bytes(count, bits) bytes.
HVD_SIMD static void unpack(int bits, const uint8_t* in, size_t count, uint32_t* code) {
  switch (bits) {
    case 2: return unpack_bits<2>(in, count, code);
    case 3: return unpack_bits<3>(in, count, code);
    case 4: return unpack_bits<4>(in, count, code);
    case 5: return unpack_bits<5>(in, count, code);
    case 6: return unpack_bits<6>(in, count, code);
    case 7: return unpack_bits<7>(in, count, code);
    default: return unpack_bits<8>(in, count, code);
  }
}

}  // namespace hvd_compress
