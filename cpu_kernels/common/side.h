// Arguments of `attend` for one side of a layer, keys or values.
#pragma once

#include <vector>

#include "common/names.h"

namespace kvcache_compress {

using torch::stable::Tensor;

// Passed from Python as three arguments (`launch._operands`): the form, which names a decoder; the number of fields,
// followed by the form's options; and all tensors, in the order of the members below.
struct Side {
  Side(StringHandle name, const std::vector<int64_t>& numbers, const std::vector<Tensor>& tensors)
      : form(text(name)),
        options(numbers.begin() + 1, numbers.end()),
        sinks(tensors[0]),
        tail(tensors[1]),
        basis(tensors[2]),
        mean(tensors[3]),
        fields(tensors.begin() + 4, tensors.begin() + 4 + numbers[0]),
        tables(tensors.begin() + 4 + numbers[0], tensors.end()) {}

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
  Tensor sinks, tail;          // dense tokens, [B, H, T, D]
  Tensor basis, mean;          // of code space, empty if absent: see `operands.CPUSide`
  std::vector<Tensor> fields;  // of packed tokens, [B, H, rows, numbers]
  std::vector<Tensor> tables;
};

}  // namespace kvcache_compress
