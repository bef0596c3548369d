#include "waterflow/executor/csrc/program/bound_program.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace waterflow {

// The same memory under a tensor that Python does not know. A lane that lets it go needs no interpreter lock for that,
// and whoever has it keeps nothing alive that Python code hangs on the tensor.
static at::Tensor without_python(const at::Tensor& tensor, bool may_resize) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), may_resize));
}

Binding::Binding(std::shared_ptr<const Program> program) : frame_(std::make_shared<Frame>(std::move(program))) {
  auto guards = std::make_unique<Guards>();
  guards_ = guards.get();
  held_.take(pybind11::cast(std::move(guards)).release().ptr());
}

void Binding::set_input(int32_t slot, PyObject* tensor, bool may_resize) {
  const at::Tensor& given = THPVariable_Unpack(tensor);
  // What is trained has the size of its gradient: a kernel that would resize it fails.
  may_resize = may_resize && !given.requires_grad() && given.unsafeGetTensorImpl()->allow_tensor_metadata_change();
  at::Tensor same = without_python(given, may_resize);
  same.set_requires_grad(given.requires_grad());  // some kernels ask
  frame_->slots.at(slot) = std::move(same);
  if (may_resize) frame_->shown.emplace_back(slot, given.getIntrusivePtr());
  watch_form(tensor);
}

void Binding::read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind) {
  reads_.push_back({slot, held_(dict), held_(key), index, kind, {}, {}});
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

void Binding::watch_form(PyObject* tensor) { forms_.emplace_back(held_(tensor), Form(THPVariable_Unpack(tensor))); }

void Binding::clear_gradients() {
  for (auto* parameter : trained_) {
    const auto& tensor = THPVariable_Unpack(parameter);
    if (tensor.grad().defined()) tensor.mutable_grad() = at::Tensor();
  }
}

void Binding::finish_inputs() { frame_->program->make_views(*frame_); }

bool Binding::current() const {
  if (guards_ == nullptr || !guards_->current()) return false;
  for (const auto& [tensor, form] : forms_) {
    if (!form.holds_for(THPVariable_Unpack(tensor))) return false;
  }
  return true;
}

int Binding::visit(visitproc visit, void* arg) const {
  for (const auto& read : reads_) Py_VISIT(read.seen.ptr());
  return held_.visit(visit, arg);
}

void Binding::clear() {
  guards_ = nullptr;
  forms_.clear();
  trained_.clear();
  const auto reads = std::exchange(reads_, {});
  held_.clear();
}

std::shared_ptr<StepRun> Binding::run(std::shared_ptr<const GroupPlan> plan,
                                      std::vector<std::pair<int32_t, at::Tensor>> batch, bool profile) {
  auto run = std::make_shared<StepRun>();
  run->plan = std::move(plan);
  run->frame = frame_;
  run->profile = profile;
  clear_gradients();
  run->inputs = look();
  for (auto& [slot, tensor] : batch) run->inputs.emplace_back(slot, without_python(tensor, false));
  return run;
}

static bool is_plain_number(PyObject* object) {
  return PyFloat_CheckExact(object) || PyLong_CheckExact(object) || PyBool_Check(object);
}

std::vector<std::pair<int32_t, c10::IValue>> Binding::look() {
  std::vector<std::pair<int32_t, c10::IValue>> values;
  values.reserve(reads_.size());
  for (auto& read : reads_) {
    PyObject* value = PyDict_GetItemWithError(read.dict, read.key);
    if (value == nullptr) {
      if (PyErr_Occurred()) throw py::error_already_set();
      throw py::key_error("the optimizer's parameter group has lost its entry " +
                          py::str(read.key).cast<std::string>());
    }
    py::object entry = read.index < 0 ? py::reinterpret_borrow<py::object>(value)
                                      : py::reinterpret_steal<py::object>(PySequence_GetItem(value, read.index));
    if (!entry) throw py::error_already_set();
    // Only Python's own numbers cannot change in place.
    if (entry.ptr() != read.seen.ptr() || !is_plain_number(entry.ptr())) {
      const bool tensor = THPVariable_Check(entry.ptr());
      switch (read.kind) {
        case Kind::rate:
          // A new tensor for each new value, also of a number in its place: steps that are queued keep theirs.
          read.value = tensor ? THPVariable_Unpack(entry.ptr()).detach().clone()
                              : at::scalar_tensor(entry.cast<double>(), at::kDouble);
          break;
        case Kind::number:
          read.value = tensor ? THPVariable_Unpack(entry.ptr()).item<double>() : entry.cast<double>();
          break;
        case Kind::flag:
          read.value = entry.cast<bool>();
          break;
      }
      read.seen = entry;
    }
    values.emplace_back(read.slot, read.value);
  }
  return values;
}

}  // namespace waterflow
