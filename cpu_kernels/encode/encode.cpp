// Encoders of tokens on CPUs, twins of the `quantize` functions in torch: quantize and pack in one pass.
#include "encode/encode.h"

#include <cmath>

#include "encode/scalar.h"

namespace kvcache_compress {
namespace {

// TurboQuant's codes (Algorithm 1): planes of the levels [2^bits] nearest to z [..., D], and the scalars for norms
// [...]. Levels ascend, or their lower half descends (`lloyd_max.outward`).
std::vector<Tensor> quantize_levels(const Tensor& z, const Tensor& norm, const Tensor& levels, int64_t bits,
                                    int64_t scalar) {
  const Scalar kind = static_cast<Scalar>(scalar);
  const int64_t width = z.size(z.dim() - 1);
  const float *numbers = z.const_data_ptr<float>(), *norms = norm.const_data_ptr<float>();
  const auto* points = levels.const_data_ptr<float>();
  const Tensor scales = empty_field(z, 0, ScalarType::Half);
  auto* stored = static_cast<Half*>(scales.mutable_data_ptr());
  return with_bits(bits, [&]<int BITS>() {
    constexpr int COUNT = 1 << BITS, HALF = COUNT / 2;
    const int turned = points[0] > points[1] ? HALF - 1 : 0;
    const auto code_of = [turned](auto i) { return i < HALF ? i ^ turned : i; };
    float bounds[COUNT];
    for (int i = 0; i + 1 < COUNT; ++i) bounds[i] = (points[code_of(i + 1)] + points[code_of(i)]) / 2;
    const Nearest<BITS> nearest(bounds);
    const Table<COUNT> table(points);
    const auto steps = static_cast<float>(SEARCH_STEPS * std::sqrt(static_cast<double>(width)));
    // Levels in steps, in ascending order, in the low and in the high half of a word.
    int32_t low[COUNT], high[COUNT];
    for (int i = 0; i < COUNT; ++i) {
      const auto units = static_cast<int32_t>(points[code_of(i)] * steps);
      low[i] = units & 0xffff, high[i] = units << 16;
    }
    const Table<COUNT> low_table(reinterpret_cast<const float*>(low)), high_table(reinterpret_cast<const float*>(high));
    const PlaneWriter<BITS> planes(z);
    // The scale of the numbers whose levels come closest to their direction. `units` has room for them in steps.
    const auto searched = [&](const float* from, Ints* units) {
      const int64_t paired = width / (2 * LANES) * (2 * LANES);
      const auto in_steps = [&](int64_t channel) {
        return __builtin_convertvector(load(from + channel) * steps, Ints);
      };
      for (int64_t channel = 0; channel < paired; channel += 2 * LANES) {
        units[channel / (2 * LANES)] = (in_steps(channel) & 0xffff) | in_steps(channel + LANES) << 16;
      }
      double best = -1;
      float found = 1;
      for (const float scale : SEARCHED) {
        Ints cross = {}, square = {};
        const auto add = [&](Ints number, Ints level) {
          cross += dot_halves(number, level), square += dot_halves(level, level);
        };
        for (int64_t channel = 0; channel < paired; channel += 2 * LANES) {
          const Floats x = load(from + channel), y = load(from + channel + LANES);
          add(units[channel / (2 * LANES)], (Ints)low_table[nearest(x * scale)] | (Ints)high_table[nearest(y * scale)]);
        }
        if (paired < width) {
          add(in_steps(paired) & 0xffff, (Ints)low_table[nearest(load(from + paired) * scale)]);
        }
        const double product = sum(cross), closeness = product * product / sum(square);
        if (closeness > best) best = closeness, found = scale;
      }
      return found;
    };
    each_range(z, [&](int64_t vector, int64_t end) {
      std::vector<Ints> units(width / (2 * LANES));
      for (; vector < end; ++vector) {
        const float* from = numbers + vector * width;
        const float scale = BITS > 1 && kind != Scalar::NORM ? searched(from, units.data()) : 1.0f;
        Floats square = {}, cross = {}, point = {};
        planes.pack(vector, [&] [[gnu::always_inline]] (int64_t channel, int64_t lanes) {
          const Floats x = load_lanes(from + channel, lanes);
          const Ints codes = code_of(nearest(x * scale));
          const Floats y = keep_lanes(table[codes], lanes);
          square += x * x, cross += x * y, point += y * y;
          return codes;
        });
        stored[vector] = stored_scalar(kind, norms[vector], sum(square), sum(cross), sum(point));
      }
    });
    std::vector<Tensor> fields = planes.fields();
    fields.push_back(scales);
    return fields;
  });
}

// KIVI's codes clamp(floor((x - zero) / scale + 1/2)): planes of x [B, H, T, D] for scales and zero points
// [B, H, T / tokens, D / channels].
std::vector<Tensor> quantize_groups(const Tensor& x, const Tensor& scale, const Tensor& zero, int64_t bits,
                                    int64_t tokens, int64_t channels) {
  const int64_t heads = x.size(1), count = x.size(2), width = x.size(3);
  const Field numbers{View(x)}, scales{View(scale)}, zeros{View(zero)};
  return with_bits(bits, [&]<int BITS>() {
    const PlaneWriter<BITS> planes(x);
    each_range(x, [&](int64_t first, int64_t end) {
      std::vector<float> steps(width + LANES), starts(width + LANES);
      for (int64_t vector = first; vector < end; ++vector) {
        const int64_t row = vector / count, token = vector % count;
        const Head head{row / heads, row % heads};
        if (vector == first || token % tokens == 0) {
          spread(scales.row<Half>(head, token / tokens), channels, width, steps.data());
          spread(zeros.row<Half>(head, token / tokens), channels, width, starts.data());
          for (float& step : steps) step = std::max(step, 1e-30f);
        }
        const auto* from = numbers.row<float>(head, token);
        planes.pack(vector, [&] [[gnu::always_inline]] (int64_t channel, int64_t lanes) {
          const Floats offset = load_lanes(from + channel, lanes) - load(&starts[channel]);
          return __builtin_convertvector(clamp(offset / load(&steps[channel]) + 0.5f, (1 << BITS) - 1), Ints);
        });
      }
    });
    return planes.fields();
  });
}

// Codes of the angles of points: CELLS for each full quarter turn, plus the boundaries (cos, sin) of a quarter that the
// point has passed.
template <int CELLS>
inline Ints angle_codes(Floats x, Floats y, const float* bounds) {
  const Ints second = (y > 0) & (x <= 0), third = (y <= 0) & (x < 0), fourth = (y < 0) & (x >= 0);
  x = x < 0 ? -x : x, y = y < 0 ? -y : y;
  const Ints turned = second | fourth;
  const Floats v = turned ? x : y;
  const Floats u = v > 0 ? (turned ? y : x) : Floats{} + 1.0f;  // the angle of zero is zero
  Ints codes = (second + 2 * third + 3 * fourth) * -CELLS;
  for (int i = 1; i < CELLS; ++i) codes -= v * bounds[2 * i] >= u * bounds[2 * i + 1];
  return codes;
}

// PolarQuant's codes of RoPE pairs (Wu et al., section 3.2): planes of the angles of points (real, imaginary) and of
// radii `steps`, in cells, each [..., pairs]; `bounds` of the cells in a quarter turn, [2^(angle_bits - 2), 2].
std::vector<Tensor> quantize_pairs(const Tensor& real, const Tensor& imaginary, const Tensor& steps,
                                   const Tensor& bounds, int64_t angle_bits, int64_t radius_bits) {
  std::vector<Tensor> fields;
  const int64_t width = steps.size(steps.dim() - 1);
  const auto add = [&](int64_t bits, auto code) {
    with_bits(bits, [&]<int BITS>() {
      const PlaneWriter<BITS> planes(steps);
      each_range(steps, [&](int64_t vector, int64_t end) {
        for (; vector < end; ++vector) {
          planes.pack(vector, [&] [[gnu::always_inline]] (int64_t channel, int64_t lanes) {
            return code.template operator()<BITS>(vector * width + channel, lanes);
          });
        }
      });
      fields.insert(fields.end(), planes.fields().begin(), planes.fields().end());
    });
  };
  const auto *xs = real.const_data_ptr<float>(), *ys = imaginary.const_data_ptr<float>();
  const auto *radii = steps.const_data_ptr<float>(), *quarter = bounds.const_data_ptr<float>();
  add(angle_bits, [=]<int BITS>(int64_t at, int64_t lanes) {
    return angle_codes<(1 << BITS) / 4>(load_lanes(xs + at, lanes), load_lanes(ys + at, lanes), quarter);
  });
  add(radius_bits, [=]<int BITS>(int64_t at, int64_t lanes) {
    return __builtin_convertvector(clamp(load_lanes(radii + at, lanes), (1 << BITS) - 1), Ints);
  });
  return fields;
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(quantize_levels, "(Tensor z, Tensor norm, Tensor levels, int bits, int scalar) -> Tensor[]")
KVCACHE_COMPRESS_OPERATOR(quantize_groups,
                          "(Tensor x, Tensor scale, Tensor zero, int bits, int tokens, int channels) -> Tensor[]")
KVCACHE_COMPRESS_OPERATOR(
    quantize_pairs,
    "(Tensor real, Tensor imaginary, Tensor steps, Tensor bounds, int angle_bits, int radius_bits) -> Tensor[]")

}  // namespace kvcache_compress
