// Queries for keys that are coded in groups, each rotated back to its first token (spectral keys): queries are rotated
// and mapped anew for each group.
#pragma once

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "common/products.h"
#include "decode/digits.h"

namespace kvcache_compress {

// Operands of the map from a group's queries to code space, from a side of the form "digits". Its tables from the third
// on: directions of the channels, [H, D, D]; the factors of the table of means, [H, R, D] and [H, group, R]; the order
// of a key's numbers, [D], which lists the real parts of all pairs, rotary ones first, and then the imaginary parts,
// and in which directions and means are; and for each digit its channel and its weight, [H, W]. Its last field has cos
// and sin of the groups' first tokens, [B, H, groups, 2 * rotary], if the model has RoPE.
struct AnchoredQueries {
  explicit AnchoredQueries(const Side& side) {
    directions = side.tables[2], means = side.tables[3], places = side.tables[4], order = side.tables[5];
    channels = side.tables[6], weights = side.tables[7];
    dim = directions.size(2), rank = means.size(1), group = places.size(1), width = weights.size(1);
    const auto* all = channels.const_data_ptr<int16_t>();
    coded = 1 + *std::max_element(all, all + channels.numel());
    const int64_t planes = (side.options[1] > 0) + (side.options[2] > 0);
    if (static_cast<int64_t>(side.fields.size()) > planes + 1) anchors.emplace(side.fields.back());
  }

  View directions, means, places, order, channels, weights;
  int64_t dim, rank, group, width, coded;  // the last: channels up to the last one with bits in any head
  std::optional<Field> anchors;
};

// The queries of some rows of a head, mapped for one group at a time.
class MappedQueries {
 public:
  MappedQueries(const AnchoredQueries& from, const Head& head, const float* q, int64_t rows)
      : from_(from),
        head_(head),
        rows_(rows),
        q_(rows * from.dim),
        along_(rows * from.dim),
        mapped_(rows * from.width),
        low_(rows * from.rank),
        means_(rows * from.group) {
    const auto* order = from.order.const_data_ptr<int64_t>();
    for (int64_t r = 0; r < rows; ++r, q += from.dim) {
      for (int64_t d = 0; d < from.dim; ++d) q_[r * from.dim + d] = q[order[d]];
    }
    turned_ = q_;
  }

  // Queries in the code space of the group of token `t`, [rows][W].
  const float* at(int64_t t) {
    if (t / from_.group != group_) map(t / from_.group);
    return mapped_.data();
  }

  // Adds a row's products with the means of tokens [t, t + count), which lie in the group of the last call of `at`.
  void add_means(int64_t row, int64_t t, int64_t count, float* scores) const {
    const float* means = &means_[row * from_.group + t % from_.group];
    for (int64_t i = 0; i < count; ++i) scores[i] += means[i];
  }

 private:
  void map(int64_t group) {
    group_ = group;
    const int64_t dim = from_.dim, rank = from_.rank, width = from_.width;
    if (from_.anchors) turn(*from_.anchors, dim / 2);
    score(turned_.data(), rows_, of<Half>(from_.directions), from_.coded, dim, along_.data(), dim);
    const auto* channels = of<int16_t>(from_.channels);
    const auto* weights = of<float>(from_.weights);
    for (int64_t r = 0; r < rows_; ++r) {
      const float* from = &along_[r * dim];
      float* to =
          &mapped_[r * width];  // a pointer of its own, since the vector's would be read again after every store
      for (int64_t w = 0; w < width; ++w) to[w] = from[channels[w]] * weights[w];
    }
    score(turned_.data(), rows_, of<Half>(from_.means), rank, dim, low_.data(), rank);
    score(low_.data(), rows_, of<Half>(from_.places), from_.group, rank, means_.data(), from_.group);
  }

  // This head's part of a table.
  template <class Number>
  const Number* of(const View& table) const {
    return table.const_data_ptr<Number>() + head_.head * table.stride(0);
  }

  // Turns the queries by the transpose of the anchor's rotation.
  void turn(const Field& anchors, int64_t pairs) {
    const int64_t rotary = anchors.numbers / 2;
    std::vector<float> factors(2 * rotary);
    widen<Half>(anchors.row<Half>(head_, group_), 2 * rotary, factors.data());
    const float *cosine = factors.data(), *sine = cosine + rotary;
    for (int64_t r = 0; r < rows_; ++r) {
      const float *real = &q_[r * 2 * pairs], *imaginary = real + pairs;
      float *x = &turned_[r * 2 * pairs], *y = x + pairs;
      for (int64_t j = 0; j < rotary; ++j) {
        x[j] = real[j] * cosine[j] + imaginary[j] * sine[j];
        y[j] = imaginary[j] * cosine[j] - real[j] * sine[j];
      }
    }
  }

  const AnchoredQueries& from_;
  Head head_;
  int64_t rows_, group_ = -1;
  std::vector<float> q_, turned_, along_, mapped_, low_, means_;
};

}  // namespace kvcache_compress
