// Python's view of guards, of the settings around a step, and of what a batch's tensors carry.
#include <pybind11/stl.h>
#include <torch/extension.h>

#include <algorithm>
#include <string>

#include "ambient.h"
#include "denormals.h"
#include "guards.h"
#include "state_bytes.h"

namespace waterflow {
namespace {

PyTypeObject* type_of(const py::type& type) { return reinterpret_cast<PyTypeObject*>(type.ptr()); }

bool carries_more(PyObject* tensor) {
  PyObject* attributes = attributes_of(tensor);
  const auto& value = THPVariable_Unpack(tensor);
  if ((attributes != nullptr && PyDict_GET_SIZE(attributes) > 0) || value.requires_grad()) return true;
  return value.layout() == at::kStrided && value.grad().defined();
}

py::object form_of(PyObject* batch) {
  if (!PyTuple_CheckExact(batch) || PyTuple_GET_SIZE(batch) == 0) return py::none();
  std::string key;
  bool any = false;
  const auto add = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(batch); ++i) {
    PyObject* one = PyTuple_GET_ITEM(batch, i);
    if (PyUnicode_CheckExact(one) || PyBytes_CheckExact(one) || PyLong_CheckExact(one) || PyFloat_CheckExact(one)) {
      add(Py_TYPE(one));
      continue;
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(one)) != THPVariableClass) return py::none();
    any = true;
    for (Py_ssize_t before = 0; before < i; ++before) {
      if (PyTuple_GET_ITEM(batch, before) == one) return py::none();
    }
    const auto& tensor = THPVariable_Unpack(one);
    const bool dense = tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized();
    if (!dense || tensor.is_meta() || carries_more(one)) return py::none();
    add(tensor.dim());
    for (const auto size : tensor.sizes()) add(size);
    for (const auto stride : tensor.strides()) add(stride);
    add(tensor.scalar_type());
    add(tensor.device().type());
    add(tensor.device().index());
    add(static_cast<char>(2 * tensor.is_conj() + tensor.is_neg()));
  }
  return any ? py::object(py::bytes(key)) : py::none();
}

}  // namespace

void bind_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards")
      .def(py::init<>(), "Notes what places say; ``current()`` tells whether all of them still say it.")
      .def("entry", [](Guards& self, const py::dict& dict, const py::str& name) { self.entry(dict.ptr(), name.ptr()); })
      .def("dict", [](Guards& self, const py::dict& dict) { self.dict(dict.ptr()); })
      .def("items", [](Guards& self, const py::object& container,
                       const py::type& base) { self.items(container.ptr(), type_of(base)); })
      .def("cell",
           [](Guards& self, const py::object& cell) {
             TORCH_CHECK_TYPE(PyCell_Check(cell.ptr()), "not a cell");
             self.cell(cell.ptr());
           })
      .def("member", [](Guards& self, const py::object& object,
                        const py::object& descriptor) { self.member(object.ptr(), descriptor.ptr()); })
      .def("object", [](Guards& self, const py::object& object) { self.object(object.ptr()); })
      .def("function",
           [](Guards& self, const py::object& function) {
             TORCH_CHECK_TYPE(PyFunction_Check(function.ptr()), "not a function");
             self.function(function.ptr());
           })
      .def("cls", [](Guards& self, const py::type& cls) { self.cls(cls.ptr()); })
      .def("bytes", [](Guards& self, const py::object& object,
                       const py::type& base) { self.bytes(object.ptr(), type_of(base)); })
      .def("truth",
           [](Guards& self, const py::dict& dict, const py::object& key) { self.truth(dict.ptr(), key.ptr()); })
      .def("hooks",
           [](Guards& self, const py::object& parameter) {
             TORCH_CHECK_TYPE(THPVariable_Check(parameter.ptr()), "hooks are watched on tensors");
             self.hooks(parameter.ptr());
           })
      .def("setting", [](Guards& self, const py::function& function) { self.setting(function.ptr()); })
      .def("current", &Guards::current);

  m.def(
      "attributes_of",
      [](const py::object& object) {
        PyObject* attributes = attributes_of(object.ptr());
        return attributes == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(attributes);
      },
      "An object's own attributes, as no code of its class can show them; None where it has none, or none yet.");
  m.def(
      "carries_more",
      [](const py::sequence& tensors) {
        return std::any_of(tensors.begin(), tensors.end(),
                           [](const auto& one) { return THPVariable_Check(one.ptr()) && carries_more(one.ptr()); });
      },
      "Whether one of these tensors requires gradients, has one, or has attributes of its own.");
  m.def(
      "form_of", [](const py::object& batch) { return form_of(batch.ptr()); },
      "A key of the sizes, strides, types and devices of a tuple of plain tensors, which are nothing but memory, "
      "beside the "
      "types of numbers and text among them; None for any other batch.");
  m.def(
      "ambient", [](const std::string& device_type) { return py::bytes(ambient(device_type)); },
      "Settings of the process and the calling thread that a step's code can tell apart, all in one key.");
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<StateBytes>(m, "StateBytes",
                         "The sizes of some tensors and the memory that they lie on: each byte once, and no byte of "
                         "anybody else's.")
      .def(py::init<const std::vector<at::Tensor>&>())
      .def_property_readonly("bytes", &StateBytes::bytes, "Bytes of a copy.")
      .def("keep", &StateBytes::keep, unlocked(), "Copy what lies there now.")
      .def("put", &StateBytes::put, unlocked(), "Bring the copy back, and the sizes; what is as it was is not written.")
      .def("is_as", &StateBytes::is_as, unlocked(), "Whether sizes and each bit are as they were.")
      .def("kept", &StateBytes::kept, "One of the tensors, as it was when it was copied.")
      .def("checksum", &StateBytes::checksum, unlocked(), "A number of what lies there now.");
  m.def("denormals_here", &denormals_here, "The calling thread's bits for denormal numbers.");
  m.def(
      "under_denormals",
      [](uint32_t bits, const py::object& work) {
        Denormals scope(bits);
        return work();
      },
      "What `work()` returns on this thread under another's bits for denormal numbers.");
  m.def("modes_here", &modes_here, "How many function and dispatch modes the calling thread is in.");
}

}  // namespace waterflow
