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
  for (auto& [cell, value] : cells_) {
    Py_DECREF(cell);
    Py_XDECREF(value);
  }
  for (auto& items : items_) {
    Py_DECREF(items.list);
    for (auto* value : items.values) Py_DECREF(value);
  }
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

void Binding::watch_items(PyObject* list) {
  Items items{list, {}};
  Py_INCREF(list);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* value = PyList_GET_ITEM(list, i);
    Py_INCREF(value);
    items.values.push_back(value);
  }
  items_.push_back(std::move(items));
}

void Binding::watch_cell(PyObject* cell) {
  Py_INCREF(cell);
  cells_.emplace_back(cell, PyCell_Get(cell));  // a new reference, or null for an empty cell
}

void Binding::read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind, at::ScalarType dtype) {
  Py_INCREF(dict);
  Py_INCREF(key);
  reads_.push_back({slot, dict, key, index, kind, dtype, nullptr, {}});
}

void Binding::finish_inputs() {
  frame_->program->make_views(*frame_);
  storages_.clear();
  for (int32_t slot = 0; slot < frame_->program->inputs(); ++slot) {
    const auto& value = frame_->slots[slot];
    if (!value.isTensor()) continue;
    const auto& tensor = value.toTensor();
    storages_.push_back({slot, tensor.const_data_ptr(), tensor.requires_grad()});
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
  for (const auto& items : items_) {
    if (PyList_GET_SIZE(items.list) != static_cast<Py_ssize_t>(items.values.size())) return false;
    for (size_t i = 0; i < items.values.size(); ++i) {
      if (PyList_GET_ITEM(items.list, i) != items.values[i]) return false;
    }
  }
  for (const auto& [cell, value] : cells_) {
    if (PyCell_GET(cell) != value) return false;
  }
  for (const auto& [slot, address, requires_grad] : storages_) {
    // `p.data = other` keeps the tensor and changes its storage, under the fixed views.
    const auto& tensor = frame_->slots[slot].toTensor();
    if (tensor.const_data_ptr() != address || tensor.requires_grad() != requires_grad) return false;
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
