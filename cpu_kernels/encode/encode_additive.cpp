// Encoder of CommVQ: one round of the greedy search of additive.py, with matrix products by torch.
#include "decode/commvq.h"
#include "encode/encode.h"

namespace kvcache_compress {
namespace {

// `a` if it is less, else `b`, also if either is NaN.
inline Floats lesser(Floats a, Floats b) { return a < b ? a : b; }

inline float least_lane(Floats x) {
  x = lesser(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = lesser(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return x[0] < x[1] ? x[0] : x[1];
}

// Index of the first minimum of `n` numbers; as in torch, NaN is less than any number. `numbers(i)` returns LANES
// numbers from i on, with infinity beyond the end.
template <class Numbers>
[[gnu::always_inline]] inline int64_t first_least(int64_t n, Numbers numbers) {
  Floats least = Floats{} + INF;
  Ints nan = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats x = numbers(i);
    least = lesser(x, least);
    nan |= x != x;
  }
  const bool any_nan = true_lanes(nan) != 0;
  const float bound = least_lane(least);
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats x = numbers(i);
    const uint32_t matches = true_lanes(any_nan ? x != x : x == bound);
    if (matches != 0) return i + std::countr_zero(matches);
  }
  return 0;
}

// Rows of `n` numbers, each padded with infinity to a multiple of LANES.
class PaddedRows {
 public:
  explicit PaddedRows(int64_t rows, int64_t n) : stride_(whole_lanes(n)), numbers_(rows * stride_, INF) {}

  float* operator[](int64_t row) { return &numbers_[row * stride_]; }

 private:
  int64_t stride_;
  std::vector<float> numbers_;
};

// Search in real codebooks: the a that minimises `squares[a] - product[a]`.
class RowSearch {
 public:
  static constexpr int CODES = 1;

  explicit RowSearch(int64_t centres) : centres_(centres), squares_(1, centres) {}

  // Reads the terms that depend on the codebook only.
  void read(const float* squares) { std::copy_n(squares, centres_, squares_[0]); }

  void find(const float* products, int64_t* code) {
    *code = first_least(centres_,
                        [&](int64_t i) { return load(squares_[0] + i) - load_lanes(products + i, centres_ - i); });
  }

 private:
  int64_t centres_;
  PaddedRows squares_;
};

// Search in complex codebooks: the (a, b) that minimises `table[a, b] - second[b] - first[a]`, with `first` and
// `second` the products with c and i c.
class PairSearch {
 public:
  static constexpr int CODES = 2;

  explicit PairSearch(int64_t centres)
      : centres_(centres), by_a_(centres, centres), by_b_(centres, centres), least_(1, centres) {}

  void read(const float* table) {
    for (int64_t a = 0; a < centres_; ++a) {
      for (int64_t b = 0; b < centres_; ++b) by_a_[a][b] = by_b_[b][a] = table[a * centres_ + b];
    }
  }

  void find(const float* products, int64_t* codes) {
    const float *first = products, *second = products + centres_;
    each_run_of_registers<8>(whole_lanes(centres_), [&]<int COUNT>(int64_t at, int64_t) {
      Floats least[COUNT];
      for (Floats& x : least) x = Floats{} + INF;
      for (int64_t b = 0; b < centres_; ++b) {
        const float* row = by_b_[b] + at;
        for (int i = 0; i < COUNT; ++i) least[i] = lesser(load(row + i * LANES) - second[b], least[i]);
      }
      for (int i = 0; i < COUNT; ++i) store(least_[0] + at + i * LANES, least[i]);
    });
    const auto best = [&](const float* costs, const float* gains) {
      return first_least(centres_, [&](int64_t i) { return load(costs + i) - load_lanes(gains + i, centres_ - i); });
    };
    const int64_t a = best(least_[0], first), b = best(by_a_[a], second);
    codes[0] = second[b] == second[b] ? a : 0;  // in torch one NaN makes the minimum of every a NaN
    codes[1] = b;
  }

 private:
  int64_t centres_;
  PaddedRows by_a_, by_b_, least_;
};

// Codes [..., n, CODES] of the points nearest to z [..., n, w], and the residual of z. `products` are those of z with
// the rows of tables [..., CODES, N, w]; a point is the sum of one row from each table.
template <class Search>
std::vector<Tensor> subtract_points(const Tensor& z, const Tensor& products, const Tensor& table,
                                    const Tensor& tables) {
  constexpr int64_t CODES = Search::CODES;
  const int64_t width = z.size(z.dim() - 1), count = z.size(z.dim() - 2), centres = tables.size(tables.dim() - 2);
  const int64_t books = tables.numel() / (CODES * centres * width), terms = table.numel() / books;
  const Tensor codes = empty_field(z, CODES, ScalarType::Long), residual = empty_field(z, width, ScalarType::Float);
  const float *numbers = z.const_data_ptr<float>(), *inner = products.const_data_ptr<float>();
  const float *costs = table.const_data_ptr<float>(), *points = tables.const_data_ptr<float>();
  auto* all_codes = codes.mutable_data_ptr<int64_t>();
  auto* rest = residual.mutable_data_ptr<float>();
  each_range(z, [&](int64_t first, int64_t end) {
    Search search(centres);
    for (int64_t vector = first; vector < end; ++vector) {
      const int64_t book = vector / count;
      if (vector == first || vector % count == 0) search.read(costs + book * terms);
      int64_t* code = all_codes + vector * CODES;
      search.find(inner + vector * CODES * centres, code);
      const float* begin = points + book * CODES * centres * width;
      const float *one = begin + code[0] * width, *other = begin + (CODES - 1) * (centres + code[CODES - 1]) * width;
      const float* from = numbers + vector * width;
      float* to = rest + vector * width;
      for (int64_t i = 0; i < width; ++i) to[i] = from[i] - (CODES == 1 ? one[i] : one[i] + other[i]);
    }
  });
  return {codes, residual};
}

// Twin of `additive.nearest`.
std::vector<Tensor> subtract_nearest(const Tensor& z, const Tensor& products, const Tensor& costs,
                                     const Tensor& tables) {
  return tables.size(tables.dim() - 3) == RowSearch::CODES ? subtract_points<RowSearch>(z, products, costs, tables)
                                                           : subtract_points<PairSearch>(z, products, costs, tables);
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(subtract_nearest, "(Tensor z, Tensor products, Tensor costs, Tensor tables) -> Tensor[]")

}  // namespace kvcache_compress
