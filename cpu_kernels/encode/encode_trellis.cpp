// Encoder of trellis-coded vectors, the twin of `quantize` in codecs/quantizers/trellis.py: Viterbi's algorithm, all
// states of a vector at once.
#include <cmath>
#include <utility>

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

using Lanes = std::make_integer_sequence<int, WIDTH>;

// Costs of the four subsets in the order of the new states 2m for WIDTH m from a multiple of WIDTH on: `subset_of`
// depends on the lowest two bits of m. FLIPPED exchanges subsets: 1 for bit 0 of the state or the bit that left the
// register, 2 for bit 3 of m, where the lanes do not number it.
template <int FLIPPED, int... LANE>
Row by_state(Fours costs, std::integer_sequence<int, LANE...>) {
#ifdef __AVX512F__  // the compiler would move the costs through memory
  const Row order = {((LANE % 4) ^ FLIPPED ^ LANE / 8 * 2)...};
  return (Row)_mm512_permutexvar_epi32((__m512i)order, _mm512_castsi128_si512((__m128i)costs));
#else
  const Row both = __builtin_shufflevector(costs, costs, (LANE % 4)...);
  return __builtin_shufflevector(both, both, (LANE ^ FLIPPED)...);
#endif
}

// Writes even[0], odd[0], even[1], odd[1], ...
template <int... LANE>
void interleave(Row even, Row odd, Row* to, std::integer_sequence<int, LANE...>) {
  to[0] = __builtin_shufflevector(even, odd, (LANE / 2 + LANE % 2 * WIDTH)...);
  to[1] = __builtin_shufflevector(even, odd, (LANE / 2 + LANE % 2 * WIDTH + WIDTH / 2)...);
}

// One bit per number: whether it is less.
uint64_t less(Row x, Row than) {
#ifdef __AVX512F__
  return _mm512_cmplt_epi32_mask((__m512i)x, (__m512i)than);
#else
  return true_lanes(x < than);
#endif
}

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
    constexpr int KINDS = 16 / WIDTH;
    const Row spread[4] = {by_state<0>(metric, Lanes{}), by_state<1>(metric, Lanes{}), by_state<2>(metric, Lanes{}),
                           by_state<3>(metric, Lanes{})};
    Costs next;
    uint64_t even_bits = 0, odd_bits = 0;
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS / 2; ++i) {
      const Row same = spread[i % KINDS * 2], other = spread[i % KINDS * 2 + 1];
      const Row lower = costs[i], upper = costs[i + VECTORS / 2];
      const Row even[2] = {lower + same, upper + other}, odd[2] = {lower + other, upper + same};
      even_bits |= less(even[1], even[0]) << (WIDTH * i), odd_bits |= less(odd[1], odd[0]) << (WIDTH * i);
      interleave(even[1] < even[0] ? even[1] : even[0], odd[1] < odd[0] ? odd[1] : odd[0], &next[2 * i], Lanes{});
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
                                     int64_t scalar) {
  const Scalar kind = static_cast<Scalar>(scalar);
  const int64_t width = z.size(z.dim() - 1), words = width / CODES_PER_WORD, warm = std::min(WARM_UP, width);
  const float *numbers = z.const_data_ptr<float>(), *norms = norm.const_data_ptr<float>();
  const auto* points = levels.const_data_ptr<float>();
  const float steps = static_cast<float>(STEPS * std::sqrt(static_cast<double>(width)));
  // Channel of a number, counted in the order of memory.
  const auto channel_of = [words](int64_t i) { return i % CODES_PER_WORD * words + i / CODES_PER_WORD; };
  const Tensor scales = empty_field(z, 0, ScalarType::Half);
  auto* stored = static_cast<Half*>(scales.mutable_data_ptr());
  return with_bits<3>(bits, [&]<int BITS>() {
    const Trellis<BITS> trellis(points, steps);
    const PlaneWriter<BITS> planes(z);
    each_range(z, [&](int64_t vector, int64_t end) {
      std::vector<int32_t> x(width), codes(width + LANES);
      std::vector<uint64_t> from_upper(std::max(width, 2 * warm));
      for (; vector < end; ++vector) {
        const float* from = numbers + vector * width;
        for (int64_t i = 0; i < width; ++i) x[i] = static_cast<int32_t>(std::nearbyint(from[channel_of(i)] * steps));
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
          const double number = from[channel_of(i)], level = points[4 * choice + subset];
          square += number * number, cross += number * level, point += level * level;
          codes[channel_of(i)] = choice << 1 | (state & 1);
          state = before;
        }
        stored[vector] = stored_scalar<double>(kind, norms[vector], square, cross, point);
        planes.pack(vector,
                    [&] [[gnu::always_inline]] (int64_t channel, int64_t) { return load<Ints>(&codes[channel]); });
      }
    });
    std::vector<Tensor> fields = planes.fields();
    fields.push_back(scales);
    return fields;
  });
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(quantize_trellis, "(Tensor z, Tensor norm, Tensor levels, int bits, int scalar) -> Tensor[]")

}  // namespace kvcache_compress
