// One side of a layer, keys or values, for `attend`: described once by `describe`, and read at every step.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <vector>

// Registers the function `name` for CPUs in `torch.ops.kvcache_compress_cpu`; `types` are those of its schema.
#define KVCACHE_COMPRESS_OPERATOR(name, types)                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(kvcache_compress_cpu, m) { m.def(#name types); } \
  STABLE_TORCH_LIBRARY_IMPL(kvcache_compress_cpu, CPU, m) { m.impl(#name, TORCH_BOX(&name)); }

namespace kvcache_compress {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Memory and shape of a tensor, which it does not keep alive.
struct View {
  static constexpr int64_t MAX_DIMS = 4;

  View() = default;

  explicit View(const Tensor& x)
      : data(x.numel() == 0 ? nullptr : const_cast<void*>(x.const_data_ptr())),
        bytes(x.element_size()),
        dtype(x.scalar_type()),
        dims(x.dim()) {
    STD_TORCH_CHECK(dims <= MAX_DIMS, dims, " dimensions of a tensor, of at most ", MAX_DIMS);
    for (int64_t i = 0; i < dims; ++i) sizes[i] = x.size(i), strides[i] = x.stride(i);
  }

  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dims; ++i) count *= sizes[i];
    return count;
  }

  template <class Number>
  const Number* const_data_ptr() const {
    return static_cast<const Number*>(data);
  }

  void* data;
  int64_t bytes;  // of a number
  ScalarType dtype;
  int64_t dims, sizes[MAX_DIMS], strides[MAX_DIMS];
};

struct Side {
  static constexpr int64_t FIRST = 4;                               // views before the fields
  static constexpr int64_t HEAD = 3;                                // words before the options
  static constexpr int64_t WORDS = sizeof(View) / sizeof(int64_t);  // of a view

  explicit Side(const Tensor& description) {
    const auto* words = description.const_data_ptr<int64_t>();
    form = words[0];
    options.assign(words + HEAD, words + HEAD + words[1]);
    const auto* views = reinterpret_cast<const View*>(words + HEAD + words[1]);
    const int64_t count = (description.size(0) - HEAD - words[1]) / WORDS;
    sinks = views[0], tail = views[1], basis = views[2], mean = views[3];
    fields.assign(views + FIRST, views + FIRST + words[2]);
    tables.assign(views + FIRST + words[2], views + count);
  }

  // Reads the options into `numbers`; throws if their count differs.
  template <class... Numbers>
  void read_options(Numbers&... numbers) const {
    STD_TORCH_CHECK(options.size() == sizeof...(numbers), options.size(), " options, where ", sizeof...(numbers),
                    " are needed");
    auto option = options.begin();
    ((numbers = *option++), ...);
  }

  int64_t form;  // `operands.FORMS`
  std::vector<int64_t> options;
  View sinks, tail;          // dense tokens, [B, H, T, D]; the tail with spare capacity
  View basis, mean;          // of code space, empty if absent: see `operands.CPUSide`
  std::vector<View> fields;  // of packed tokens, [B, H, rows, numbers]
  std::vector<View> tables;
};

}  // namespace kvcache_compress
