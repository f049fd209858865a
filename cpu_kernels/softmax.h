// Attention of some query rows to a run of tokens, tile by tile, with an online softmax. Logits are in units of log 2.
#pragma once

#include <cmath>
#include <limits>
#include <optional>

#include "decode.h"

namespace kvcache_compress {

constexpr float LOG2E = 1.44269504f;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr int64_t TILE_NUMBERS = 4096;  // decoded numbers of a tile: half of a first-level cache
constexpr int64_t MAX_TILE = 64;        // tokens

// A mask [B, Hq, n, T] of any strides: boolean (true is visible), or a term of each logit.
class Mask {
 public:
  explicit Mask(const Tensor& mask)
      : data_(static_cast<const char*>(mask.const_data_ptr())), bytes_(mask.element_size()) {
    for (int i = 0; i < 4; ++i) stride_[i] = mask.stride(i);
    if (mask.scalar_type() != ScalarType::Bool) widen_ = conversion(mask.scalar_type()).widen;
  }

  // Masks the logits of one query for tokens [first, first + count).
  void apply(int64_t batch, int64_t head, int64_t query, int64_t first, int64_t count, float* logits) const {
    const int64_t at = batch * stride_[0] + head * stride_[1] + query * stride_[2] + first * stride_[3];
    const char* from = data_ + at * bytes_;
    for (int64_t t = 0; t < count; ++t, from += stride_[3] * bytes_) {
      if (widen_ == nullptr) {
        if (*from == 0) logits[t] = -INF;
        continue;
      }
      float term;
      widen_(from, 1, &term);
      logits[t] += term == -INF ? term : std::max(term * LOG2E, LOWEST);
    }
  }

 private:
  const char* data_;
  int64_t bytes_, stride_[4];
  void (*widen_)(const void*, int64_t, float*) = nullptr;
};

// A step: `count` queries of `groups` query heads for each of `heads` key/value heads. Row r of a key/value head is
// query r % count of its query head r / count. The queries are the last of `tokens` tokens.
struct Step {
  int64_t batch, heads, groups, count, tokens;
  float softcap;  // 0 for none
  std::optional<Mask> mask;

  int64_t rows() const { return groups * count; }
  int64_t query_heads() const { return heads * groups; }
};

// Rows [first, first + count) of a key/value head.
struct Rows {
  Head head;
  int64_t first, count;
};

// Tokens [first, last) of a segment whose first token is number `position` of all.
struct Run {
  const Decoder &keys, &values;
  int64_t first, last, position;
};

// What the tokens so far add to the softmax of a row: the largest logit, and relative to it the sum of the weights and
// the weighted sum of the values.
struct Partial {
  float top = -INF, total = 0;
  float* sums = nullptr;
};

// scores[r * stride + t] = q[r] · k[t] for `count` tokens, and for up to three beyond them, which must be readable.
inline void score(const float* q, int64_t rows, const float* k, int64_t count, int64_t width, float* scores,
                  int64_t stride) {
  for (int64_t t = 0; t < count; t += 4) {
    for (int64_t r = 0; r < rows; ++r) {
      Floats sums[4] = {};
      for (int64_t c = 0; c < width; c += LANES) {
        const Floats x = load(q + r * width + c);
        for (int i = 0; i < 4; ++i) sums[i] += x * load(k + (t + i) * width + c);
      }
      sum_each(sums, scores + r * stride + t);
    }
  }
}

// sums[...VECTORS * LANES] += the sum over tokens of weights[t] * v[t * width...].
template <int VECTORS>
inline void add_weighted(const float* weights, const float* v, int64_t count, int64_t width, float* sums) {
  Floats x[VECTORS];
  for (int i = 0; i < VECTORS; ++i) x[i] = load(sums + i * LANES);
  for (int64_t t = 0; t < count; ++t) {
    for (int i = 0; i < VECTORS; ++i) x[i] += load(v + t * width + i * LANES) * weights[t];
  }
  for (int i = 0; i < VECTORS; ++i) store(sums + i * LANES, x[i]);
}

// Turns the logits of a row, with room for whole LANES, into weights relative to the largest logit so far; what was
// summed relative to a smaller one shrinks.
inline void weigh(float* logits, int64_t count, int64_t width, Partial& part) {
  const float top = std::max(part.top, *std::max_element(logits, logits + count));
  if (top == -INF) {
    std::fill_n(logits, count, 0.0f);
    return;
  }
  if (top > part.top) {
    const float shrink = std::exp2(part.top - top);
    part.top = top;
    part.total *= shrink;
    for (int64_t c = 0; c < width; ++c) part.sums[c] *= shrink;
  }
  std::fill(logits + count, logits + whole_lanes(count), -INF);
  Floats total = {};
  for (int64_t t = 0; t < count; t += LANES) {
    const Floats weights = exp2(load(logits + t) - top);
    store(logits + t, weights);
    total += weights;
  }
  for (int lane = 0; lane < LANES; ++lane) part.total += total[lane];
}

// Adds a run of tokens to the `parts` of some rows with queries `q` [rows][run.keys.width]; `bias` is added to all
// logits of a row.
inline void attend_run(const Step& step, const Rows& rows, const float* q, const float* bias, const Run& run,
                       Partial* parts) {
  const int64_t k_width = run.keys.width, v_width = run.values.width, widest = std::max(k_width, v_width);
  const int64_t tile = std::clamp(TILE_NUMBERS / widest / LANES * LANES, LANES, MAX_TILE);
  const std::unique_ptr<float[]> decoded(new float[tile * widest]), logits(new float[rows.count * MAX_TILE]);
  for (int64_t t = run.first; t < run.last; t += tile) {
    const int64_t count = std::min(tile, run.last - t), position = run.position + t;
    run.keys.decode(rows.head, t, count, decoded.get());
    score(q, rows.count, decoded.get(), count, k_width, logits.get(), MAX_TILE);
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t query = (rows.first + r) % step.count;
      float* row = logits.get() + r * MAX_TILE;
      for (int64_t i = 0; i < count && bias != nullptr; ++i) row[i] += bias[r];
      for (int64_t i = 0; i < count && step.softcap > 0; ++i) row[i] = step.softcap * std::tanh(row[i] / step.softcap);
      if (step.mask) {
        const int64_t query_head = rows.head.head * step.groups + (rows.first + r) / step.count;
        step.mask->apply(rows.head.batch, query_head, query, position, count, row);
      } else {
        const int64_t visible = std::clamp<int64_t>(step.tokens - step.count + query + 1 - position, 0, count);
        std::fill(row + visible, row + count, -INF);
      }
      weigh(row, count, v_width, parts[r]);
    }
    run.values.decode(rows.head, t, count, decoded.get());
    for (int64_t r = 0; r < rows.count; ++r) {
      const float* weights = logits.get() + r * MAX_TILE;
      int64_t c = 0;
      for (; c + 4 * LANES <= v_width; c += 4 * LANES) {
        add_weighted<4>(weights, decoded.get() + c, count, v_width, parts[r].sums + c);
      }
      for (; c < v_width; c += LANES) add_weighted<1>(weights, decoded.get() + c, count, v_width, parts[r].sums + c);
    }
  }
}

}  // namespace kvcache_compress
