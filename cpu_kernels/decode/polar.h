// Decoders of the two PolarQuant methods: coordinates as radii and angles.
#pragma once

#include "decode/decode.h"

namespace kvcache_compress {

// PolarQuant on RoPE pairs (Wu et al., section 3.2): pairs `radius * (cos, sin)`, in code space
// `[real parts | imaginary parts]`, with radius `(code + offset) * scale`.
// Options: bits of angles, bits of radii, tokens that share a scale (0 for none), twice the offset of radii.
// Fields: planes of the angles, planes of the radii, a scale for each pair, and a factor of each token if matched.
// Table: [2^bits, 2], cosine and sine of each angle code.
class PairDecoder : public Decoder {
 public:
  explicit PairDecoder(const Side& side)
      : fields_(side.fields.begin(), side.fields.end()), points_(side.tables[0].const_data_ptr<float>()) {
    int64_t twice_offset;
    side.read_options(angle_bits_, radius_bits_, tokens_, twice_offset);
    offset_ = twice_offset * 0.5f;
    matched_ = plane_count(angle_bits_) + plane_count(radius_bits_) + (tokens_ > 0) < int64_t(fields_.size());
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
        each_run<BITS, false>(angles, head, first + t, angles->words(),
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

// Location of one level's codes in a tree: see `LevelCodes` in `codecs/quantizers/polar_tree.py`.
struct LevelCodes {
  int64_t bits, count, field, row;
  Words words;
  int64_t base;
};

// Locations of all levels, finest first, from `PolarTree.places`.
inline std::vector<LevelCodes> level_codes(const std::vector<int64_t>& places) {
  std::vector<LevelCodes> levels;
  for (auto at = places.begin(); at != places.end(); at += 7) {
    levels.push_back({at[0], at[1], at[2], at[3], {at[4], at[5]}, at[6]});
  }
  return levels;
}

// Recursive PolarQuant (Han et al., Algorithm 1; see `codecs/quantizers/polar_tree.py`), from the roots down:
// r_(l-1) = [r_l cos | r_l sin].
// Options: `PolarTree.places`. Fields: planes of all codes, then the radii of the roots. Tables: [2^bits, 2], cosines
// and sines of each level, and for 8-bit radii a last one, [H, 256], of the radius of each code.
class TreeDecoder : public Decoder {
 public:
  explicit TreeDecoder(const Side& side) : fields_(side.fields.begin(), side.fields.end()) {
    auto points = side.tables.begin();
    for (const LevelCodes& codes : level_codes(side.options)) {
      levels_.push_back({codes, &fields_[codes.field], (points++)->const_data_ptr<float>()});
    }
    if (points != side.tables.end()) radii_ = points->const_data_ptr<float>();
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
  struct Level : LevelCodes {
    const Field* planes;
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

  // Expands radii of a level to those below it, [radius cos | radius sin]. May read and write LANES beyond either end.
  template <int BITS>
  void expand(const Level& level, const Head& head, int64_t token, const Table<1 << BITS>& cosines,
              const Table<1 << BITS>& sines, int32_t* codes, const float* radii, float* joined) const {
    each_run<BITS, false>(
        level.planes, head, token, level.words,
        [&] [[gnu::always_inline]] (int64_t slot, Ints run, int64_t) { std::memcpy(codes + slot, &run, sizeof run); });
    codes += level.base;
    for (int64_t i = 0; i < level.count; i += LANES) {
      store(joined + i, load(radii + i) * cosines[load<Ints>(codes + i)]);
    }
    joined += level.count;
    for (int64_t i = 0; i < level.count; i += LANES) store(joined + i, load(radii + i) * sines[load<Ints>(codes + i)]);
  }

  std::vector<Field> fields_;
  std::vector<Level> levels_;
  const float* radii_ = nullptr;
};

}  // namespace kvcache_compress
