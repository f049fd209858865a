// Encoder of trellis-coded vectors, the twin of `quantize` in codecs/trellis.py: Viterbi's algorithm, all states of a
// vector at once.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "encode/encode.h"
#include "encode/scalar.h"

namespace kvcache_compress {
namespace {

using Fours = int32_t __attribute__((vector_size(16)));

#ifdef __AVX512F__
using Row = int32_t __attribute__((vector_size(64)));
#else
using Row = Ints;
#endif

constexpr int MEMORY = 6, STATES = 1 << MEMORY, WIDTH = sizeof(Row) / 4, VECTORS = STATES / WIDTH;
constexpr int64_t WARM_UP = 16;
constexpr double STEPS = 256;
constexpr int32_t UNREACHABLE = 1 << 29;

// The subset of the step that led to a state, if the bit that left the register is 0; else its lowest bit flips.
constexpr int subset_of(int state) {
  const int low = state ^ (state >> 1), high = (state >> 2) ^ (state >> 4);
  return (high & 1) << 1 | (low & 1);
}

#ifdef __AVX512F__
constexpr Row LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Costs of the four subsets in the order of the new states 2m for 16 m from a multiple of 16 on: `subset_of` depends on
// the lowest two bits of m, and exchanges subsets by 2 with bit 3 of m. `FLIPPED` is 1 for bit 0 of the state or the
// bit that left the register.
template <int FLIPPED>
Row by_state(Fours costs) {
  const Row order = (LANE % 4) ^ FLIPPED ^ LANE / 8 * 2;
  return (Row)_mm512_permutexvar_epi32((__m512i)order, _mm512_castsi128_si512((__m128i)costs));
}

// Writes even[0], odd[0], even[1], odd[1], ...
void interleave(Row even, Row odd, Row* to) {
  const Row low = LANE / 2 + LANE % 2 * WIDTH, high = low + WIDTH / 2;
  to[0] = (Row)_mm512_permutex2var_epi32((__m512i)even, (__m512i)low, (__m512i)odd);
  to[1] = (Row)_mm512_permutex2var_epi32((__m512i)even, (__m512i)high, (__m512i)odd);
}

// One bit per number: whether it is less.
uint64_t less(Row x, Row than) { return _mm512_cmplt_epi32_mask((__m512i)x, (__m512i)than); }
#else
// Costs of the four subsets in the order of the new states 2m for eight m from a multiple of eight on: `subset_of`
// depends on the lowest two bits of m, and `flipped` exchanges subsets as bit 3 of m (2), bit 0 of the state or the bit
// that left the register (1 each) do.
template <int FLIPPED>
Ints by_state(Fours costs) {
#ifdef __AVX2__
  constexpr int order = (0 ^ FLIPPED) | (1 ^ FLIPPED) << 2 | (2 ^ FLIPPED) << 4 | (3 ^ FLIPPED) << 6;
  return (Ints)_mm256_shuffle_epi32(_mm256_broadcastsi128_si256((__m128i)costs), order);
#else
  Ints spread;
  for (int lane = 0; lane < LANES; ++lane) spread[lane] = costs[(lane % 4) ^ FLIPPED];
  return spread;
#endif
}

// Writes even[0], odd[0], even[1], odd[1], ...
void interleave(Row even, Row odd, Row* to) {
#ifdef __AVX2__
  const __m256i low = _mm256_unpacklo_epi32((__m256i)even, (__m256i)odd);
  const __m256i high = _mm256_unpackhi_epi32((__m256i)even, (__m256i)odd);
  to[0] = (Ints)_mm256_permute2x128_si256(low, high, 0x20), to[1] = (Ints)_mm256_permute2x128_si256(low, high, 0x31);
#else
  for (int lane = 0; lane < 2 * LANES; ++lane) to[lane / LANES][lane % LANES] = (lane % 2 ? odd : even)[lane / 2];
#endif
}

// One bit per number: whether it is less.
uint64_t less(Row x, Row than) {
#ifdef __AVX2__
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(x < than)));
#else
  uint64_t bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits |= static_cast<uint64_t>(x[lane] < than[lane]) << lane;
  return bits;
#endif
}
#endif

template <int BITS>
class Trellis {
  static constexpr int CHOICES = 1 << (BITS - 1);

 public:
  using Costs = Row[VECTORS];

  Trellis(const float* levels, float steps) {
    for (int i = 0; i < 4 * CHOICES; ++i)
      levels_[i / 4][i % 4] = static_cast<int32_t>(std::nearbyint(levels[i] * steps));
    for (int i = 0; i + 1 < CHOICES; ++i) middles_[i] = levels_[i] + levels_[i + 1];
  }

  // Moves the costs of all states one number on. Bit m of the result, or m + 32, says that state 2m, or 2m + 1, is best
  // reached from state m + 32 and not from m.
  uint64_t step(Costs& costs, int32_t x) const {
    Fours nearest = levels_[0];
    for (int i = 0; i + 1 < CHOICES; ++i) nearest = 2 * x > middles_[i] ? levels_[i + 1] : nearest;
    const Fours metric = nearest * (nearest - 2 * x);
#ifdef __AVX512F__
    const Row spread[2] = {by_state<0>(metric), by_state<1>(metric)};
#else
    const Row spread[4] = {by_state<0>(metric), by_state<1>(metric), by_state<2>(metric), by_state<3>(metric)};
#endif
    constexpr int KINDS = sizeof spread / sizeof(Row) / 2;
    Costs next;
    uint64_t even_bits = 0, odd_bits = 0;
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS / 2; ++i) {
      const Row same = spread[i % KINDS * 2], other = spread[i % KINDS * 2 + 1];
      const Row lower = costs[i], upper = costs[i + VECTORS / 2];
      const Row even[2] = {lower + same, upper + other}, odd[2] = {lower + other, upper + same};
      even_bits |= less(even[1], even[0]) << (WIDTH * i), odd_bits |= less(odd[1], odd[0]) << (WIDTH * i);
      interleave(even[1] < even[0] ? even[1] : even[0], odd[1] < odd[0] ? odd[1] : odd[0], &next[2 * i]);
    }
    std::copy_n(next, VECTORS, costs);
    return even_bits | odd_bits << (STATES / 2);
  }

  // The state before a step that led to `state`, and the step's subset.
  static std::pair<int, int> back(int state, uint64_t from_upper) {
    const int upper = from_upper >> (state / 2 + STATES / 2 * (state % 2)) & 1;
    return {state >> 1 | upper << (MEMORY - 1), subset_of(state) ^ upper};
  }

  // The number, within its subset, of the level nearest to x.
  int choice(int32_t x, int subset) const {
    int found = 0;
    for (int i = 0; i + 1 < CHOICES; ++i) found += 2 * x > middles_[i][subset];
    return found;
  }

 private:
  Fours levels_[CHOICES], middles_[CHOICES];
};

// Codes of unit vectors z [..., D]: planes of the codes on the paths of least squared error among the levels
// [2^(bits + 1)], and the scalars for norms [...].
std::vector<Tensor> quantize_trellis(const Tensor& z, const Tensor& norm, const Tensor& levels, int64_t bits,
                                     StringHandle scalar) {
  const Scalar kind = named("scalar", text(scalar), SCALARS);
  const int64_t width = z.size(z.dim() - 1), words = width / CODES_PER_WORD, warm = std::min(WARM_UP, width);
  STD_TORCH_CHECK(z.is_contiguous() && norm.is_contiguous() && levels.is_contiguous(), "contiguous tensors are needed");
  STD_TORCH_CHECK(z.numel() == norm.numel() * width, norm.numel(), " norms for ", z.numel(), " numbers");
  STD_TORCH_CHECK(bits <= 3 && levels.numel() == 2 << bits, levels.numel(), " levels for ", bits, " bits");
  const float *numbers = z.const_data_ptr<float>(), *norms = norm.const_data_ptr<float>();
  const auto* points = levels.const_data_ptr<float>();
  const float steps = static_cast<float>(STEPS * std::sqrt(static_cast<double>(width)));
  const Tensor scales = empty_field(z, 0, ScalarType::Half);
  auto* stored = static_cast<Half*>(scales.mutable_data_ptr());
  std::vector<Tensor> fields = empty_planes(z, words, bits);
  with_bits(std::min<int64_t>(bits, 3), [&]<int BITS>() {
    using P = Planes<BITS>;
    auto* low_words = static_cast<typename P::LowWord*>(fields.front().mutable_data_ptr());
    auto* high_words = static_cast<typename P::HighWord*>(fields.back().mutable_data_ptr());
    const Trellis<BITS> trellis(points, steps);
    each_range(z, [&](int64_t vector, int64_t end) {
      std::vector<int32_t> x(width), codes(width);
      std::vector<uint64_t> from_upper(std::max(width, 2 * warm));
      for (; vector < end; ++vector) {
        const float* from = numbers + vector * width;
        for (int64_t i = 0; i < width; ++i) {  // in memory order
          x[i] = static_cast<int32_t>(std::nearbyint(from[i % CODES_PER_WORD * words + i / CODES_PER_WORD] * steps));
        }
        typename Trellis<BITS>::Costs costs = {};
        for (int64_t i = 0; i < 2 * warm; ++i) {
          from_upper[i] = trellis.step(costs, x[i < warm ? width - warm + i : i - warm]);
        }
        int last = 0;
        for (int state = 1; state < STATES; ++state) {
          if (costs[state / WIDTH][state % WIDTH] < costs[last / WIDTH][last % WIDTH]) last = state;
        }
        for (int64_t i = 2 * warm; i-- > warm;) last = trellis.back(last, from_upper[i]).first;

        for (Row& cost : costs) cost = Row{} + UNREACHABLE;
        costs[last / WIDTH][last % WIDTH] = 0;
        for (int64_t i = 0; i < width; ++i) from_upper[i] = trellis.step(costs, x[i]);
        double square = 0, cross = 0, point = 0;
        for (int64_t i = width, state = last; i-- > 0;) {
          const auto [before, subset] = trellis.back(state, from_upper[i]);
          const int choice = trellis.choice(x[i], subset);
          const double number = from[i % CODES_PER_WORD * words + i / CODES_PER_WORD],
                       level = points[4 * choice + subset];
          square += number * number, cross += number * level, point += level * level;
          codes[i] = choice << 1 | (state & 1);
          state = before;
        }
        stored[vector] = stored_scalar<double>(kind, norms[vector], square, cross, point);
        for (int64_t word = 0; word < words; ++word) {
          int32_t low = 0, high = 0;
          for (int part = 0; part < CODES_PER_WORD; ++part) {
            const int32_t code = codes[CODES_PER_WORD * word + part];
            low |= (code & ((1 << P::LOW) - 1)) << (P::LOW * part);
            if constexpr (P::HIGH > 0) high |= (code >> P::LOW) << (P::HIGH * part);
          }
          low_words[vector * words + word] = low;
          if constexpr (P::HIGH > 0) high_words[vector * words + word] = high;
        }
      }
    });
  });
  fields.push_back(scales);
  return fields;
}

}  // namespace
}  // namespace kvcache_compress

STABLE_TORCH_LIBRARY_FRAGMENT(kvcache_compress_cpu, m) {
  m.def("quantize_trellis(Tensor z, Tensor norm, Tensor levels, int bits, str scalar) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(kvcache_compress_cpu, CPU, m) {
  m.impl("quantize_trellis", TORCH_BOX(&kvcache_compress::quantize_trellis));
}
