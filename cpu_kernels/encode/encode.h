// Quantize vectors and pack their codes into bit planes: the inverse of the decoders.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "decode/decode.h"

namespace kvcache_compress {

constexpr int64_t TASK_NUMBERS = 8192;  // fewer numbers are not worth a thread

// Calls `encode(first, end)` for ranges of the vectors x [..., D], in parallel.
template <class Encode>
void each_range(const Tensor& x, Encode encode) {
  const int64_t width = std::max<int64_t>(1, x.size(x.dim() - 1));
  torch::stable::parallel_for(0, x.numel() / width, std::max<int64_t>(1, TASK_NUMBERS / width), encode);
}

inline Ints first_lanes(int64_t lanes) { return Ints{0, 1, 2, 3, 4, 5, 6, 7} < static_cast<int32_t>(lanes); }

// Loads the first `lanes` numbers only, followed by zeros.
inline Floats load_lanes(const float* from, int64_t lanes) {
  if (lanes >= LANES) return load(from);
#ifdef __AVX2__
  return _mm256_maskload_ps(from, (__m256i)first_lanes(lanes));
#else
  float padded[LANES] = {};
  std::memcpy(padded, from, lanes * sizeof(float));
  return load(padded);
#endif
}

inline Floats keep_lanes(Floats x, int64_t lanes) { return lanes >= LANES ? x : (first_lanes(lanes) ? x : Floats{}); }

// Stores the low bits of the first `lanes` numbers as words.
template <class Word>
inline void store_words(Word* to, Ints x, int64_t lanes) {
  const auto words = __builtin_convertvector(x, typename WordsOf<Word>::Vector);
  std::memcpy(to, &words, std::min(lanes, LANES) * sizeof(Word));
}

// Empty tensor [..., last] for vectors x [..., D]; [...] if `last` is 0.
inline Tensor empty_field(const Tensor& x, int64_t last, ScalarType dtype) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  if (last > 0) shape.push_back(last);
  return torch::stable::new_empty(x, shape, dtype);
}

// Empty bit planes of `words` words for vectors x [..., D]: see layout.py.
inline std::vector<Tensor> empty_planes(const Tensor& x, int64_t words, int64_t bits) {
  std::vector<Tensor> planes;
  const int64_t low = bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
  for (const int64_t plane : {low, bits - low}) {
    const auto word = plane == 1 ? ScalarType::Byte : plane == 2 ? ScalarType::Short : ScalarType::Int;
    if (plane > 0) planes.push_back(empty_field(x, words, word));
  }
  return planes;
}

// Packs the codes of `words` words into their planes. `codes(channel, lanes)` returns the codes of LANES channels from
// `channel` on, of which only the first `lanes` are used.
template <int BITS, class Codes>
[[gnu::always_inline]] inline void pack_words(typename Planes<BITS>::LowWord* low_words,
                                              typename Planes<BITS>::HighWord* high_words, int64_t words, Codes codes) {
  using P = Planes<BITS>;
  const auto runs = [&]<bool WHOLE>() __attribute__((always_inline)) {
    for (int64_t word = 0; word < words; word += LANES) {
      const int64_t lanes = WHOLE ? LANES : std::min(LANES, words - word);
      Ints low = {}, high = {};
#pragma GCC unroll 8
      for (int part = 0; part < CODES_PER_WORD; ++part) {
        const Ints run = codes(part * words + word, lanes);
        low |= (run & ((1 << P::LOW) - 1)) << (P::LOW * part);
        if constexpr (P::HIGH > 0) high |= (run >> P::LOW & ((1 << P::HIGH) - 1)) << (P::HIGH * part);
      }
      store_words(low_words + word, low, lanes);
      if constexpr (P::HIGH > 0) store_words(high_words + word, high, lanes);
    }
  };
  words % LANES == 0 ? runs.template operator()<true>() : runs.template operator()<false>();
}

// Writes the bit planes of all vectors x [..., D], with codes of BITS bits.
template <int BITS>
class PlaneWriter {
  using P = Planes<BITS>;

 public:
  explicit PlaneWriter(const Tensor& x)
      : words_(x.size(x.dim() - 1) / CODES_PER_WORD),
        fields_(empty_planes(x, words_, BITS)),
        low_(static_cast<typename P::LowWord*>(fields_.front().mutable_data_ptr())),
        high_(static_cast<typename P::HighWord*>(fields_.back().mutable_data_ptr())) {}

  const std::vector<Tensor>& fields() const { return fields_; }

  // Packs a vector; see `pack_words`.
  template <class Codes>
  [[gnu::always_inline]] void pack(int64_t vector, Codes codes) const {
    pack_words<BITS>(low_ + vector * words_, high_ + vector * words_, words_, codes);
  }

 private:
  int64_t words_;
  std::vector<Tensor> fields_;
  typename P::LowWord* low_;
  typename P::HighWord* high_;
};

// Finds the levels nearest to numbers by binary search in the boundaries between them, one bit of the codes per step. A
// number on a boundary gets the level below; NaN gets the last level.
template <int BITS>
class Nearest {
 public:
  explicit Nearest(const float* bounds, int64_t stride = 1)
      : coarser_(bounds + stride, 2 * stride), bounds_(bounds, 2 * stride) {}

  Ints operator()(Floats x) const {
    const Ints code = coarser_(x);
    return code + code + 1 + (x <= bounds_[code]);
  }

 private:
  Nearest<BITS - 1> coarser_;
  Table<1 << (BITS - 1)> bounds_;
};

template <>
class Nearest<0> {
 public:
  Nearest(const float*, int64_t) {}
  Ints operator()(Floats) const { return Ints{}; }
};

inline Floats clamp(Floats x, float most) {
  x = x > 0.0f ? x : Floats{};
  return x < most ? x : Floats{} + most;
}

}  // namespace kvcache_compress
