// What errors of keys cost attention, the twin of `attention_costs` in methods/spectral/moments.py: p (1 - p), summed
// by key and by query and group.
#include <cmath>

#include "encode/encode.h"

namespace kvcache_compress {
namespace {

// Turns the logits [count], in units of log 2, into exponentials relative to the largest, and returns their sum.
float exponentials(float* logits, int64_t count) {
  const int64_t whole = count / LANES * LANES;
  Floats tops = Floats{} - INF, sums = {};
  for (int64_t t = 0; t < whole; t += LANES) {
    const Floats x = load(logits + t);
    tops = x > tops ? x : tops;
  }
  float top = tops[0], sum = 0;
  for (int lane = 1; lane < LANES; ++lane) top = std::max(top, tops[lane]);
  for (int64_t t = whole; t < count; ++t) top = std::max(top, logits[t]);
  for (int64_t t = 0; t < whole; t += LANES) {
    const Floats x = exp2(load(logits + t) - top);
    store(logits + t, x);
    sums += x;
  }
  for (int64_t t = whole; t < count; ++t) sum += logits[t] = std::exp2(logits[t] - top);
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return sum;
}

// Adds p (1 - p) of tokens [0, count) to `by_key`, and returns the sum; p are the `weights` times `factor`.
float add_costs(const float* weights, int64_t count, float factor, float* by_key) {
  const int64_t whole = count / LANES * LANES;
  Floats sums = {};
  float sum = 0;
  for (int64_t t = 0; t < whole; t += LANES) {
    const Floats p = load(weights + t) * factor, cost = p * (1.0f - p);
    store(by_key + t, load(by_key + t) + cost);
    sums += cost;
  }
  for (int64_t t = whole; t < count; ++t) {
    const float p = weights[t] * factor, cost = p * (1.0f - p);
    by_key[t] += cost, sum += cost;
  }
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return sum;
}

// Sums for logits [H, R, T], which are overwritten, of queries at positions `at` [R] of T tokens; by key
// [H, groups * group] and by query and group [H, R, groups], groups beginning after the sinks. Queries see no later
// tokens; the sinks and the `recent` last of what they see count nowhere.
std::vector<Tensor> attention_costs(Tensor logits, const Tensor& at, int64_t sinks, int64_t recent, int64_t group,
                                    int64_t groups) {
  const int64_t heads = logits.size(0), rows = logits.size(1), tokens = logits.size(2);
  Tensor by_key = torch::stable::new_zeros(logits, {heads, groups * group});
  Tensor by_query = torch::stable::new_zeros(logits, {heads, rows, groups});
  auto *numbers = logits.mutable_data_ptr<float>(), *of_keys = by_key.mutable_data_ptr<float>();
  auto* of_queries = by_query.mutable_data_ptr<float>();
  const auto* positions = at.const_data_ptr<int64_t>();
  torch::stable::parallel_for(0, heads, 1, [&](int64_t head, int64_t end) {
    for (; head < end; ++head) {
      for (int64_t row = 0; row < rows; ++row) {
        float* own = numbers + (head * rows + row) * tokens;
        const int64_t seen = std::min(tokens, positions[row] + 1), stop = std::min(tokens, seen - recent);
        const float factor = 1 / exponentials(own, seen);
        for (int64_t i = 0; i < groups && sinks + i * group < stop; ++i) {
          const int64_t first = sinks + i * group, count = std::min(group, stop - first);
          of_queries[(head * rows + row) * groups + i] =
              add_costs(own + first, count, factor, of_keys + (head * groups + i) * group);
        }
      }
    }
  });
  return {by_key, by_query};
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(attention_costs,
                          "(Tensor(a!) logits, Tensor at, int sinks, int recent, int group, int groups) -> Tensor[]")

}  // namespace kvcache_compress
