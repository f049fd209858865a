// The scalar stored per vector: twin of codecs/quantizers/scalar.py.
#pragma once

#include <cmath>

#include "encode/encode.h"

namespace kvcache_compress {

constexpr float SCALE_MAX = 65504.0f;

// In the order of `scalar.Scalar`.
enum class Scalar : int64_t { NORM, MATCH, UNBIASED };

// Scales that are tried, and the integer steps in which they are compared: see `scalar.quantize`.
constexpr float SEARCHED[] = {26 / 32.0f, 29 / 32.0f, 1, 35 / 32.0f, 38 / 32.0f};
constexpr double SEARCH_STEPS = 256;

template <class Vector>
auto sum(Vector x) {
  auto total = x[0];
  for (int lane = 1; lane < LANES; ++lane) total += x[lane];
  return total;
}

// Stored scalar of a vector norm · z with code point p, from z·z, z·p and p·p: see `scalar.stored_scalar`.
template <class Number>
float stored_scalar(Scalar scalar, Number norm, Number square, Number cross, Number point) {
  if (scalar == Scalar::MATCH) norm = norm / std::sqrt(point);
  if (scalar == Scalar::UNBIASED) norm = norm * square / std::max<Number>(cross, 1e-12f);
  return std::min<Number>(norm, SCALE_MAX);
}

}  // namespace kvcache_compress
