// What is to be sent, tile by tile, and the sums over it that norms are made of. A tile sits in L1: reading it again costs
// little.
#pragma once

#include <algorithm>
#include <cstring>

#include "floats.h"

namespace hvd_compress {

// Elements [begin, begin + count) of what is to be sent: the gradient, plus the residual where there is one.
HVD_SIMD static const float* load_sum(const Gradient& grad, const float* residual, size_t begin, size_t count,
                                      float* __restrict tile) {
  const float* v = load(grad, begin, count, tile);
  if (!residual) return v;
  for (size_t i = 0; i < count; ++i) tile[i] = v[i] + residual[begin + i];
  return tile;
}

// What a tile adds to its bucket's norm.
struct Moments {
  double sum_sq = 0;
  int32_t largest = 0;  // magnitude bits
};

HVD_SIMD static void add_moments(const float* v, size_t count, Moments& m) {
  Ints largest[2] = {};
  Floats sq[2] = {};  // two of each, since an addition waits for the one before
  const auto add = [&](const float* from, int k) {
    const auto x = load_vector<Floats>(from);
    largest[k] = max(largest[k], magnitudes(x));
    sq[k] += x * x;
  };
  size_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    add(v + i, 0);
    add(v + i + kLanes, 1);
  }
  if (i < count) {
    float rest[2 * kLanes] = {};
    std::memcpy(rest, v + i, (count - i) * sizeof(float));
    add(rest, 0);
    add(rest + kLanes, 1);
  }
  const int32_t most = largest_lane(max(largest[0], largest[1]));
  double sum = sum_lanes(sq[0]) + sum_lanes(sq[1]);
  if (most > 0 && !(sum > 0x1p-60 && sum < 0x1p120)) {  // squares may have left float32's range
    sum = 0;
    for (i = 0; i < count; ++i) sum += static_cast<double>(v[i]) * static_cast<double>(v[i]);
  }
  m.sum_sq += sum;
  m.largest = std::max(m.largest, most);
}

// The sum of the magnitudes of a tile is added to `sum`.
HVD_SIMD static void add_magnitudes(const float* v, size_t count, double& sum) {
  Floats part[2] = {};
  size_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    part[0] += reinterpret_cast<Floats>(magnitudes(load_vector<Floats>(v + i)));
    part[1] += reinterpret_cast<Floats>(magnitudes(load_vector<Floats>(v + i + kLanes)));
  }
  double total = sum_lanes(part[0]) + sum_lanes(part[1]);
  if (!(total < 0x1p120)) {  // it may have left float32's range
    total = 0;
    for (size_t j = 0; j < i; ++j) total += static_cast<double>(float_of(bits_of(v[j]) & ~kSign));
  }
  for (; i < count; ++i) total += static_cast<double>(float_of(bits_of(v[i]) & ~kSign));
  sum += total;
}

}  // namespace hvd_compress
