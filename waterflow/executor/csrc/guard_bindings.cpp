// Python's view of guards, of the settings around a step, and of what a batch's tensors carry.
#include <torch/extension.h>

#include "ambient.h"
#include "guards.h"

namespace waterflow {
namespace {

PyTypeObject* type_of(const py::object& type) {
  return type.is_none() ? nullptr : reinterpret_cast<PyTypeObject*>(type.ptr());
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
      .def(
          "cls",
          [](Guards& self, const py::type& cls, const py::object& passing) { self.cls(cls.ptr(), type_of(passing)); },
          py::arg("cls"), py::arg("passing") = py::none())
      .def("bytes", [](Guards& self, const py::object& object,
                       const py::type& base) { self.bytes(object.ptr(), type_of(base)); })
      .def("truth",
           [](Guards& self, const py::dict& dict, const py::object& key) { self.truth(dict.ptr(), key.ptr()); })
      .def("hooks",
           [](Guards& self, const py::object& parameter) {
             TORCH_CHECK_TYPE(THPVariable_Check(parameter.ptr()), "hooks are watched on tensors");
             self.hooks(parameter.ptr());
           })
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
        for (const auto& tensor : tensors) {
          if (!THPVariable_Check(tensor.ptr())) continue;
          PyObject* attributes = attributes_of(tensor.ptr());
          const auto& value = THPVariable_Unpack(tensor.ptr());
          if ((attributes != nullptr && PyDict_GET_SIZE(attributes) > 0) || value.requires_grad()) return true;
          if (value.layout() == at::kStrided && value.grad().defined()) return true;
        }
        return false;
      },
      "Whether one of these tensors requires gradients, has one, or has attributes of its own.");
  m.def(
      "ambient", [](const std::string& device_type) { return py::bytes(ambient(device_type)); },
      "Settings of the process and the calling thread that a step's code can tell apart, all in one key.");
  m.def("modes_here", &modes_here, "How many function and dispatch modes the calling thread is in.");
}

}  // namespace waterflow
