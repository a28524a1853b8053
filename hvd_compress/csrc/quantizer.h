// What the choice of a quantizer's bits needs to know of it; see quantizer.cc.
#pragma once

#include "codec.h"
#include "moments.h"

namespace hvd_compress {

// What a bucket is divided by; NaN where it is not finite.
float bucket_norm(Kind kind, const Moments& moments);

// E ||Q - v||^2 of rounding n numbers of a bucket of that norm, which is above 0.
double rounding_error(Kind kind, int bits, const float* v, size_t n, float norm);

// What a rounded value is multiplied by under error feedback.
double contraction(Kind kind, int bits, size_t bucket);

// A quantizer of the number of bits that brings most for its cost, chosen at every encoding.
std::unique_ptr<Codec> create_auto_quantizer(Kind kind, const Options& options);

}  // namespace hvd_compress
