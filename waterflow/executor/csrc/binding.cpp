#include "binding.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

namespace waterflow {

Binding::~Binding() {
  for (auto& watch : watches_) {
    Py_DECREF(watch.dict);
    Py_DECREF(watch.key);
    Py_XDECREF(watch.value);
  }
  for (auto& [container, size] : sizes_) Py_DECREF(container);
  for (auto& read : reads_) {
    Py_DECREF(read.dict);
    Py_DECREF(read.key);
    Py_XDECREF(read.seen);
  }
}

void Binding::set_input(int32_t slot, const at::Tensor& tensor) { frame_->slots.at(slot) = tensor; }

void Binding::watch(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  Py_INCREF(dict);
  Py_INCREF(key);
  Py_XINCREF(value);
  watches_.push_back({dict, key, value});
}

void Binding::watch_size(PyObject* container) {
  Py_INCREF(container);
  sizes_.emplace_back(container, PyObject_Size(container));
}

void Binding::read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind, at::ScalarType dtype) {
  Py_INCREF(dict);
  Py_INCREF(key);
  reads_.push_back({slot, dict, key, index, kind, dtype, nullptr, {}});
}

void Binding::finish_inputs() {
  frame_->program->make_views(*frame_);
  addresses_.clear();
  for (int32_t slot = 0; slot < frame_->program->inputs(); ++slot) {
    const auto& value = frame_->slots[slot];
    if (value.isTensor()) addresses_.emplace_back(slot, value.toTensor().const_data_ptr());
  }
}

bool Binding::current() const {
  for (const auto& watch : watches_) {
    if (PyDict_GetItemWithError(watch.dict, watch.key) != watch.value) {
      if (PyErr_Occurred()) throw py::error_already_set();
      return false;
    }
  }
  for (const auto& [container, size] : sizes_) {
    if (PyObject_Size(container) != size) return false;
  }
  for (const auto& [slot, address] : addresses_) {
    // `p.data = other` keeps the tensor and changes its storage, under the fixed views.
    if (frame_->slots[slot].toTensor().const_data_ptr() != address) return false;
  }
  return true;
}

std::shared_ptr<StepRun> Binding::run(std::shared_ptr<const GroupPlan> plan,
                                      std::vector<std::pair<int32_t, at::Tensor>> batch, bool profile) {
  auto run = std::make_shared<StepRun>();
  run->plan = std::move(plan);
  run->frame = frame_;
  run->profile = profile;
  run->inputs.reserve(batch.size() + reads_.size());
  for (auto& [slot, tensor] : batch) run->inputs.emplace_back(slot, std::move(tensor));
  for (auto& read : reads_) {
    PyObject* value = PyDict_GetItemWithError(read.dict, read.key);
    if (value == nullptr) {
      if (PyErr_Occurred()) throw py::error_already_set();
      throw py::key_error("the optimizer's parameter group has lost its entry " +
                          py::str(read.key).cast<std::string>());
    }
    if (value != read.seen || THPVariable_Check(value)) {
      py::object entry = py::reinterpret_borrow<py::object>(value);
      if (read.index >= 0) entry = entry[py::int_(read.index)];
      const bool tensor = THPVariable_Check(entry.ptr());
      switch (read.kind) {
        case Kind::rate: {
          // A new tensor for each new value: steps that are queued keep theirs.
          if (tensor) {
            read.value = THPVariable_Unpack(entry.ptr()).detach().clone();
          } else {
            read.value = at::scalar_tensor(entry.cast<double>(), at::TensorOptions().dtype(read.dtype));
          }
          break;
        }
        case Kind::number:
          read.value = tensor ? THPVariable_Unpack(entry.ptr()).item<double>() : entry.cast<double>();
          break;
        case Kind::flag:
          read.value = entry.cast<bool>();
          break;
      }
      Py_INCREF(value);
      Py_XDECREF(read.seen);
      read.seen = value;
    }
    run->inputs.emplace_back(read.slot, read.value);
  }
  return run;
}

}  // namespace waterflow
