// Kernels of waterflow's own, called with what stands in slots instead of through the dispatcher: no stack, no copies
// of arguments, no keys to look up.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace waterflow {

// Of an operator with one tensor as its result: its arguments in the order of its schema.
using DirectCall = at::Tensor (*)(const c10::IValue* const* arguments);

// The call of the operator with this name; null where it has none. Called on CPU tensors alone.
DirectCall find_direct_call(const std::string& name);

#ifdef WATERFLOW_TEST_HOOKS
// In what is captured from now on, the kernel with this name gives results of which the lowest bit of the first byte is
// wrong; none does where the name is empty. Raises where there is no such kernel.
void plant_wrong_bit(const std::string& name);
#endif

struct RegisterDirectCall {
  RegisterDirectCall(std::string name, DirectCall call);
};

// Whether the tensor's memory holds its values as they are. The dispatcher would see to it.
inline bool has_plain_memory(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers(
      {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
  return !tensor.key_set().has_any(kOthers);
}

template <typename T>
decltype(auto) given(const c10::IValue& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.toTensor();
  } else if constexpr (std::is_same_v<T, at::Scalar>) {
    return value.toScalar();
  } else {
    return value.to<T>();
  }
}

template <auto Kernel>
struct Direct;

template <typename... Args, at::Tensor (*Kernel)(Args...)>
struct Direct<Kernel> {
  static at::Tensor call(const c10::IValue* const* arguments) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Kernel(given<std::remove_cvref_t<Args>>(*arguments[I])...);
    }(std::index_sequence_for<Args...>{});
  }
};

}  // namespace waterflow
