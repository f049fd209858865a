// Vectors of eight numbers: the operations that the decoders and the attention loop need.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvcache_compress {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t LANES = 8;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

// LANES words of 32, 16 or 8 bits.
template <class Word>
struct WordsOf {
  using Vector __attribute__((vector_size(LANES * sizeof(Word)))) = Word;
};

inline int64_t whole_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

template <class Vector, class Number>
inline Vector load(const Number* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const float* from) { return load<Floats>(from); }

#ifdef __aarch64__
// The two halves of a vector, as NEON vectors.
template <class Part>
struct Halves {
  Part low, high;
};

template <class Part, class Vector>
inline Halves<Part> halves(Vector x) {
  return load<Halves<Part>>(&x);
}

template <class Vector, class Part>
inline Vector joined(Part low, Part high) {
  const Halves<Part> both = {low, high};
  return load<Vector>(&both);
}
#endif

inline Floats load(const Half* from) {
#ifdef __AVX2__
  return _mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
  const auto x = load<float16x8_t>(from);
  return joined<Floats>(vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x));
#else
  Floats x;
  for (int lane = 0; lane < LANES; ++lane) x[lane] = static_cast<float>(from[lane]);
  return x;
#endif
}

inline Floats load(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<WordsOf<uint16_t>::Vector>(from), Ints) << 16);
}

// Loads the first `count` numbers only, followed by zeros.
inline Floats load(const Half* from, int64_t count) {
  if (count >= LANES) return load(from);
  Half padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(Half));
  return load(padded);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

template <class Word>
inline Ints load_words(const Word* from) {
#ifdef __AVX2__  // GCC would widen bytes one by one
  if constexpr (std::is_same_v<Word, uint8_t>) return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
#endif
  return __builtin_convertvector(load<typename WordsOf<Word>::Vector>(from), Ints);
}

// Moves every number one lane up; lane 0 gets the last.
inline Ints moved_up(Ints x) { return __builtin_shufflevector(x, x, 7, 0, 1, 2, 3, 4, 5, 6); }

// Mask with one bit per lane, set if the lane is true.
inline uint32_t true_lanes(Ints x) {
#ifdef __AVX2__
  return _mm256_movemask_ps((__m256)x);
#elif defined(__aarch64__)
  x &= Ints{1, 2, 4, 8, 16, 32, 64, 128};
  const auto [low, high] = halves<int32x4_t>(x);
  return vaddvq_s32(low + high);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits |= (x[lane] & 1) << lane;
  return bits;
#endif
}

// Products of the low and of the high 16 bits of each word, as signed numbers, added up.
inline Ints dot_halves(Ints x, Ints y) {
#ifdef __AVX2__
  return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif defined(__aarch64__)
  const auto four = [](int16x8_t x, int16x8_t y) {
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
  };
  const auto a = halves<int16x8_t>(x), b = halves<int16x8_t>(y);
  return joined<Ints>(four(a.low, b.low), four(a.high, b.high));
#else
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Stores the first `count` numbers only.
inline void store(float* to, Floats x, int64_t count) {
  std::memcpy(to, &x, count < LANES ? count * sizeof(float) : sizeof x);
}

// Table of COUNT levels, which lie `stride` numbers apart, looked up by the low bits of LANES codes at once, whatever
// their other bits hold.
template <int COUNT>
class Table {
 public:
  explicit Table(const float* levels, int64_t stride = 1) {
    for (int i = 0; i < VECTORS * LANES; ++i) levels_[i / LANES][i % LANES] = levels[i % COUNT * stride];
  }

  Floats operator[](Ints codes) const {
#ifdef __AVX2__
    return choose<VECTORS>(levels_, codes);
#elif defined(__aarch64__)
    const Ints known = codes & static_cast<int>(VECTORS * LANES - 1);
    const auto bytes = (WordsOf<uint32_t>::Vector)known * 0x04040404u + 0x03020100u;
    const auto places = halves<uint8x16_t>(bytes);
    return joined<Floats>(look_up(places.low), look_up(places.high));
#else
    Floats looked_up;
    for (int lane = 0; lane < LANES; ++lane) {
      const int code = codes[lane] & (COUNT - 1);  // unused lanes hold any number
      looked_up[lane] = levels_[code / LANES][code % LANES];
    }
    return looked_up;
#endif
  }

  void operator*=(float factor) {
    for (Floats& levels : levels_) levels *= factor;
  }

 private:
  static constexpr int VECTORS = COUNT > LANES ? COUNT / LANES : 1;

#ifdef __AVX2__
  // Looks up codes in N vectors: the bit that tells the halves of the table apart, shifted to the sign, chooses.
  template <int N>
  static Floats choose(const Floats* levels, Ints codes) {
    if constexpr (N == 1) {
      return _mm256_permutevar8x32_ps(*levels, (__m256i)codes);
#ifdef __AVX512VL__
    } else if constexpr (N == 2) {
      return _mm256_permutex2var_ps(levels[0], (__m256i)codes, levels[1]);
#endif
    } else {
      const Ints upper = codes << (32 - std::countr_zero<unsigned>(N * LANES));
      return _mm256_blendv_ps(choose<N / 2>(levels, codes), choose<N / 2>(levels + N / 2, codes), (__m256)upper);
    }
  }
#elif defined(__aarch64__)
  // The bytes of all levels at these places.
  float32x4_t look_up(uint8x16_t places) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(levels_);
    if constexpr (VECTORS == 1)
      return (float32x4_t)vqtbl2q_u8({load<uint8x16_t>(bytes), load<uint8x16_t>(bytes + 16)}, places);
    uint8x16_t found{};
    for (int i = 0; i < VECTORS / 2; ++i, bytes += 64, places -= 64) {
      const uint8x16x4_t table = {load<uint8x16_t>(bytes), load<uint8x16_t>(bytes + 16), load<uint8x16_t>(bytes + 32),
                                  load<uint8x16_t>(bytes + 48)};
      found = vqtbx4q_u8(found, table, places);
    }
    return (float32x4_t)found;
  }
#endif

  Floats levels_[VECTORS] = {};
};

// Writes the sum of each of four vectors.
inline void sum_each(const Floats (&x)[4], float* sums) {
#ifdef __AVX2__
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else  // in AVX2's order
  for (int i = 0; i < 4; ++i) {
    const Floats& y = x[i];
    sums[i] = ((y[0] + y[1]) + (y[2] + y[3])) + ((y[4] + y[5]) + (y[6] + y[7]));
  }
#endif
}

// 2^x for x <= 0 with a relative error of 2e-7; 0 if the result is not a normal number; NaN stays NaN.
inline Floats exp2(Floats x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats shifted = x + ROUND;
  const Floats f = x - (shifted - ROUND);
  // Taylor's polynomial of 2^f on [-1/2, 1/2].
  Floats y = f * 1.5403530e-4f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)(Floats{} + ROUND) + 127) << 23;
  return x < -126.0f ? Floats{} : y * (Floats)power;
}

}  // namespace kvcache_compress
