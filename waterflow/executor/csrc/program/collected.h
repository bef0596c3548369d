// What Python's garbage collector sees of objects of C++ that hold Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <type_traits>

namespace waterflow {

// Makes Python's garbage collector see what objects of the class T hold, by `T::visit` and `T::clear`. Each reference
// has one owner: the Python object that alone owns the T. While there are others, such as a lane that runs a step,
// nothing is visited, so that all that the T holds lives on.
template <typename T, typename Holder = std::unique_ptr<T>>
pybind11::custom_type_setup collected() {
  static constexpr auto owned_by = [](PyObject* self) -> T* {
    const auto place = reinterpret_cast<pybind11::detail::instance*>(self)->get_value_and_holder();
    if (!place.holder_constructed()) return nullptr;  // it is being made, or does not own the T
    if constexpr (std::is_same_v<Holder, std::shared_ptr<T>>) {
      if (place.template holder<Holder>().use_count() != 1) return nullptr;
    }
    return place.template value_ptr<T>();
  };
  return pybind11::custom_type_setup([](PyHeapTypeObject* made) {
    PyTypeObject& type = made->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const T* owned = owned_by(self);
      return owned != nullptr ? owned->visit(visit, arg) : 0;
    };
    type.tp_clear = [](PyObject* self) {
      if (T* owned = owned_by(self)) owned->clear();
      return 0;
    };
  });
}

}  // namespace waterflow
