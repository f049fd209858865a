// The two PolarQuants: coordinates as radii and angles.
#pragma once

#include "decode.h"

namespace kvcache_compress {

// Pairs `radius * (cos, sin)` in code space `[real parts | imaginary parts]`: PolarQuant on RoPE pairs.
// Fields: the planes of the angles, of the radii, a scale for each pair of `tokens` tokens (0: there is none), and a
// factor of each token if it is matched. A radius is `(code + offset / 2) * scale`. `tables` has one, [2^bits, 2]:
// cosine and sine of each angle code.
class PairDecoder : public Decoder {
 public:
  PairDecoder(const std::vector<Tensor>& fields, const std::vector<Tensor>& tables, const std::vector<int64_t>& options)
      : fields_(fields.begin(), fields.end()),
        points_(tables[0].const_data_ptr<float>()),
        angle_bits_(options[0]),
        radius_bits_(options[1]),
        tokens_(options[2]),
        matched_(options[3]),
        offset_(options[4] * 0.5f) {
    pairs_ = fields_[0].numbers * CODES_PER_WORD;
    width = 2 * pairs_;
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const Field *angles = fields_.data(), *radii = angles + plane_count(angle_bits_);
    const Field* scales = radii + plane_count(radius_bits_);
    std::vector<float> scale(pairs_ + LANES, 1.0f), radius(count * pairs_ + LANES);
    with_bits(radius_bits_, [&]<int BITS>() {
      for (int64_t t = first; t < first + count; ++t) {
        if (tokens_ > 0 && (t == first || t % tokens_ == 0)) {
          widen<Half>(scales->row<Half>(head, t / tokens_), pairs_, scale.data());
        }
        const float factor = matched_ ? static_cast<float>(*fields_.back().row<Half>(head, t)) : 1.0f;
        float* to = &radius[(t - first) * pairs_];
        each_run<BITS>(radii, head, t, radii->words(),
                       [&] [[gnu::always_inline]] (int64_t pair, Ints codes, int64_t n) {
                         const Floats steps = __builtin_convertvector(codes, Floats) + offset_;
                         store(to + pair, steps * load(&scale[pair]) * factor, n);
                       });
      }
    });
    with_bits(angle_bits_, [&]<int BITS>() {
      const Table<1 << BITS> cosines(points_, 2), sines(points_ + 1, 2);
      for (int64_t t = 0; t < count; ++t) {
        const float* from = &radius[t * pairs_];
        float* to = tile + t * width;
        each_run<BITS>(angles, head, first + t, angles->words(),
                       [&] [[gnu::always_inline]] (int64_t pair, Ints codes, int64_t n) {
                         store(to + pair, load(from + pair) * cosines[codes], n);
                         store(to + pairs_ + pair, load(from + pair) * sines[codes], n);
                       });
      }
    });
  }

 private:
  std::vector<Field> fields_;
  const float* points_;
  int64_t angle_bits_, radius_bits_, tokens_;
  bool matched_;
  float offset_;
  int64_t pairs_;
};

// Recursive PolarQuant: see polar_tree.py. Fields: the planes of all codes, then the radii that are left.
// `options` has six numbers per level, finest first: bits, codes, number of the low plane, first word, words, first
// slot. `tables` has [2^bits, 2], cosines and sines, for each level, and last, if radii have 8 bits, what they stand
// for, [H, 256].
class TreeDecoder : public Decoder {
 public:
  TreeDecoder(const std::vector<Tensor>& fields, const std::vector<Tensor>& tables, const std::vector<int64_t>& options)
      : fields_(fields.begin(), fields.end()) {
    for (size_t i = 0; 6 * i < options.size(); ++i) {
      const int64_t* o = &options[6 * i];
      levels_.push_back({o[0], o[1], &fields_[o[2]], {o[3], o[4]}, o[5], tables[i].const_data_ptr<float>()});
    }
    if (tables.size() > levels_.size()) radii_ = tables.back().const_data_ptr<float>();
    width = 2 * levels_[0].count;
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const int64_t stride = width + LANES;
    std::vector<float> radii(count * stride), joined(count * stride);
    std::vector<int32_t> codes(width + 2 * LANES);
    for (int64_t t = 0; t < count; ++t) roots(head, first + t, &radii[t * stride]);
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      with_bits(level->bits, [&]<int BITS>() {
        const Table<1 << BITS> cosines(level->points, 2), sines(level->points + 1, 2);
        for (int64_t t = 0; t < count; ++t) {
          expand<BITS>(*level, head, first + t, cosines, sines, codes.data(), &radii[t * stride], &joined[t * stride]);
        }
      });
      radii.swap(joined);
    }
    for (int64_t t = 0; t < count; ++t) std::copy_n(&radii[t * stride], width, tile + t * width);
  }

 private:
  struct Level {
    int64_t bits, count;
    const Field* planes;
    Words words;
    int64_t base;
    const float* points;
  };

  void roots(const Head& head, int64_t token, float* radii) const {
    const Field& stored = fields_.back();
    if (radii_ == nullptr) {
      widen<Half>(stored.row<Half>(head, token), stored.numbers, radii);
      return;
    }
    const uint8_t* codes = stored.row<uint8_t>(head, token);
    for (int64_t i = 0; i < stored.numbers; ++i) radii[i] = radii_[head.head * 256 + codes[i]];
  }

  // Radii of a level become those below it, [radius cos | radius sin]. Both may be read and written LANES beyond.
  template <int BITS>
  void expand(const Level& level, const Head& head, int64_t token, const Table<1 << BITS>& cosines,
              const Table<1 << BITS>& sines, int32_t* codes, const float* radii, float* joined) const {
    each_run<BITS>(
        level.planes, head, token, level.words,
        [&] [[gnu::always_inline]] (int64_t slot, Ints run, int64_t) { std::memcpy(codes + slot, &run, sizeof run); });
    const int32_t* own = codes + level.base;
    for (int64_t i = 0; i < level.count; i += LANES) store(joined + i, load(radii + i) * cosines[load<Ints>(own + i)]);
    joined += level.count;
    for (int64_t i = 0; i < level.count; i += LANES) store(joined + i, load(radii + i) * sines[load<Ints>(own + i)]);
  }

  std::vector<Field> fields_;
  std::vector<Level> levels_;
  const float* radii_ = nullptr;
};

}  // namespace kvcache_compress
