// Decoders of CommVQ: sums of codebook rows (see additive.py), keys rotated by RoPE, and the bits of the encoder.
#pragma once

#include <bit>

#include "common/products.h"
#include "decode/decode.h"

namespace kvcache_compress {

constexpr int LINE = 4;  // vectors of LANES halves per cache line

// Splits `n` numbers into runs of up to MOST registers, powers of two, and calls `call(first, lanes)` for each, with
// the number of registers as a template argument. Only a run of one register may have fewer than LANES numbers.
template <int MOST, class Call>
inline void each_run_of_registers(int64_t n, Call call, int64_t first = 0) {
  for (; n - first >= MOST * LANES; first += MOST * LANES) call.template operator()<MOST>(first, LANES);
  if constexpr (MOST > 1) {
    each_run_of_registers<MOST / 2>(n, call, first);
  } else if (first < n) {
    call.template operator()<1>(first, n - first);
  }
}

// Residual codebooks, float16 [S, N, ...], whose rows are named by `parts` indices per group and round. `places`, int32
// [H, 3], has the first book, the rounds and the first byte of the codes of each head; the codes of a token are one run
// of bytes over the rows of all heads.
class Codebooks {
 public:
  Codebooks(const View& books, const View& places, int64_t groups, int64_t parts)
      : groups(groups),
        books_(books.const_data_ptr<Half>()),
        places_(places.const_data_ptr<int32_t>()),
        parts_(parts),
        centres_(books.size(1)),
        row_(books.stride(1)),
        bits_(std::countr_zero(static_cast<uint64_t>(books.size(1)))) {
    STD_TORCH_CHECK(books.is_contiguous() && places.is_contiguous(), "codebooks must be contiguous");
    STD_TORCH_CHECK(std::has_single_bit(static_cast<uint64_t>(centres_)) && bits_ <= 8,
                    "a codebook must have a power of two of rows, at most 256");
  }

  const Half* of(const Head& head) const { return books_ + places_[3 * head.head] * centres_ * row_; }

  // Rows that are added up for a group.
  int64_t terms(const Head& head) const { return places_[3 * head.head + 1] * parts_; }

  // Numbers from one token to the next in what `find` returns.
  int64_t stride(const Head& head) const { return whole_lanes(groups * terms(head)); }

  // Numbers of a row.
  int64_t width() const { return row_; }

  int64_t centres() const { return centres_; }

  // Offsets, in a head's books, of the rows that the codes of tokens name, if a row takes `width` numbers:
  // [count][G][terms], `stride` per token. One more token has zeros, for the prefetch while the last one is summed.
  std::vector<uint32_t> find(const Field& codes, const Head& head, int64_t first, int64_t count, uint32_t width) const {
    const int64_t each = stride(head), used = groups * terms(head), bytes = (used * bits_ + 7) / 8;
    std::vector<uint32_t> rows((count + 1) * each), starts(each);
    for (int64_t i = 0; i < used; ++i) starts[i] = i / parts_ * centres_ * width;
    const int64_t apart = each * bits_ / 8 + 8;
    const std::vector<uint8_t> runs = copied(codes, head, first, count, bytes, apart);
    const uint64_t mask = (uint64_t{1} << bits_) - 1, bits = bits_;
    const Longs shifts = {0, bits, 2 * bits, 3 * bits};
    for (int64_t t = 0; t < count; ++t) {
      const uint8_t* run = &runs[t * apart];
      uint32_t* to = &rows[t * each];
      for (int64_t i = 0, byte = 0; i < each; i += LANES, byte += bits_) {
        uint64_t eight;
        std::memcpy(&eight, run + byte, 8);
        for (int half = 0; half < 2; ++half, eight >>= 4 * bits_) {
          const Longs four = ((Longs{} + eight) >> shifts) & mask;
          const auto places = __builtin_convertvector(four, Words) * width + load<Words>(&starts[i + 4 * half]);
          std::memcpy(to + i + 4 * half, &places, sizeof places);
        }
      }
    }
    return rows;
  }

  int64_t groups;

 private:
  using Longs = uint64_t __attribute__((vector_size(32)));
  using Words = uint32_t __attribute__((vector_size(16)));

  // Copies the bytes of a head's codes, which may lie in the rows of several heads: [count][apart].
  std::vector<uint8_t> copied(const Field& codes, const Head& head, int64_t first, int64_t count, int64_t bytes,
                              int64_t apart) const {
    std::vector<uint8_t> runs(count * apart);
    const int64_t row = codes.numbers, begin = places_[3 * head.head + 2];
    for (int64_t from = begin, end = begin + bytes; from < end;) {
      const int64_t here = std::min(end - from, row - from % row);
      for (int64_t t = 0; t < count; ++t) {
        const uint8_t* x = codes.row<uint8_t>({head.batch, from / row}, first + t) + from % row;
        std::copy_n(x, here, &runs[t * apart + from - begin]);
      }
      from += here;
    }
    return runs;
  }

  const Half* books_;
  const int32_t* places_;
  int64_t parts_, centres_, row_, bits_;
};

// Values in the residual form (section 4.2): `scale * sum of rows`. A few rows of queries sum them by code (equation
// 22). Fields: codes, scale. Option: groups. Tables: books, [S, N, w], and places.
class AdditiveDecoder : public Decoder, public CodeSums {
 public:
  explicit AdditiveDecoder(const Side& side)
      : codes_(side.fields[0]), scales_(side.fields[1]), books_(side.tables[0], side.tables[1], side.options[0], 1) {
    width = books_.groups * books_.width();
    for (int64_t head = 0; head < side.tables[1].size(0); ++head) codes = std::max(codes, codes_of({0, head}));
    worthwhile = 8 * books_.centres();
  }

  const CodeSums* code_sums() const override { return this; }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const std::vector<uint32_t> rows = books_.find(codes_, head, first, count, books_.width());
    const int64_t stride = books_.stride(head), summed = books_.terms(head);
    for (int64_t t = 0; t < count; ++t) {
      const float scale = *scales_.row<Half>(head, first + t);
      for (int64_t group = 0; group < books_.groups; ++group) {
        const uint32_t* terms = &rows[t * stride + group * summed];
        float* to = tile + t * width + group * books_.width();
        each_run_of_registers<8>(books_.width(), [&]<int COUNT>(int64_t at, int64_t lanes) {
          add_rows<COUNT>(books_.of(head) + at, terms, summed, stride, scale, lanes, to + at);
        });
      }
    }
  }

  void add(const Head& head, int64_t first, int64_t count, const float* weights, int64_t stride, int64_t rows,
           float* sums) const override {
    if (lanes(rows) == LANES) {
      add_weights<Floats>(head, first, count, weights, stride, rows, sums);
    } else {
      add_weights<HalfFloats>(head, first, count, weights, stride, rows, sums);
    }
  }

  void multiply(const Head& head, const float* sums, int64_t rows, float* values) const override {
    constexpr int64_t BLOCK = 32;  // codebook rows
    const int64_t group_codes = codes_of(head) / books_.groups, group_width = books_.width(), apart = lanes(rows);
    const int64_t padded = whole_lanes(group_width);
    std::vector<float> decoded(BLOCK * padded), weights(rows * BLOCK), summed(rows * padded);
    for (int64_t group = 0; group < books_.groups; ++group) {
      std::fill(summed.begin(), summed.end(), 0.0f);
      for (int64_t code = group * group_codes; code < (group + 1) * group_codes; code += BLOCK) {
        const int64_t count = std::min(BLOCK, (group + 1) * group_codes - code);
        for (int64_t i = 0; i < count; ++i) {
          widen<Half>(books_.of(head) + (code + i) * group_width, group_width, &decoded[i * padded]);
          for (int64_t r = 0; r < rows; ++r) weights[r * BLOCK + i] = sums[(code + i) * apart + r];
        }
        add_weighted(weights.data(), BLOCK, decoded.data(), count, padded, rows, summed.data(), padded);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = &summed[r * padded];
        float* to = values + r * width + group * group_width;
        for (int64_t c = 0; c < group_width; ++c) to[c] += from[c];
      }
    }
  }

 private:
  using HalfFloats = float __attribute__((vector_size(2 * LANES)));

  int64_t codes_of(const Head& head) const { return books_.groups * books_.terms(head) * books_.centres(); }

  // `Vector` has the rows' weights of a token.
  template <class Vector>
  void add_weights(const Head& head, int64_t first, int64_t count, const float* weights, int64_t stride, int64_t rows,
                   float* sums) const {
    constexpr int64_t WIDTH = sizeof(Vector) / sizeof(float);
    const std::vector<uint32_t> found = books_.find(codes_, head, first, count, WIDTH);
    const int64_t each = books_.stride(head), used = books_.groups * books_.terms(head);
    for (int64_t t = 0; t < count; ++t) {
      const float scale = *scales_.row<Half>(head, first + t);
      Vector scaled = {};
      for (int64_t r = 0; r < rows; ++r) scaled[r] = weights[r * stride + t] * scale;
      const uint32_t* places = &found[t * each];
      for (int64_t i = 0; i < used; ++i) {
        const Vector sum = load<Vector>(sums + places[i]) + scaled;
        std::memcpy(sums + places[i], &sum, sizeof sum);
      }
    }
  }

  template <int COUNT>
  void add_rows(const Half* from, const uint32_t* rows, int64_t terms, int64_t stride, float scale, int64_t lanes,
                float* to) const {
    const int64_t n = COUNT > 1 ? LANES : lanes;
    Floats sums[COUNT] = {};
    for (int64_t i = 0; i < terms; ++i) {
      for (int j = 0; j < COUNT; j += LINE) __builtin_prefetch(from + rows[i + stride] + j * LANES);
      for (int j = 0; j < COUNT; ++j) sums[j] += load(from + rows[i] + j * LANES, n);
    }
    for (int j = 0; j < COUNT; ++j) store(to + j * LANES, sums[j] * scale, n);
  }

  Field codes_, scales_;
  Codebooks books_;
};

// Keys (section 4.2): `scale * e^(i theta) * sum of (c[a] + i c[b])`, in code space `[real parts | imaginary parts]` of
// all pairs, rotary ones first. Fields: codes, in each round b before a; scale; cos and sin of the rotary pairs.
// Option: groups. Tables: books, [S, N, 2, pairs of a group], places, and, if pairs were weighed, their weights to
// divide by, [H, pairs].
class ComplexDecoder : public Decoder {
 public:
  explicit ComplexDecoder(const Side& side)
      : codes_(side.fields[0]),
        scales_(side.fields[1]),
        rope_(side.fields[2]),
        books_(side.tables[0], side.tables[1], side.options[0], 2) {
    if (side.tables.size() > 2) weights_ = side.tables[2].const_data_ptr<Half>();
    width = books_.groups * books_.width();
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const int64_t pairs = width / 2, group_pairs = books_.width() / 2, rotary = rope_.numbers / 2;
    std::vector<float> gain(pairs + LANES, 1.0f), cosine(pairs + LANES, 1.0f), sine(pairs + LANES);
    for (int64_t i = 0; i < pairs && weights_ != nullptr; ++i) gain[i] = 1.0f / weights_[head.head * pairs + i];
    const std::vector<uint32_t> rows = books_.find(codes_, head, first, count, books_.width());
    const int64_t stride = books_.stride(head), summed = books_.terms(head);
    for (int64_t t = 0; t < count; ++t) {
      const Half* factors = rope_.row<Half>(head, first + t);
      widen<Half>(factors, rotary, cosine.data());
      widen<Half>(factors + rotary, rotary, sine.data());
      const float scale = *scales_.row<Half>(head, first + t);
      for (int64_t group = 0; group < books_.groups; ++group) {
        const uint32_t* terms = &rows[t * stride + group * summed];
        each_run_of_registers<4>(group_pairs, [&]<int COUNT>(int64_t at, int64_t lanes) {
          const int64_t n = COUNT > 1 ? LANES : lanes;
          Floats real[COUNT] = {}, imaginary[COUNT] = {};
          add(books_.of(head) + at, terms, summed, stride, n, real, imaginary);
          for (int j = 0; j < COUNT; ++j) {
            const int64_t pair = group * group_pairs + at + j * LANES;
            const Floats factor = load(&gain[pair]) * scale, x = real[j] * factor, y = imaginary[j] * factor;
            const Floats c = load(&cosine[pair]), s = load(&sine[pair]);
            store(tile + t * width + pair, x * c - y * s, n);
            store(tile + t * width + pairs + pair, x * s + y * c, n);
          }
        });
      }
    }
  }

 private:
  // Adds up c[a] + i c[b] for a run of pairs of a group; `from` is the books' column of the first pair.
  template <int COUNT>
  [[gnu::always_inline]] void add(const Half* from, const uint32_t* rows, int64_t terms, int64_t stride, int64_t n,
                                  Floats (&real)[COUNT], Floats (&imaginary)[COUNT]) const {
    const int64_t half = books_.width() / 2;
    for (int64_t i = 0; i < terms; i += 2) {
      const Half *b = from + rows[i], *a = from + rows[i + 1];
      for (const uint32_t next : {rows[i + stride], rows[i + 1 + stride]}) {
        __builtin_prefetch(from + next);
        __builtin_prefetch(from + next + half);
      }
      for (int j = 0; j < COUNT * LANES; j += LANES) {
        real[j / LANES] += load(a + j, n) - load(b + half + j, n);
        imaginary[j / LANES] += load(a + half + j, n) + load(b + j, n);
      }
    }
  }

  Field codes_, scales_, rope_;
  Codebooks books_;
  const Half* weights_ = nullptr;
};

// Values in the encoder form (section 4.1): the bits of all heads of a token, times the scale of the head in question.
// Fields: bits, scale.
class BitDecoder : public Decoder {
 public:
  explicit BitDecoder(const Side& side)
      : bits_(side.fields[0]), scales_(side.fields[1]), heads_(side.fields[0].size(1)) {
    width = heads_ * bits_.numbers * CODES_PER_WORD;
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    for (int64_t t = first; t < first + count; ++t) {
      const float scale = *scales_.row<Half>(head, t);
      for (int64_t i = 0; i < heads_; ++i, tile += width / heads_) {
        each_run<1>(&bits_, {head.batch, i}, t, bits_.words(),
                    [&] [[gnu::always_inline]] (int64_t bit, Ints codes, int64_t lanes) {
                      store(tile + bit, __builtin_convertvector(codes, Floats) * scale, lanes);
                    });
      }
    }
  }

 private:
  Field bits_, scales_;
  int64_t heads_;
};

}  // namespace kvcache_compress
