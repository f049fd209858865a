// Attention of query rows to a run of tokens, tile by tile, with an online softmax (FlashDecoding). Logits are in units
// of log 2.
#pragma once

#include <cmath>
#include <optional>

#include "attention/anchored.h"
#include "decode/polar.h"

namespace kvcache_compress {

constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr int64_t TILE_NUMBERS = 4096;  // decoded numbers of a tile: half of an L1 cache
constexpr int64_t MAX_TILE = 64;        // tokens

// Mask [B, Hq, n, T] of any strides: boolean (true is visible), or additive.
class Mask {
 public:
  explicit Mask(const Tensor& mask)
      : data_(static_cast<const char*>(mask.const_data_ptr())), bytes_(mask.element_size()) {
    for (int i = 0; i < 4; ++i) stride_[i] = mask.stride(i);
    if (mask.scalar_type() != ScalarType::Bool) widen_ = widen_from(mask.scalar_type());
  }

  // Masks the logits of one query for tokens [first, first + count).
  void apply(int64_t batch, int64_t head, int64_t query, int64_t first, int64_t count, float* logits) const {
    const int64_t at = batch * stride_[0] + head * stride_[1] + query * stride_[2] + first * stride_[3];
    const char* from = data_ + at * bytes_;
    if (widen_ == nullptr && stride_[3] == 1) {
      for (int64_t t = 0; t < count; ++t) logits[t] = from[t] != 0 ? logits[t] : -INF;
      return;
    }
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
  Widen widen_ = nullptr;
};

// One step of attention: `count` queries of `groups` query heads for each of `heads` key/value heads. Row r of a
// key/value head is query r % count of its query head r / count. The queries are the last of `tokens` tokens.
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

// Where the packed tokens of a sequence are: token t in page t / tokens, at index t % tokens of that block of the pool.
struct Pages {
  const int64_t* blocks = nullptr;  // null if the sequence is a row of the batch
  int64_t tokens = 0;               // of a page: a multiple of every group and of the largest tile
};

// Tokens [first, last) of a segment whose first token has this `position` in the sequence.
struct Run {
  const Decoder &keys, &values;
  int64_t first, last, position;
  Pages pages;
};

// Partial softmax of a row over the tokens so far: the largest logit, and relative to it the sum of the weights.
struct Partial {
  float top = -INF, total = 0;
};

// Turns the logits of a row into weights relative to the largest logit so far, and returns what the row's sums are to
// be multiplied by because it has risen. The buffer's capacity is a multiple of LANES.
inline float weigh(float* logits, int64_t count, Partial& part) {
  std::fill(logits + count, logits + whole_lanes(count), -INF);
  Floats tops = Floats{} - INF;
  for (int64_t t = 0; t < count; t += LANES) {
    const Floats x = load(logits + t);
    tops = x > tops ? x : tops;
  }
  float top = part.top;
  for (int lane = 0; lane < LANES; ++lane) top = std::max(top, tops[lane]);
  float shrink = 1;
  if (top > part.top) {
    shrink = std::exp2(part.top - top);
    part.top = top;
    part.total *= shrink;
  }
  Floats total = {};
  for (int64_t t = 0; t < count; t += LANES) {
    const Floats weights = exp2(load(logits + t) - std::max(top, LOWEST));
    store(logits + t, weights);
    total += weights;
  }
  for (int lane = 0; lane < LANES; ++lane) part.total += total[lane];
  return shrink;
}

// Queries of rows in the code space of a run's keys, [rows][run.keys.width], and a term for all logits of a row, if
// any; or, with `anchored`, the queries that it maps for each group.
struct Queries {
  const float *numbers, *bias = nullptr;
  const AnchoredQueries* anchored = nullptr;
};

// Adds a run of tokens to the partial softmax `parts` of rows, and their weighted values to `sums`, whose rows are
// `apart` numbers apart.
inline void attend_run(const Step& step, const Rows& rows, const Queries& queries, const Run& run, Partial* parts,
                       float* sums, int64_t apart) {
  const int64_t k_width = run.keys.width, v_width = run.values.width;
  const int64_t widest = std::max(k_width, v_width);
  const int64_t most = std::clamp(TILE_NUMBERS / widest / LANES * LANES, LANES, MAX_TILE);
  const std::unique_ptr<float[]> decoded(new float[most * widest]), logits(new float[rows.count * MAX_TILE]);
  std::optional<MappedQueries> mapped;
  if (queries.anchored != nullptr) mapped.emplace(*queries.anchored, rows.head, queries.numbers, rows.count);
  // A tile lies in one group and in one page; groups are powers of two.
  const int64_t tile =
      mapped ? std::min<int64_t>(std::bit_floor(static_cast<uint64_t>(most)), queries.anchored->group) : most;
  const int64_t page = run.pages.blocks == nullptr ? run.last : run.pages.tokens;
  for (int64_t t = run.first, count = 0; t < run.last; t += count) {
    const int64_t start = t / page * page, position = run.position + t;
    count = std::min({tile, run.last - t, start + page - t});
    const Head head = run.pages.blocks == nullptr ? rows.head : Head{run.pages.blocks[t / page], rows.head.head, start};
    const float* q = mapped ? mapped->at(t) : queries.numbers;
    const float* keys = run.keys.read(head, t - start, count, decoded.get());
    score(q, rows.count, keys, count, k_width, logits.get(), MAX_TILE);
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t query = (rows.first + r) % step.count;
      float* row = logits.get() + r * MAX_TILE;
      if (mapped) mapped->add_means(r, t, count, row);
      for (int64_t i = 0; i < count && queries.bias != nullptr; ++i) row[i] += queries.bias[r];
      for (int64_t i = 0; i < count && step.softcap > 0; ++i) row[i] = step.softcap * std::tanh(row[i] / step.softcap);
      if (step.mask) {
        const int64_t query_head = rows.head.head * step.groups + (rows.first + r) / step.count;
        step.mask->apply(rows.head.batch, query_head, query, position, count, row);
      } else {
        const int64_t visible = std::clamp<int64_t>(step.tokens - step.count + query + 1 - position, 0, count);
        std::fill(row + visible, row + count, -INF);
      }
      if (const float shrink = weigh(row, count, parts[r]); shrink != 1) {
        for (int64_t c = 0; c < v_width; ++c) sums[r * apart + c] *= shrink;
      }
    }
    const float* values = run.values.read(head, t - start, count, decoded.get());
    add_weighted(logits.get(), MAX_TILE, values, count, v_width, rows.count, sums, apart);
  }
}

}  // namespace kvcache_compress
