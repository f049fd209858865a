// Encoder of spectral channels, the twin of `quantize` in codecs/quantizers/digits.py: eight tokens at a time, channel
// by channel, for all scales that are tried.
#include <cmath>

#include "encode/encode.h"

namespace kvcache_compress {
namespace {

using Doubles = double __attribute__((vector_size(8 * LANES)));
constexpr int64_t MOST_POINTS = 64, SPAN = 4;

Doubles widened(Floats x) { return __builtin_convertvector(x, Doubles); }

// Digits of one kind: their words in the plane, and the channel and place of each.
struct Digits {
  int64_t bits, count;
  const int64_t *channels, *shifts;  // [H, all digits], from the first of these on
  Tensor plane;
};

// Codes of y [B, H, T, D], of the scale among `factors` times a token's RMS over its channels with bits that has the
// least error, and that scale, unbiased. `kind` [H, D] are rows of the tables of points [kinds, 64], bounds [kinds, 63]
// and codes [kinds, 64], with `bits` bits each; `channels` and `shifts` [H, digits] name the digits that are stored,
// `twos` of two bits before those of one. Returns the planes that there are, then float32 scales [B, H, T].
std::vector<Tensor> quantize_digits(const Tensor& y, const Tensor& deviation, const Tensor& kind, const Tensor& points,
                                    const Tensor& bounds, const Tensor& codes, const std::vector<int64_t>& bits,
                                    const Tensor& channels, const Tensor& shifts, int64_t twos,
                                    const std::vector<double>& factors) {
  const int64_t heads = y.size(1), tokens = y.size(2), dim = y.size(3), digits = channels.size(1);
  const Tensor scales = empty_field(y, 0, ScalarType::Float);
  std::vector<Digits> planes;
  std::vector<Tensor> fields;
  for (const auto& [width, first, count] : {std::tuple{2, int64_t{0}, twos}, {1, twos, digits - twos}}) {
    if (count == 0) continue;
    fields.push_back(empty_planes(y, count / CODES_PER_WORD, width)[0]);
    planes.push_back({width, count, channels.const_data_ptr<int64_t>() + first,
                      shifts.const_data_ptr<int64_t>() + first, fields.back()});
  }
  fields.push_back(scales);
  const auto *numbers = y.const_data_ptr<float>(), *deviations = deviation.const_data_ptr<float>();
  const auto *levels = points.const_data_ptr<float>(), *limits = bounds.const_data_ptr<float>();
  const auto *kinds = kind.const_data_ptr<int64_t>(), *code_of = codes.const_data_ptr<int64_t>();
  auto* stored = static_cast<float*>(scales.mutable_data_ptr());
  const int64_t tries = factors.size();

  // Encodes blocks of LANES tokens, `SPAN` of one head at a time, so that a channel's tables are made once for all.
  const auto encode = [&](int64_t block, int64_t end) {
    std::vector<Floats> x(dim * SPAN), steps(tries * SPAN);
    std::vector<Doubles> cross(tries * SPAN), square(tries * SPAN);
    std::vector<Ints> found(dim * SPAN), words(digits / CODES_PER_WORD);
    int64_t span;
    for (; block < end; block += span) {
      const int64_t first = block * LANES, head = first / tokens % heads;
      span = std::min({SPAN, end - block, (tokens - first % tokens) / LANES});
      const int64_t* own = kinds + head * dim;
      const float* sigma = deviations + head * dim;
      double coded = 0;
      for (int64_t c = 0; c < dim; ++c) coded += bits[own[c]] > 0;
      Doubles energy[SPAN];
      for (int64_t v = 0; v < span; ++v) {
        Doubles spread = {};
        energy[v] = Doubles{};
        for (int64_t c = 0; c < dim; ++c) {
          Floats& number = x[c * SPAN + v];
          for (int64_t t = 0; t < LANES; ++t) number[t] = numbers[(first + v * LANES + t) * dim + c];
          const Floats z = number / sigma[c];
          energy[v] += widened(number) * widened(number), spread += widened(z) * widened(z);
        }
        Floats rms;
        for (int64_t t = 0; t < LANES; ++t) {
          rms[t] = std::max(static_cast<float>(std::sqrt(spread[t] / std::max(coded, 1.0))), 1e-12f);
        }
        for (int64_t i = v * tries; i < (v + 1) * tries; ++i) {
          steps[i] = rms * static_cast<float>(factors[i - v * tries]);
          cross[i] = square[i] = Doubles{};
        }
      }
      for (int64_t c = 0; c < dim; ++c) {
        if (bits[own[c]] == 0) continue;
        with_bits(bits[own[c]], [&]<int BITS>() {
          const Nearest<BITS> nearest(limits + own[c] * (MOST_POINTS - 1));
          float scaled[1 << BITS];
          for (int i = 0; i < 1 << BITS; ++i) scaled[i] = levels[own[c] * MOST_POINTS + i] * sigma[c];
          const Table<1 << BITS> table(scaled);
          for (int64_t v = 0; v < span; ++v) {
            const Floats z = x[c * SPAN + v] / sigma[c];
            const Doubles wide = widened(x[c * SPAN + v]);
            for (int64_t i = v * tries; i < (v + 1) * tries; ++i) {
              const Doubles point = widened(table[nearest(z / steps[i])]);
              cross[i] += wide * point, square[i] += point * point;
            }
          }
        });
      }
      Floats chosen[SPAN];
      for (int64_t v = 0; v < span; ++v) {
        Floats scale;
        for (int64_t t = 0; t < LANES; ++t) {
          int64_t best = 0;
          double least = 0;
          for (int64_t i = v * tries; i < (v + 1) * tries; ++i) {
            const double error = energy[v][t] - cross[i][t] * cross[i][t] / std::max(square[i][t], 1e-30);
            if (i == v * tries || error < least) best = i, least = error;
          }
          chosen[v][t] = steps[best][t];
          scale[t] = static_cast<float>(energy[v][t] / std::max(cross[best][t], 1e-30));
        }
        store(stored + first + v * LANES, scale);
      }
      for (int64_t c = 0; c < dim; ++c) {
        if (bits[own[c]] == 0) continue;
        with_bits(bits[own[c]], [&]<int BITS>() {
          const Nearest<BITS> nearest(limits + own[c] * (MOST_POINTS - 1));
          for (int64_t v = 0; v < span; ++v) {
            const Ints rank = nearest(x[c * SPAN + v] / sigma[c] / chosen[v]);
            for (int64_t t = 0; t < LANES; ++t) {
              found[c * SPAN + v][t] = static_cast<int32_t>(code_of[own[c] * MOST_POINTS + rank[t]]);
            }
          }
        });
      }
      for (const Digits& part : planes) {
        const int64_t count = part.count / CODES_PER_WORD;
        for (int64_t v = 0; v < span; ++v) {
          std::fill_n(words.begin(), count, Ints{});
          for (int64_t i = 0; i < part.count; ++i) {
            const int64_t digit = head * digits + i;
            const Ints value =
                found[part.channels[digit] * SPAN + v] >> static_cast<int>(part.shifts[digit]) & ((1 << part.bits) - 1);
            words[i % count] |= value << static_cast<int>(i / count * part.bits);
          }
          for (int64_t t = 0; t < LANES; ++t) {
            const int64_t row = (first + v * LANES + t) * count;
            for (int64_t i = 0; i < count; ++i) {
              if (part.bits == 2) {
                static_cast<int16_t*>(part.plane.mutable_data_ptr())[row + i] = static_cast<int16_t>(words[i][t]);
              } else {
                static_cast<uint8_t*>(part.plane.mutable_data_ptr())[row + i] = static_cast<uint8_t>(words[i][t]);
              }
            }
          }
        }
      }
    }
  };
  const int64_t blocks = y.size(0) * heads * tokens / LANES;
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, TASK_NUMBERS / (dim * LANES)), encode);
  return fields;
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(quantize_digits,
                          "(Tensor y, Tensor deviation, Tensor kind, Tensor points, Tensor bounds, Tensor codes, int[] "
                          "bits, Tensor channels, Tensor shifts, int twos, float[] factors) -> Tensor[]")

}  // namespace kvcache_compress
