// Spectral keys: 2-bit and 1-bit digits along the rows of code space (see codecs/quantizers/digits.py), and
// queries that are mapped anew for each group of tokens.
#pragma once

#include "decode/decode.h"

namespace kvcache_compress {

// Keys in code space, `scale * level(digit)`. Options: tokens of a group, 2-bit digits, 1-bit digits.
// Fields: the planes of the digits that there are, the scales of a group, and with RoPE the anchors of the groups.
// Tables: the levels of a 2-bit digit, [4], and of a 1-bit digit, [2]; then those of `AnchoredQueries`.
class DigitDecoder : public LevelDecoder {
 public:
  explicit DigitDecoder(const Side& side) {
    int64_t twos, ones;
    side.read_options(group, twos, ones);
    auto field = side.fields.begin();
    View scales = field[(twos > 0) + (ones > 0)];
    scales.dims = 3, scales.strides[2] = 1;  // [B, H, T]: those of a head are contiguous
    for (const auto& [bits, digits] : {std::pair{2, twos}, {1, ones}}) {
      if (digits > 0) add(bits, false, side.tables[2 - bits].const_data_ptr<float>(), {*field++, scales});
    }
  }

  int64_t group;
};

}  // namespace kvcache_compress
