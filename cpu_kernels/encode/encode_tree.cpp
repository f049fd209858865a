// Encoder of recursive PolarQuant (Han et al., Algorithm 1), the twin of `encode` in codecs/quantizers/polar_tree.py:
// level by level for all tokens of a tile.
#include <map>

#include "decode/polar.h"
#include "encode/encode.h"

namespace kvcache_compress {
namespace {

constexpr int64_t TILE = 16;  // tokens; their numbers and codes fit into the L1 cache

// A level with its points and its boundaries, both [..., 2].
struct Level : LevelCodes {
  const float *points, *bounds;
};

// Planes of all codes of one bit width, and the slot where a token's codes are gathered before packing.
struct CodePlanes {
  int64_t words = 0, slot = 0;
  std::vector<Tensor> fields;
};

// Forces a product to be rounded before it is added, as in torch: otherwise both may be fused into one instruction.
inline Floats rounded(Floats x) {
#ifdef __AVX2__
  asm("" : "+x"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

class TreeEncoder {
 public:
  // `lower` boundaries of the first level lie below π.
  TreeEncoder(const Tensor& y, const std::vector<Tensor>& points, const std::vector<Tensor>& bounds,
              const std::vector<int64_t>& places, int64_t lower)
      : width_(y.size(y.dim() - 1)), lower_(lower), numbers_(y.const_data_ptr<float>()) {
    for (const LevelCodes& level : level_codes(places)) {
      const size_t i = levels_.size();
      levels_.push_back({level, points[i].const_data_ptr<float>(), bounds[i].const_data_ptr<float>()});
      CodePlanes& planes = planes_[level.field];
      if (!planes.fields.empty()) continue;
      planes = {level.row, slots_, empty_planes(y, level.row, level.bits)};
      slots_ += level.row * CODES_PER_WORD;
    }
    for (Tensor& sum : sums_) sum = empty_field(y, levels_.back().count, ScalarType::Float);
  }

  // The planes, the squared radii of the roots, and their inner products with the code points.
  std::vector<Tensor> fields() const {
    std::vector<Tensor> tensors;
    for (const auto& [field, planes] : planes_) {
      tensors.insert(tensors.end(), planes.fields.begin(), planes.fields.end());
    }
    tensors.insert(tensors.end(), {sums_[0], sums_[1]});
    return tensors;
  }

  void encode(int64_t first, int64_t end) const {
    const int64_t stride = width_ + LANES, roots = levels_.back().count;
    std::vector<float> energy(TILE * stride), cross;
    std::vector<int32_t> codes(TILE * slots_ + LANES);
    for (; first < end; first += TILE) {
      const int64_t count = std::min(TILE, end - first);
      for (int64_t t = 0; t < count; ++t) std::copy_n(numbers_ + (first + t) * width_, width_, &energy[t * stride]);
      cross = energy;
      for (const Level& level : levels_) {
        with_bits(level.bits, [&]<int BITS>() {
          const Table<1 << BITS> cosines(level.points, 2), sines(level.points + 1, 2);
          for (int64_t t = 0; t < count; ++t) {
            halve<BITS>(level, cosines, sines, &energy[t * stride], &cross[t * stride], &codes[t * slots_]);
          }
        });
      }
      for (const Level& level : levels_) {
        if (level.base > 0) continue;  // packed with the first of the levels that share its words
        with_bits(level.bits, [&]<int BITS>() { pack<BITS>(level, first, count, codes.data()); });
      }
      for (int i = 0; i < 2; ++i) {
        auto* to = static_cast<float*>(sums_[i].mutable_data_ptr()) + first * roots;
        const float* from = i == 0 ? energy.data() : cross.data();
        for (int64_t t = 0; t < count; ++t) std::copy_n(from + t * stride, roots, to + t * roots);
      }
    }
  }

 private:
  // Encodes one level of a token into `slots`, which hold the codes of all levels, and halves the squared radii and
  // inner products to those of the next level. May read and write LANES beyond their end.
  template <int BITS>
  void halve(const Level& level, const Table<1 << BITS>& cosines, const Table<1 << BITS>& sines, float* energy,
             float* cross, int32_t* slots) const {
    constexpr int COUNT = 1 << BITS;
    const bool circle = &level == &levels_.front();
    int32_t* to = slots + planes_.at(level.field).slot + level.words.first * CODES_PER_WORD + level.base;
    for (int64_t i = 0; i < level.count; i += LANES) {
      const Floats x = load(energy + i), y = load(energy + level.count + i);
      const Ints beyond = y < 0.0f;
      Ints code = {};
      for (int j = 0; j < COUNT - !circle; ++j) {
        const Ints turned = y * level.bounds[2 * j] > x * level.bounds[2 * j + 1];
        code -= !circle ? turned : j < lower_ ? (beyond | turned) : (beyond & turned);  // true is -1
      }
      store(energy + i, circle ? rounded(x * x) + rounded(y * y) : x + y);
      const Floats first = rounded(load(cross + i) * cosines[code]);
      store(cross + i, first + rounded(load(cross + level.count + i) * sines[code]));
      std::memcpy(to + i, &code, std::min(LANES, level.count - i) * sizeof(int32_t));
    }
  }

  template <int BITS>
  void pack(const Level& level, int64_t first, int64_t count, const int32_t* slots) const {
    using P = Planes<BITS>;
    const CodePlanes& planes = planes_.at(level.field);
    auto* low = static_cast<typename P::LowWord*>(planes.fields.front().mutable_data_ptr());
    auto* high = static_cast<typename P::HighWord*>(planes.fields.back().mutable_data_ptr());
    for (int64_t t = 0; t < count; ++t) {
      const int32_t* from = slots + t * slots_ + planes.slot + level.words.first * CODES_PER_WORD;
      const int64_t word = (first + t) * planes.words + level.words.first;
      pack_words<BITS>(low + word, high + word, level.words.count,
                       [&] [[gnu::always_inline]] (int64_t channel, int64_t) { return load<Ints>(from + channel); });
    }
  }

  int64_t width_, lower_, slots_ = 0;
  const float* numbers_;
  std::vector<Level> levels_;
  std::map<int64_t, CodePlanes> planes_;  // by the index of their low plane
  Tensor sums_[2];
};

std::vector<Tensor> quantize_tree(const Tensor& y, const std::vector<Tensor>& points, const std::vector<Tensor>& bounds,
                                  const std::vector<int64_t>& places, int64_t lower) {
  const TreeEncoder encoder(y, points, bounds, places, lower);
  each_range(y, [&](int64_t first, int64_t end) { encoder.encode(first, end); });
  return encoder.fields();
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(quantize_tree,
                          "(Tensor y, Tensor[] points, Tensor[] bounds, int[] places, int lower) -> Tensor[]")

}  // namespace kvcache_compress
