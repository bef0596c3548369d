#include "binding.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <algorithm>

namespace waterflow {
namespace {

// A number that is another one after each change of the dict; 0 where Python does not tell.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

bool is_true(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  const int truth = value == nullptr ? 0 : PyObject_IsTrue(value);
  if (PyErr_Occurred()) throw py::error_already_set();
  return truth == 1;
}

bool empty(PyObject* hooks) { return hooks == nullptr || hooks == Py_None || PyObject_Size(hooks) == 0; }

}  // namespace

Binding::Held::~Held() {
  for (auto* object : objects_) Py_DECREF(object);
}

PyObject* Binding::Held::operator()(PyObject* object) {
  Py_XINCREF(object);
  return take(object);
}

PyObject* Binding::Held::take(PyObject* object) {
  if (object != nullptr) objects_.push_back(object);
  return object;
}

void Binding::set_input(int32_t slot, const at::Tensor& tensor) { frame_->slots.at(slot) = tensor; }

Binding::DictWatch& Binding::watched(PyObject* dict) {
  const auto [place, fresh] = dict_numbers_.emplace(dict, dicts_.size());
  if (fresh) dicts_.push_back({held_(dict)});
  return dicts_[place->second];
}

void Binding::set_number(int32_t slot, double number, bool wrapped) {
  frame_->slots.at(slot) = wrapped ? c10::IValue(wrapped_number(number)) : c10::IValue(number);
}

void Binding::watch(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  watched(dict).entries.emplace_back(held_(key), held_(value));
}

void Binding::watch_size(PyObject* container) {
  const Py_ssize_t size = PyObject_Size(container);
  if (PyDict_Check(container)) {
    watched(container).size = size;
  } else {
    sizes_.emplace_back(held_(container), size);
  }
}

void Binding::watch_items(PyObject* list) {
  Items items{held_(list), {}};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) items.values.push_back(held_(PyList_GET_ITEM(list, i)));
  items_.push_back(std::move(items));
}

void Binding::watch_cell(PyObject* cell) {
  cells_.emplace_back(held_(cell), held_.take(PyCell_Get(cell)));  // null for an empty cell
}

void Binding::watch_attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) PyErr_Clear();
  attributes_.push_back({held_(object), held_(name), held_.take(value)});
}

void Binding::watch_class(PyObject* cls) {
  auto* type = reinterpret_cast<PyTypeObject*>(held_(cls));
  classes_.emplace_back(type, type->tp_version_tag);
}

void Binding::watch_truth(PyObject* dict, PyObject* key) {
  truths_.emplace_back(held_(dict), held_(key));
  truth_values_.push_back(is_true(dict, key));
}

void Binding::watch_hooks(PyObject* parameter) { parameters_.push_back(held_(parameter)); }

void Binding::read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind, at::ScalarType dtype) {
  reads_.push_back({slot, held_(dict), held_(key), index, kind, dtype, {}, {}});
}

Binding::Form::Form(const at::Tensor& tensor)
    : storage(tensor.storage().unsafeGetStorageImpl()),
      address(tensor.const_data_ptr()),
      offset(tensor.storage_offset()),
      sizes_and_strides(tensor.sizes().begin(), tensor.sizes().end()),
      keys(tensor.key_set()),
      dtype(tensor.dtype()),
      requires_grad(tensor.requires_grad()) {
  sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
}

bool Binding::Form::holds_for(const at::Tensor& tensor) const {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return tensor.storage().unsafeGetStorageImpl() == storage && tensor.const_data_ptr() == address &&
         tensor.storage_offset() == offset && tensor.dtype() == dtype && tensor.key_set() == keys &&
         tensor.requires_grad() == requires_grad && sizes.size() + strides.size() == sizes_and_strides.size() &&
         std::equal(sizes.begin(), sizes.end(), sizes_and_strides.begin()) &&
         std::equal(strides.begin(), strides.end(), sizes_and_strides.begin() + sizes.size());
}

void Binding::watch_form(const at::Tensor& tensor) { forms_.emplace_back(tensor, Form(tensor)); }

void Binding::clear_gradients() {
  for (auto* parameter : trained_) {
    const auto& tensor = THPVariable_Unpack(parameter);
    if (tensor.grad().defined()) tensor.mutable_grad() = at::Tensor();
  }
}

void Binding::finish_inputs() {
  frame_->program->make_views(*frame_);
  for (int32_t slot = 0; slot < frame_->program->inputs(); ++slot) {
    const auto& value = frame_->slots[slot];
    if (value.isTensor()) watch_form(value.toTensor());
  }
}

bool Binding::current() const {
  for (auto& watch : dicts_) {
    const uint64_t version = version_of(watch.dict);
    if (version != 0 && version == watch.version) continue;
    if (watch.size >= 0 && PyDict_GET_SIZE(watch.dict) != watch.size) return false;
    for (const auto& [key, value] : watch.entries) {
      if (PyDict_GetItemWithError(watch.dict, key) != value) {
        if (PyErr_Occurred()) throw py::error_already_set();
        return false;
      }
    }
    watch.version = version;
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
  for (const auto& [object, name, value] : attributes_) {
    auto now = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
    if (!now) PyErr_Clear();
    if (now.ptr() != value) return false;
  }
  for (const auto& [type, version] : classes_) {
    if (type->tp_version_tag != version) return false;
  }
  for (size_t i = 0; i < truths_.size(); ++i) {
    if (is_true(truths_[i].first, truths_[i].second) != truth_values_[i]) return false;
  }
  for (auto* parameter : parameters_) {
    const auto* variable = reinterpret_cast<THPVariable*>(parameter);
    if (!empty(variable->backward_hooks) || !empty(variable->post_accumulate_grad_hooks)) return false;
  }
  for (const auto& [tensor, form] : forms_) {
    if (!form.holds_for(tensor)) return false;
  }
  return true;
}

// The same memory under a tensor that Python does not know: a lane that lets it go needs no interpreter lock for that.
static at::Tensor without_python(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

std::shared_ptr<StepRun> Binding::run(std::shared_ptr<const GroupPlan> plan,
                                      std::vector<std::pair<int32_t, at::Tensor>> batch, bool profile,
                                      const std::vector<const Readings*>& others, std::shared_ptr<StepRun> run) {
  if (run == nullptr) run = std::make_shared<StepRun>();
  run->plan = std::move(plan);
  run->frame = frame_;
  run->profile = profile;
  clear_gradients();
  run->inputs = look().values;
  for (auto& [slot, tensor] : batch) run->inputs.emplace_back(slot, without_python(tensor));
  for (const auto* read : others) run->inputs.insert(run->inputs.end(), read->values.begin(), read->values.end());
  return run;
}

Binding::Readings Binding::look() {
  Readings readings;
  readings.values.reserve(reads_.size());
  for (auto& read : reads_) {
    PyObject* value = PyDict_GetItemWithError(read.dict, read.key);
    if (value == nullptr) {
      if (PyErr_Occurred()) throw py::error_already_set();
      throw py::key_error("the optimizer's parameter group has lost its entry " +
                          py::str(read.key).cast<std::string>());
    }
    if (value != read.seen.ptr() || THPVariable_Check(value)) {
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
      read.seen = py::reinterpret_borrow<py::object>(value);
    }
    readings.values.emplace_back(read.slot, read.value);
  }
  return readings;
}

}  // namespace waterflow
