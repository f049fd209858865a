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
    int64_t group, twos, ones;
    side.read_options(group, twos, ones);
    const View *two_bits = side.fields.data(), *one_bit = two_bits + (twos > 0), *scales = one_bit + (ones > 0);
    if (twos > 0) add(2, side.tables[0], two_bits, *scales);
    if (ones > 0) add(1, side.tables[1], one_bit, *scales);
  }
};

}  // namespace kvcache_compress
