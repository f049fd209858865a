// Spectral keys: 2-bit and 1-bit digits along the rows of code space (see codecs/quantizers/digits.py), and
// queries that are mapped anew for each group of tokens.
#pragma once

#include "decode/decode.h"

namespace kvcache_compress {

// Keys in code space, `scale * level(digit)`. Options: tokens of a group, 2-bit digits, 1-bit digits.
// Fields: the planes of the digits that there are, the scales of a group, and with RoPE the anchors of the groups.
// Tables: the levels of a 2-bit digit, [4], and of a 1-bit digit, [2]; then those of `AnchoredQueries`.
class DigitDecoder : public Decoder {
 public:
  explicit DigitDecoder(const Side& side) {
    int64_t twos, ones;
    side.read_options(group, twos, ones);
    auto field = side.fields.begin();
    for (const auto& [bits, digits] : {std::pair{2, twos}, {1, ones}}) {
      if (digits == 0) continue;
      components_.push_back({bits, width, side.tables[2 - bits].const_data_ptr<float>(), {Field(*field++)}});
      width += digits;
    }
    scales_.emplace_back(*field);
  }

  void decode(const Head& head, int64_t first, int64_t count, float* tile) const override {
    const Half* scales = scales_[0].row<Half>(head, 0) + first;
    for (const auto& part : components_) {
      with_bits(part.bits, [&]<int BITS>() {
        decode_levels(LevelTable<BITS>(part.levels), part.planes.data(), scales, head, first, count, tile + part.start,
                      width);
      });
    }
  }

  int64_t group;

 private:
  struct Component {
    int64_t bits, start;
    const float* levels;
    std::vector<Field> planes;
  };
  std::vector<Component> components_;
  std::vector<Field> scales_;
};

}  // namespace kvcache_compress
