// Names that Python and C++ share: of operators, and of `Literal`s, each of which has a table of the same names in C++.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <string>

// Registers `function` for CPUs as an operator of `torch.ops.kvcache_compress_cpu`; `types` are those of its schema.
#define KVCACHE_COMPRESS_OPERATOR(name, types, function)                         \
  STABLE_TORCH_LIBRARY_FRAGMENT(kvcache_compress_cpu, m) { m.def(#name types); } \
  STABLE_TORCH_LIBRARY_IMPL(kvcache_compress_cpu, CPU, m) { m.impl(#name, TORCH_BOX(&function)); }

namespace kvcache_compress {

// Text of a string argument. Operators take a handle, as PyTorch 2.13's conversion to `std::string` leaks at each call.
inline std::string text(StringHandle handle) {
  const char* data = nullptr;
  size_t length = 0;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  const std::string copy(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return copy;
}

template <class Value>
struct Named {
  const char* name;
  Value value;
};

// Value of `name` in the table of all names of this `kind`; throws for an unknown name.
template <class Value, size_t COUNT>
Value named(const char* kind, const std::string& name, const Named<Value> (&table)[COUNT]) {
  for (const auto& entry : table) {
    if (name == entry.name) return entry.value;
  }
  std::string known;
  for (const auto& entry : table) known.append(known.empty() ? "" : ", ").append(entry.name);
  STD_TORCH_CHECK(false, "there is no ", kind, " '", name, "' among ", known);
  return {};
}

}  // namespace kvcache_compress
