// Products of query rows with vectors that they share.
#pragma once

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

// scores[r * stride + t] = q[r] · k[t] for `count` tokens, and for up to three more, which must be readable.
inline void score(const float* q, int64_t rows, const float* k, int64_t count, int64_t width, float* scores,
                  int64_t stride) {
  each_block(rows, [&]<int ROWS>(int64_t first) {
    for (int64_t t = 0; t < count; t += 4) {
      Floats sums[ROWS][4] = {};
      for (int64_t c = 0; c < width; c += LANES) {
        Floats x[ROWS];
        for (int r = 0; r < ROWS; ++r) x[r] = load(q + (first + r) * width + c);
        for (int i = 0; i < 4; ++i) {
          const Floats y = load(k + (t + i) * width + c);
          for (int r = 0; r < ROWS; ++r) sums[r][i] += x[r] * y;
        }
      }
      for (int r = 0; r < ROWS; ++r) sum_each(sums[r], scores + (first + r) * stride + t);
    }
  });
}

}  // namespace kvcache_compress
