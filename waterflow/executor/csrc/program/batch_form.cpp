#include "waterflow/executor/csrc/program/batch_form.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "waterflow/executor/csrc/program/guards.h"

namespace waterflow {

bool carries_more(PyObject* tensor) {
  PyObject* attributes = attributes_of(tensor);
  const auto& value = THPVariable_Unpack(tensor);
  if ((attributes != nullptr && PyDict_GET_SIZE(attributes) > 0) || value.requires_grad()) return true;
  return value.layout() == at::kStrided && value.grad().defined();
}

bool add_form(const std::vector<PyObject*>& items, bool values, std::string& key) {
  bool any = false;
  const auto add = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  for (auto at = items.begin(); at != items.end(); ++at) {
    PyObject* one = *at;
    if (values &&
        (PyUnicode_CheckExact(one) || PyBytes_CheckExact(one) || PyLong_CheckExact(one) || PyFloat_CheckExact(one))) {
      add(Py_TYPE(one));
      continue;
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(one)) != THPVariableClass) return false;
    any = true;
    if (std::find(items.begin(), at, one) != at) return false;
    const auto& tensor = THPVariable_Unpack(one);
    const bool dense = tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized();
    if (!dense || tensor.is_meta() || carries_more(one)) return false;
    add(tensor.dim());
    for (const auto size : tensor.sizes()) add(size);
    for (const auto stride : tensor.strides()) add(stride);
    add(tensor.scalar_type());
    add(tensor.device().type());
    add(tensor.device().index());
    add(static_cast<char>(2 * tensor.is_conj() + tensor.is_neg()));
  }
  return any;
}

}  // namespace waterflow
