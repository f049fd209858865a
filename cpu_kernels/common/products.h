// Products of query rows with vectors that they share.
#pragma once

#include <algorithm>

#include "common/simd.h"

namespace kvcache_compress {

// Calls `call` for blocks of up to three rows, with their number as a template argument; avoids a single last row. Rows
// of a block share the loads of a tile; registers allow three, as the sums of a row take four.
template <class Call>
inline void each_block(int64_t rows, Call call) {
  for (int64_t r = 0; r < rows;) {
    const int64_t left = rows - r;
    if (left == 3 || left > 4) {
      call.template operator()<3>(r);
      r += 3;
    } else if (left > 1) {
      call.template operator()<2>(r);
      r += 2;
    } else {
      call.template operator()<1>(r);
      r += 1;
    }
  }
}

// scores[r * stride + t] = q[r] · k[t] for `count` tokens; up to three more scores are written.
template <class Number>
inline void score(const float* q, int64_t rows, const Number* k, int64_t count, int64_t width, float* scores,
                  int64_t stride) {
  each_block(rows, [&]<int ROWS>(int64_t first) {
    for (int64_t t = 0; t < count; t += 4) {
      const Number* tokens[4];
      for (int i = 0; i < 4; ++i) tokens[i] = k + std::min(t + i, count - 1) * width;
      Floats sums[ROWS][4] = {};
      for (int64_t c = 0; c < width; c += LANES) {
        Floats x[ROWS];
        for (int r = 0; r < ROWS; ++r) x[r] = load(q + (first + r) * width + c);
        for (int i = 0; i < 4; ++i) {
          const Floats y = load(tokens[i] + c);
          for (int r = 0; r < ROWS; ++r) sums[r][i] += x[r] * y;
        }
      }
      for (int r = 0; r < ROWS; ++r) sum_each(sums[r], scores + (first + r) * stride + t);
    }
  });
}

// sums[r][c] += sum over tokens t of weights[r * stride + t] * v[t * width + c], for VECTORS * LANES channels c.
template <int ROWS, int VECTORS>
inline void add_weighted(const float* weights, int64_t stride, const float* v, int64_t count, int64_t width,
                         float* const (&sums)[ROWS]) {
  Floats x[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < VECTORS; ++i) x[r][i] = load(sums[r] + i * LANES);
  }
  for (int64_t t = 0; t < count; ++t) {
    for (int i = 0; i < VECTORS; ++i) {
      const Floats y = load(v + t * width + i * LANES);
      for (int r = 0; r < ROWS; ++r) x[r][i] += y * weights[r * stride + t];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < VECTORS; ++i) store(sums[r] + i * LANES, x[r][i]);
  }
}

// The same for all channels of all rows, whose sums are `apart` numbers apart; `width` is a multiple of LANES.
inline void add_weighted(const float* weights, int64_t stride, const float* v, int64_t count, int64_t width,
                         int64_t rows, float* sums, int64_t apart) {
  each_block(rows, [&]<int ROWS>(int64_t first) {
    float* to[ROWS];
    for (int r = 0; r < ROWS; ++r) to[r] = sums + (first + r) * apart;
    int64_t c = 0;
    const auto add = [&]<int VECTORS>() {
      add_weighted<ROWS, VECTORS>(weights + first * stride, stride, v + c, count, width, to);
      for (float*& x : to) x += VECTORS * LANES;
      c += VECTORS * LANES;
    };
    while (c + 4 * LANES <= width) add.template operator()<4>();
    while (c < width) add.template operator()<1>();
  });
}

}  // namespace kvcache_compress
