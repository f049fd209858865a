// Decoders of stored tokens, tile by tile, to float32 in the code space of their side.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "common/side.h"
#include "common/simd.h"

namespace kvcache_compress {

constexpr int64_t CODES_PER_WORD = 8;

// Converts `n` numbers of a stored dtype to float32.
template <class Number>
void widen(const void* from, int64_t n, float* to) {
  const auto* x = static_cast<const Number*>(from);
  int64_t i = 0;
  if constexpr (!std::is_same_v<Number, double>) {
    for (; i + LANES <= n; i += LANES) store(to + i, load(x + i));
  }
  for (; i < n; ++i) to[i] = static_cast<float>(x[i]);
}

using Widen = void (*)(const void*, int64_t, float*);

inline Widen widen_from(ScalarType dtype) {
  if (dtype == ScalarType::Float) return widen<float>;
  if (dtype == ScalarType::Half) return widen<Half>;
  if (dtype == ScalarType::BFloat16) return widen<BFloat16>;
  STD_TORCH_CHECK(dtype == ScalarType::Double, "floating point numbers are needed");
  return widen<double>;
}

// A key/value head of one sequence of the batch; or of one page, which holds tokens from number `start` on.
struct Head {
  int64_t batch, head, start = 0;
};

class Decoder {
 public:
  virtual ~Decoder() = default;

  // Decodes tokens [first, first + count) of a head into `tile` [count][width].
  virtual void decode(const Head& head, int64_t first, int64_t count, float* tile) const = 0;

  // Returns the same tokens: decoded into `tile`, or in place if they are stored as float32 without gaps.
  virtual const float* read(const Head& head, int64_t first, int64_t count, float* tile) const {
    decode(head, first, count, tile);
    return tile;
  }

  int64_t width = 0;
};

// A run of words of a token: `count` words from word `first` on.
struct Words {
  int64_t first, count;
};

// A field of a store, [B, H, rows, numbers].
class Field {
 public:
  explicit Field(const View& x)
      : data_(static_cast<const char*>(x.data)),
        batch_(x.stride(0) * x.bytes),
        head_(x.stride(1) * x.bytes),
        row_(x.stride(2) * x.bytes) {
    numbers = x.dims == 4 ? x.size(3) : 1;
    STD_TORCH_CHECK(numbers == 1 || x.stride(3) == 1, "the numbers of a field must be contiguous");
  }

  template <class Number>
  const Number* row(const Head& head, int64_t row) const {
    return reinterpret_cast<const Number*>(data_ + head.batch * batch_ + head.head * head_ + row * row_);
  }

  Words words() const { return {0, numbers}; }

  int64_t numbers;

 private:
  const char* data_;
  int64_t batch_, head_, row_;
};

// Uncompressed tokens [B, H, T, D]; their code space is D wide, rounded up to a multiple of LANES.
class DenseDecoder : public Decoder {
 public:
  explicit DenseDecoder(const View& x) : tokens_(x), widen_(widen_from(x.dtype)) {
    width = whole_lanes(tokens_.numbers);
    ready_ = x.dtype == ScalarType::Float && tokens_.numbers == width && x.stride(2) == width;
  }

  explicit DenseDecoder(const Side& side) : DenseDecoder(side.fields[0]) {}

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    for (int64_t t = first; t < first + count; ++t, tile += width) {
      widen_(tokens_.row<char>(head, t), tokens_.numbers, tile);
      std::fill(tile + tokens_.numbers, tile + width, 0.0f);
    }
  }

  const float* read(const Head& head, int64_t first, int64_t count, float* tile) const override {
    return ready_ ? tokens_.row<float>(head, first) : Decoder::read(head, first, count, tile);
  }

 private:
  Field tokens_;
  Widen widen_;
  bool ready_;  // tokens are float32 and follow each other without padding
};

// The bit planes of codes of BITS bits: see layout.py.
template <int BITS>
struct Planes {
  static constexpr int LOW = BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1, HIGH = BITS - LOW;
  template <int PLANE>
  using Word = std::conditional_t<PLANE == 4, int32_t, std::conditional_t<PLANE == 2, int16_t, uint8_t>>;
  using LowWord = Word<LOW>;
  using HighWord = Word<HIGH>;
};

// Loads the first `count` words only, followed by zeros.
template <class Word>
inline Ints load_words(const Word* words, int64_t count) {
  if (count >= LANES) return load_words(words);
  Word padded[LANES] = {};
  std::memcpy(padded, words, count * sizeof(Word));
  return load_words(padded);
}

// Loads LANES / 2 words, twice.
template <class Word>
inline Ints load_twice(const Word* words) {
  Word padded[LANES];
  std::memcpy(padded, words, LANES / 2 * sizeof(Word));
  std::memcpy(padded + LANES / 2, padded, LANES / 2 * sizeof(Word));
  return load_words(padded);
}

// Unpacks the codes of a token and calls `emit(channel, codes, lanes)` for each run of LANES channels, of which the
// first `lanes` may be written, up to the token's end. Runs may overlap: those of whole lanes emit the same codes
// twice, and others are emitted before the runs that they overlap. Unless CLEAN, the bits above a code, which `Table`
// ignores, hold anything.
template <int BITS, bool CLEAN = true, class Emit>
[[gnu::always_inline]] inline void each_run(const Field* planes, const Head& head, int64_t token, const Words& range,
                                            Emit emit) {
  using P = Planes<BITS>;
  constexpr int LOW_MASK = CLEAN || P::HIGH > 0 ? (1 << P::LOW) - 1 : -1;
  constexpr int HIGH_MASK = CLEAN ? (1 << P::HIGH) - 1 : -1;
  const int64_t words = range.count;
  const auto* low = planes[0].row<typename P::LowWord>(head, token) + range.first;
  const typename P::HighWord* high = nullptr;
  if constexpr (P::HIGH > 0) high = planes[1].row<typename P::HighWord>(head, token) + range.first;
  const auto run = [&]<bool WHOLE>(int64_t word) __attribute__((always_inline)) {
    const int64_t count = WHOLE ? LANES : words;
    const Ints low_words = load_words(low + word, count);
    Ints high_words = {};
    if constexpr (P::HIGH > 0) high_words = load_words(high + word, count);
#pragma GCC unroll 8
    for (int part = 0; part < CODES_PER_WORD; ++part) {
      Ints codes = (low_words >> (P::LOW * part)) & LOW_MASK;
      if constexpr (P::HIGH > 0) codes |= ((high_words >> (P::HIGH * part)) & HIGH_MASK) << P::LOW;
      const int64_t channel = part * words + word;
      emit(channel, codes, WHOLE ? LANES : std::min(LANES, CODES_PER_WORD * words - channel));
    }
  };
  if (words >= LANES) {
    for (int64_t word = words - LANES; word > 0; word -= LANES) run.template operator()<true>(word);
    run.template operator()<true>(0);
  } else if (words == LANES / 2) {
    // The words twice, of which the lower half yields one part and the upper half the next.
    const Ints low_words = load_twice(low);
    Ints high_words = {};
    if constexpr (P::HIGH > 0) high_words = load_twice(high);
    const Ints second = Ints{0, 0, 0, 0, 1, 1, 1, 1};
#pragma GCC unroll 4
    for (int part = 0; part < CODES_PER_WORD; part += 2) {
      Ints codes = (low_words >> (P::LOW * (second + part))) & LOW_MASK;
      if constexpr (P::HIGH > 0) codes |= ((high_words >> (P::HIGH * (second + part))) & HIGH_MASK) << P::LOW;
      emit(part * words, codes, LANES);
    }
  } else {
    run.template operator()<false>(0);
  }
}

// Levels of trellis codes of BITS bits (see codecs/quantizers/trellis.py), looked up in halves of at most eight.
template <int BITS>
class TrellisTable {
  static constexpr int COUNT = BITS == 1 ? 4 : 8;

 public:
  explicit TrellisTable(const float* levels) : lower_(levels), upper_(levels + (BITS == 3 ? COUNT : 0)) {}

  void operator*=(float factor) { lower_ *= factor, upper_ *= factor; }

  // Unpacks the levels of a token and calls `emit(channel, levels, lanes)` as `each_run` does.
  template <class Emit>
  [[gnu::always_inline]] void each_run(const Field* planes, const Head& head, int64_t token, Emit emit) const {
    const int64_t words = planes[0].numbers;
    const auto* low = planes[0].row<LowWord>(head, token);
    const uint8_t* high = nullptr;
    if constexpr (BITS == 3) high = planes[1].row<uint8_t>(head, token);
    if (words >= LANES) {
      for (int64_t word = words - LANES; word > 0; word -= LANES) run<false>(low, high, words, word, LANES, emit);
      run<true>(low, high, words, 0, LANES, emit);
    } else {
      run<true>(low, high, words, 0, words, emit);
    }
  }

 private:
  using LowWord = typename Planes<BITS>::LowWord;
  static constexpr int STREAM = BITS == 1 ? 1 : 2, WORD = STREAM * CODES_PER_WORD;  // bits of a code and of a word

  template <bool FIRST, class Emit>
  [[gnu::always_inline]] void run(const LowWord* low, const uint8_t* high, int64_t words, int64_t word, int64_t count,
                                  Emit emit) const {
    const Ints low_words = load_words(low + word, count);
    Ints before;
    if constexpr (FIRST) {
      before = moved_up(low_words);  // the register starts with the last codes
      if (words != LANES) before[0] = low[words - 1];
    } else {
      before = load_words(low + word - 1);
    }
    const Ints both = low_words << WORD | (before & ((1 << WORD) - 1));
    const Ints stream = STREAM == 1 ? both : both & 0x55555555;
    const Ints first = stream ^ stream << STREAM ^ stream << (6 * STREAM);
    const Ints second = stream << (2 * STREAM) ^ stream << (4 * STREAM);
    Ints fields[2];  // indices in the table of even and of odd parts, 2 * STREAM bits each
    if constexpr (BITS == 1) {
      fields[0] = (first & 0x5555) | (second << 1 & 0xaaaa);
      fields[1] = (first >> 1 & 0x5555) | (second & 0xaaaa);
    } else {
      const Ints subsets = first | second << 1;
      fields[0] = (subsets & 0x33333333) | (both << 1 & 0x44444444);
      fields[1] = (subsets >> 2 & 0x33333333) | (both >> 1 & 0x44444444);
    }
    Ints high_words = {};
    if constexpr (BITS == 3) high_words = load_words(high + word, count);
#pragma GCC unroll 8
    for (int part = 0; part < CODES_PER_WORD; ++part) {
      const Ints codes = fields[part % 2] >> (WORD + part / 2 * 2 * STREAM);
      Floats levels = lower_[codes];
      if constexpr (BITS == 3) levels = high_words << (31 - part) < 0 ? upper_[codes] : levels;
      emit(part * words + word, levels, count);
    }
  }

  Table<COUNT> lower_, upper_;
};

// Levels of other codes of BITS bits, in the same form.
template <int BITS>
class LevelTable {
 public:
  explicit LevelTable(const float* levels) : table_(levels) {}

  void operator*=(float factor) { table_ *= factor; }

  template <class Emit>
  [[gnu::always_inline]] void each_run(const Field* planes, const Head& head, int64_t token, Emit emit) const {
    kvcache_compress::each_run<BITS, false>(
        planes, head, token, planes[0].words(),
        [&] [[gnu::always_inline]] (int64_t channel, Ints codes, int64_t n) { emit(channel, table_[codes], n); });
  }

 private:
  Table<1 << BITS> table_;
};

// Decodes tokens [first, first + count) of a component to `to`, whose rows are `stride` numbers apart.
template <class Levels>
void decode_levels(const Levels& levels, const Field* planes, const Half* scales, const Head& head, int64_t first,
                   int64_t count, float* to, int64_t stride) {
  for (int64_t t = 0; t < count; ++t, to += stride) {
    Levels scaled = levels;
    scaled *= scales[t];
    scaled.each_run(planes, head, first + t, [&] [[gnu::always_inline]] (int64_t channel, Floats x, int64_t lanes) {
      store(to + channel, x, lanes);
    });
  }
}

// Calls `call` with the number of bits as a template argument, and returns its result.
template <int MOST = 6, class Call>
inline auto with_bits(int64_t bits, Call call) {
  if constexpr (MOST > 1) {
    if (bits < MOST) return with_bits<MOST - 1>(bits, call);
  }
  STD_TORCH_CHECK(bits == MOST, "1 to 6 bits are needed");
  return call.template operator()<MOST>();
}

inline int64_t plane_count(int64_t bits) { return bits == 3 || bits >= 5 ? 2 : 1; }

// TurboQuant (Algorithms 1 and 2) and QJL (Definition 3.1): components `scale * levels[codes]`, each along its rows.
// Options: bits of each component. Fields of a component: its planes, then its scale; its table: levels, [2^bits], or
// [2^(bits + 1)] of trellis codes.
class LevelDecoder : public Decoder {
 public:
  explicit LevelDecoder(const Side& side) {
    auto field = side.fields.begin();
    auto levels = side.tables.begin();
    for (const int64_t bits : side.options) {
      add(bits, *levels++, &*field, field[plane_count(bits)]);
      field += plane_count(bits) + 1;
    }
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    for (const auto& part : components_) {
      const auto decode = [&](const auto& levels) {
        const Half* scales = part.scales.row<Half>(head, 0) + first;
        decode_levels(levels, part.planes.data(), scales, head, first, count, tile + part.start, width);
      };
      with_bits(part.bits, [&]<int BITS>() {
        if (!part.trellis) {
          decode(LevelTable<BITS>(part.levels));
        } else if constexpr (BITS <= 3) {
          decode(TrellisTable<BITS>(part.levels));
        }
      });
    }
  }

 protected:
  LevelDecoder() = default;

  // Adds a component with these levels, planes from this one on, and scales, one per token.
  void add(int64_t bits, const View& levels, const View* planes, const View& scales) {
    const std::vector<Field> fields(planes, planes + plane_count(bits));
    components_.push_back(
        {bits, width, levels.numel() > 1 << bits, levels.const_data_ptr<float>(), fields, Field(scales)});
    width += fields[0].numbers * CODES_PER_WORD;
  }

 private:
  struct Component {
    int64_t bits, start;
    bool trellis;
    const float* levels;
    std::vector<Field> planes;
    Field scales;
  };

  std::vector<Component> components_;
};

// Repeats numbers that `channels` channels share to all `width` channels of a token. Writes up to LANES beyond the end.
inline void spread(const Half* from, int64_t channels, int64_t width, float* to) {
  for (int64_t channel = 0; channel < width; channel += channels) {
    const Floats x = Floats{} + static_cast<float>(*from++);
    for (int64_t i = 0; i < channels; i += LANES) store(to + channel + i, x);
  }
}

// KIVI (section 3.2): `code * scale + zero`, with one scale and zero point per `tokens` tokens and `channels` channels.
// Options: bits, tokens, channels. Fields: planes, scale, zero.
class GroupDecoder : public Decoder {
 public:
  explicit GroupDecoder(const Side& side) : fields_(side.fields.begin(), side.fields.end()) {
    side.read_options(bits_, tokens_, channels_);
    width = fields_[0].numbers * CODES_PER_WORD;
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    with_bits(bits_, [&]<int BITS>() {
      const Field &scales = fields_.end()[-2], &zeros = fields_.end()[-1];
      // Declared in here, since pointers from outside would be read again after every store.
      std::vector<float> factors(2 * (width + LANES));
      float *const scale = factors.data(), *const zero = scale + width + LANES;
      for (int64_t t = first; t < first + count;) {
        const int64_t group = t / tokens_, end = std::min(first + count, (group + 1) * tokens_);
        spread(scales.row<Half>(head, group), channels_, width, scale);
        spread(zeros.row<Half>(head, group), channels_, width, zero);
        for (; t < end; ++t) {
          float* to = tile + (t - first) * width;
          each_run<BITS>(fields_.data(), head, t, fields_[0].words(),
                         [&] [[gnu::always_inline]] (int64_t channel, Ints codes, int64_t lanes) {
                           const Floats x = __builtin_convertvector(codes, Floats);
                           store(to + channel, x * load(scale + channel) + load(zero + channel), lanes);
                         });
        }
      }
    });
  }

 private:
  std::vector<Field> fields_;
  int64_t bits_, tokens_, channels_;
};

}  // namespace kvcache_compress
