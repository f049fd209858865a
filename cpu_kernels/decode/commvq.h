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

// Residual codebooks, float16 [H * G * R, N, ...], whose rows are named by `parts` indices per group and round.
// Options: groups G of a head, rounds R.
class Codebooks {
 public:
  Codebooks(const Side& side, int64_t parts)
      : groups(side.options[0]),
        terms(side.options[1] * parts),
        stride(whole_lanes(groups * terms)),
        books_(side.tables[0].const_data_ptr<Half>()),
        parts_(parts),
        centres_(side.tables[0].size(1)),
        row_(side.tables[0].stride(1)),
        bits_(std::countr_zero(static_cast<uint64_t>(centres_))) {}

  const Half* of(const Head& head) const { return books_ + head.head * (groups * terms / parts_) * centres_ * row_; }

  // Numbers of a row.
  int64_t width() const { return row_; }

  // Offsets, in a head's books, of the rows that the codes of tokens name: [count][G][terms], `stride` per token. One
  // more token has zeros, for the prefetch while the last one is summed.
  std::vector<uint32_t> find(const Field& codes, const Head& head, int64_t first, int64_t count) const {
    const int64_t used = groups * terms, bytes = (used * bits_ + 7) / 8, apart = stride * bits_ / 8 + 8;
    std::vector<uint32_t> rows((count + 1) * stride), starts(stride);
    for (int64_t i = 0; i < used; ++i) starts[i] = i / parts_ * centres_ * row_;
    std::vector<uint8_t> run(apart);  // eight bytes are read at a time, beyond the last
    const uint64_t mask = (uint64_t{1} << bits_) - 1, bits = bits_;
    const Longs shifts = {0, bits, 2 * bits, 3 * bits};
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(codes.row<uint8_t>(head, first + t), bytes, run.data());
      uint32_t* to = &rows[t * stride];
      for (int64_t i = 0, byte = 0; i < stride; i += LANES, byte += bits_) {
        uint64_t eight;
        std::memcpy(&eight, &run[byte], 8);
        for (int half = 0; half < 2; ++half, eight >>= 4 * bits_) {
          const Longs four = ((Longs{} + eight) >> shifts) & mask;
          const auto places =
              __builtin_convertvector(four, Words) * static_cast<uint32_t>(row_) + load<Words>(&starts[i + 4 * half]);
          std::memcpy(to + i + 4 * half, &places, sizeof places);
        }
      }
    }
    return rows;
  }

  int64_t groups;
  int64_t terms;   // rows that are added up for a group
  int64_t stride;  // numbers from one token to the next in what `find` returns

 private:
  using Longs = uint64_t __attribute__((vector_size(32)));
  using Words = uint32_t __attribute__((vector_size(16)));

  const Half* books_;
  int64_t parts_, centres_, row_, bits_;
};

// Values in the residual form (section 4.2): `scale * sum of rows`. Fields: codes, scale. Table: books,
// [H * G * R, N, w].
class AdditiveDecoder : public Decoder {
 public:
  explicit AdditiveDecoder(const Side& side) : codes_(side.fields[0]), scales_(side.fields[1]), books_(side, 1) {
    width = books_.groups * books_.width();
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const std::vector<uint32_t> rows = books_.find(codes_, head, first, count);
    const int64_t stride = books_.stride, summed = books_.terms;
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

 private:
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
// Table: books, [H * G * R, N, 2, pairs of a group].
class ComplexDecoder : public Decoder {
 public:
  explicit ComplexDecoder(const Side& side)
      : codes_(side.fields[0]), scales_(side.fields[1]), rope_(side.fields[2]), books_(side, 2) {
    width = books_.groups * books_.width();
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const int64_t pairs = width / 2, group_pairs = books_.width() / 2, rotary = rope_.numbers / 2;
    std::vector<float> cosine(pairs + LANES, 1.0f), sine(pairs + LANES);
    const std::vector<uint32_t> rows = books_.find(codes_, head, first, count);
    const int64_t stride = books_.stride, summed = books_.terms;
    for (int64_t t = 0; t < count; ++t) {
      const Half* factors = rope_.row<Half>(head, head.start + first + t);
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
            const Floats x = real[j] * scale, y = imaginary[j] * scale;
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
