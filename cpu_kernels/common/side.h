// One side of a layer, keys or values, as `attend` takes it: described once by `describe`, and read at every step.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/names.h"

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
        dtype(static_cast<int64_t>(x.scalar_type())),
        dims(x.dim()) {
    STD_TORCH_CHECK(dims <= MAX_DIMS, dims, " dimensions of a tensor, of at most ", MAX_DIMS);
    for (int64_t i = 0; i < dims; ++i) sizes[i] = x.size(i), strides[i] = x.stride(i);
  }

  int64_t dim() const { return dims; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t element_size() const { return bytes; }
  ScalarType scalar_type() const { return static_cast<ScalarType>(dtype); }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dims; ++i) count *= sizes[i];
    return count;
  }

  bool is_contiguous() const {
    for (int64_t i = dims - 1, count = 1; i >= 0; count *= sizes[i--]) {
      if (sizes[i] != 1 && strides[i] != count) return numel() == 0;
    }
    return true;
  }

  void* const_data_ptr() const { return data; }

  template <class Number>
  const Number* const_data_ptr() const {
    return static_cast<const Number*>(data);
  }

  void* data;
  int64_t bytes, dtype, dims, sizes[MAX_DIMS], strides[MAX_DIMS];
};

struct Side {
  static constexpr int64_t FIRST = 4;                               // views before the fields
  static constexpr int64_t HEAD = 4;                                // words before the options
  static constexpr int64_t WORDS = sizeof(View) / sizeof(int64_t);  // of a view
  static constexpr int64_t NAME = 2 * sizeof(int64_t);              // bytes of the form's name

  // Words of a description: the form, which names a decoder; how many options and fields; the options; and views of all
  // tensors, in the order of the members below.
  static std::vector<int64_t> described(const std::string& form, const std::vector<int64_t>& options, int64_t fields,
                                        const std::vector<Tensor>& tensors) {
    std::vector<int64_t> words(HEAD + options.size() + tensors.size() * WORDS);
    std::memcpy(words.data(), form.data(), std::min<size_t>(form.size(), NAME - 1));
    words[2] = static_cast<int64_t>(options.size());
    words[3] = fields;
    std::copy(options.begin(), options.end(), &words[HEAD]);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const View view(tensors[i]);
      std::memcpy(&words[HEAD + options.size() + i * WORDS], &view, sizeof view);
    }
    return words;
  }

  explicit Side(const Tensor& description) {
    const auto* words = description.const_data_ptr<int64_t>();
    form = reinterpret_cast<const char*>(words);
    options.assign(words + HEAD, words + HEAD + words[2]);
    const auto* views = reinterpret_cast<const View*>(words + HEAD + words[2]);
    const int64_t count = (description.size(0) - HEAD - words[2]) / WORDS;
    sinks = views[0], tail = views[1], basis = views[2], mean = views[3];
    fields.assign(views + FIRST, views + FIRST + words[3]);
    tables.assign(views + FIRST + words[3], views + count);
  }

  // Reads the options into `numbers`; throws if their count differs.
  template <class... Numbers>
  void read_options(Numbers&... numbers) const {
    STD_TORCH_CHECK(options.size() == sizeof...(numbers), options.size(), " options for the form '", form,
                    "', which has ", sizeof...(numbers));
    auto option = options.begin();
    ((numbers = *option++), ...);
  }

  std::string form;
  std::vector<int64_t> options;
  View sinks, tail;          // dense tokens, [B, H, T, D]; the tail with spare capacity
  View basis, mean;          // of code space, empty if absent: see `operands.CPUSide`
  std::vector<View> fields;  // of packed tokens, [B, H, rows, numbers]
  std::vector<View> tables;
};

}  // namespace kvcache_compress
