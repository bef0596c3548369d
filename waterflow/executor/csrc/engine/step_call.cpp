#include "waterflow/executor/csrc/engine/step_call.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "waterflow/executor/csrc/program/batch_form.h"
#include "waterflow/executor/csrc/program/guards.h"

namespace py = pybind11;

namespace waterflow {

void wait_done(Engine& engine, const std::shared_ptr<StepRun>& run) {
  bool done = false;
  while (!done) {
    {
      py::gil_scoped_release release;
      done = engine.wait(run, 50);
    }
    if (!done && PyErr_CheckSignals() != 0) {
      py::error_already_set interrupted;
      {
        py::gil_scoped_release release;
        engine.leave(run->job);
      }
      throw interrupted;
    }
  }
}

py::list outputs(StepRun& run) {
  PyObject* told = run.told.first();
  if (told != nullptr && PyExceptionInstance_Check(told)) {
    PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(told))), Py_NewRef(told),
                  PyException_GetTraceback(told));
    throw py::error_already_set();
  }
  if (told != nullptr) return py::reinterpret_borrow<py::list>(told);
  if (run.error) std::rethrow_exception(run.error);
  py::list list;
  for (const auto& tensor : run.outputs) {
    if (tensor.defined()) {
      list.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    } else {
      list.append(py::none());
    }
  }
  if (run.done) {
    run.told(list.ptr());
    run.outputs.clear();
  }
  return list;
}

StepCall::StepCall(const py::object& binding, std::shared_ptr<const GroupPlan> plan, std::vector<int32_t> slots,
                   std::vector<int32_t> places, const py::object& batch, const py::bytes& ambient,
                   std::vector<Ranges> changed, int32_t threads, Engine::Id job, std::shared_ptr<Engine> engine)
    : binding_(&binding.cast<Binding&>()),
      plan_(std::move(plan)),
      slots_(std::move(slots)),
      places_(std::move(places)),
      changed_(std::move(changed)),
      engine_(std::move(engine)),
      job_(job),
      threads_(threads),
      ambient_(ambient) {
  held_(binding.ptr());
  PyTypeObject* type = Py_TYPE(batch.ptr());
  if (type == &PyDict_Type) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(batch)) {
      if (!PyUnicode_CheckExact(key.ptr())) return;
      keys_.push_back(held_(key.ptr()));
    }
  }
  type_ = type;
  if (!items_of(batch.ptr()) || !add_form(items_, type == &PyTuple_Type, form_)) type_ = nullptr;
}

// The batch's leaves, in their order.
bool StepCall::items_of(PyObject* batch) {
  items_.clear();
  if (Py_TYPE(batch) != type_) return false;
  if (type_ == &PyTuple_Type || type_ == &PyList_Type) {
    PyObject** first = PySequence_Fast_ITEMS(batch);
    items_.assign(first, first + Py_SIZE(batch));
    return true;
  }
  if (type_ == &PyDict_Type) {
    if (static_cast<size_t>(PyDict_GET_SIZE(batch)) != keys_.size()) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(batch, &at, &key, &value);) {
      PyObject* known = keys_[items_.size()];
      if (key != known && (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, known) != 0)) return false;
      items_.push_back(value);
    }
    return true;
  }
  items_.push_back(batch);
  return reinterpret_cast<PyObject*>(type_) == THPVariableClass;
}

bool StepCall::lies_in_changed(const at::Tensor& tensor) const {
  if (tensor.numel() == 0) return false;
  int64_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) extent += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
  const uint64_t end = begin + static_cast<uint64_t>(extent) * tensor.itemsize();
  return std::any_of(changed_.begin(), changed_.end(), [&](const Ranges& ranges) {
    const auto behind =
        std::partition_point(ranges.begin(), ranges.end(), [&](const auto& r) { return r.first < end; });
    return behind != ranges.begin() && std::prev(behind)->second > begin;
  });
}

// Python decides at its slower calls what is not compared here.
std::shared_ptr<StepRun> StepCall::prepare(PyObject* batch) {
  now_.clear();
  if (binding_ == nullptr || modes_here() != 0 || !items_of(batch)) return nullptr;
  if (!add_form(items_, type_ == &PyTuple_Type, now_) || now_ != form_) return nullptr;
  // Held from here on: guards may call functions of Python's, and another thread change a list.
  std::vector<std::pair<int32_t, at::Tensor>> given;
  given.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto& tensor = THPVariable_Unpack(items_[places_[i]]);
    if (lies_in_changed(tensor)) return nullptr;
    given.emplace_back(slots_[i], tensor);
  }
  if (ambient(device_) != ambient_ || !binding_->current()) return nullptr;
  if (engine_ && engine_->on_a_lane()) return nullptr;
  auto run = binding_->run(plan_, std::move(given), false);
  run->by_caller = at::get_num_threads() == threads_;
  return run;
}

std::shared_ptr<StepRun> StepCall::done(PyObject* batch) {
  auto run = prepare(batch);
  if (!run) return nullptr;
  bool done = true;
  {
    py::gil_scoped_release release;
    if (!engine_) {
      run_alone(*run);
    } else if (submitted(run)) {
      done = engine_->wait(run, 50);
    } else {
      return nullptr;
    }
  }
  if (!done) wait_done(*engine_, run);
  failed_node_ = run->failed_node;
  if (run->error) return run;
  requests_.first += run->placed.planned;
  requests_.second += run->placed.missed;
  return run;
}

py::object StepCall::run(const py::object& batch) {
  const auto run = done(batch.ptr());
  return run ? py::object(outputs(*run)) : py::none();
}

void StepCall::run_all(const py::sequence& batches, const Flag& flag, py::list& losses) {
  for (const auto& batch : batches) {
    if (flag.raised || requests_.second > 0) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const auto run = done(batch.ptr());
    if (!run) return;
    losses.append(outputs(*run)[0]);
  }
}

std::shared_ptr<StepRun> StepCall::submit(const py::object& batch, bool by_caller,
                                          const std::shared_ptr<StepRun>& before) {
  auto run = prepare(batch.ptr());
  if (!run) return nullptr;
  py::gil_scoped_release release;
  if (engine_) {
    run->by_caller &= by_caller;
    if (!submitted(run, before)) return nullptr;
  } else if (!before || !before->error) {
    run_alone(*run);
  }
  return run;
}

// False where the engine refuses it: Python's slower call then raises the error.
bool StepCall::submitted(const std::shared_ptr<StepRun>& run, const std::shared_ptr<StepRun>& before) {
  try {
    engine_->submit(job_, run, before);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void StepCall::clear() {
  binding_ = nullptr;
  keys_.clear();
  held_.clear();
}

}  // namespace waterflow
