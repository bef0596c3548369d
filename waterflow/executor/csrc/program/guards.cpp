#include "waterflow/executor/csrc/program/guards.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Device.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define WATERFLOW_MXCSR 1
#endif

namespace waterflow {

namespace {

#ifdef WATERFLOW_MXCSR
constexpr uint32_t kBits = 0x8000u | 0x0040u;  // flush to zero, denormals are zeros

void set_one(uint32_t bits) { _mm_setcsr((_mm_getcsr() & ~kBits) | bits); }
#else
void set_one(uint32_t) {}
#endif

void set_here(uint32_t bits) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (threads > 1) {
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { set_one(bits); });
  }
  set_one(bits);
}

}  // namespace

uint32_t denormals_here() {
#ifdef WATERFLOW_MXCSR
  return _mm_getcsr() & kBits;
#else
  return 0;
#endif
}

Denormals::Denormals(uint32_t bits) : before_(denormals_here()), changed_(bits != before_) {
  if (changed_) set_here(bits);
}

Denormals::~Denormals() {
  if (changed_) set_here(before_);
}

std::string ambient(c10::DeviceType kind) {
  const auto& context = at::globalContext();
  std::string key;
  key.reserve(96);
  const auto add = [&](auto value) {
    key.push_back(static_cast<char>(static_cast<int>(value)));
    key.push_back(static_cast<char>(static_cast<int>(value) >> 8));
  };
  const auto add_autocast = [&](at::DeviceType device) {
    add(at::autocast::is_autocast_enabled(device));
    add(at::autocast::get_autocast_dtype(device));
  };
  add_autocast(at::kCPU);
  add_autocast(at::kCUDA);
  if (kind != at::kCPU && kind != at::kCUDA) add_autocast(kind);
  add(at::autocast::is_autocast_cache_enabled());
  add(c10::InferenceMode::is_enabled());
  add(torch::autograd::AnomalyMode::is_enabled());
  add(torch::autograd::AnomalyMode::should_check_nan());
  add(at::SavedTensorDefaultHooks::is_enabled());
  add(at::impl::PythonTorchFunctionTLS::get_disabled_state());
  add(c10::get_default_dtype_as_scalartype());
  add(denormals_here());
  add(context.deterministicAlgorithms());
  add(context.deterministicAlgorithmsWarnOnly());
  add(context.deterministicFillUninitializedMemory());
  add(context.userEnabledFlashSDP());
  add(context.userEnabledMemEfficientSDP());
  add(context.userEnabledMathSDP());
  add(context.userEnabledCuDNNSDP());
  add(context.userEnabledMkldnn());
  add(context.userEnabledNNPACK());
  add(context.userEnabledCuDNN());
  add(context.benchmarkCuDNN());
  add(context.deterministicCuDNN());
  add(context.deterministicMkldnn());
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  add(context.float32Precision(Backend::GENERIC, Op::ALL));
  add(context.float32Precision(Backend::CUDA, Op::ALL));
  add(context.float32Precision(Backend::CUDA, Op::CONV));
  add(context.float32Precision(Backend::CUDA, Op::RNN));
  add(context.float32Precision(Backend::CUDA, Op::MATMUL));
  add(context.float32Precision(Backend::MKLDNN, Op::ALL));
  add(context.float32Precision(Backend::MKLDNN, Op::CONV));
  add(context.float32Precision(Backend::MKLDNN, Op::RNN));
  add(context.float32Precision(Backend::MKLDNN, Op::MATMUL));
  return key;
}

int modes_here() {
  const bool saving = at::SavedTensorDefaultHooks::get_hooks().has_value();
  return static_cast<int>(at::impl::PythonTorchFunctionTLS::stack_len() +
                          c10::impl::TorchDispatchModeTLS::stack_len()) +
         (saving ? 1 : 0);
}

namespace {

namespace py = pybind11;

// A number that is another one after each change of the dict; 0 where Python does not tell.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

// The same of a class and its bases. A class has none before something was looked up in it.
unsigned int version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  if (type->tp_version_tag == 0) {
    static auto* name = PyUnicode_InternFromString("__init__");
    _PyType_Lookup(type, name);
  }
  return type->tp_version_tag;
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

// Whether a dict has these entries, in this order.
bool same_pairs(PyObject* dict, const std::vector<std::pair<PyObject*, PyObject*>>& pairs) {
  Py_ssize_t position = 0;
  PyObject *key, *value;
  auto pair = pairs.begin();
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (pair == pairs.end() || pair->first != key || pair->second != value) return false;
    ++pair;
  }
  return pair == pairs.end();
}

// Calls `look` with each item, until it says false; returns whether it never did, and the walk met no error.
template <typename Look>
bool each_item(PyObject* container, PyTypeObject* base, Look look) {
  auto walk = py::reinterpret_steal<py::object>(base->tp_iter(container));
  while (walk) {
    auto item = py::reinterpret_steal<py::object>(Py_TYPE(walk.ptr())->tp_iternext(walk.ptr()));
    if (!item) break;
    if (!look(item.ptr())) return false;
  }
  const bool failed = PyErr_Occurred() != nullptr && !PyErr_ExceptionMatches(PyExc_StopIteration);
  PyErr_Clear();
  return walk && !failed;
}

// A slot's value, a new reference; null for an empty one.
PyObject* value_of(PyObject* object, PyObject* descriptor) {
  PyObject* value = Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
  if (value == nullptr) PyErr_Clear();
  return value;
}

// An object's memory, and the shape and type that it is said to have. False where it cannot be had.
bool read_memory(PyObject* object, PyTypeObject* base, std::string& form, std::string& contents) {
  Py_buffer view;
  if (base->tp_as_buffer->bf_getbuffer(object, &view, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    return false;
  }
  form = (view.format != nullptr ? std::string(view.format) : "B") + (view.readonly ? " r" : " w");
  const auto append = [&](const Py_ssize_t* numbers) {
    if (numbers != nullptr) form.append(reinterpret_cast<const char*>(numbers), view.ndim * sizeof(Py_ssize_t));
  };
  append(view.shape);
  append(view.strides);
  contents.resize(view.len);
  const bool copied = view.len == 0 || PyBuffer_ToContiguous(contents.data(), &view, view.len, 'C') == 0;
  PyErr_Clear();
  PyBuffer_Release(&view);
  return copied;
}

void parts_of(PyObject* function, PyObject** parts) {
  const auto* given = reinterpret_cast<PyFunctionObject*>(function);
  parts[0] = given->func_code;
  parts[1] = given->func_defaults;
  parts[2] = given->func_kwdefaults;
  parts[3] = given->func_name;
  parts[4] = given->func_qualname;
}

// The names of a class that Python code made; those of others do not change.
void names_of(PyTypeObject* type, PyObject** names) {
  const auto* made = reinterpret_cast<PyHeapTypeObject*>(type);
  const bool fixed = !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE);
  names[0] = fixed ? nullptr : made->ht_name;
  names[1] = fixed ? nullptr : made->ht_qualname;
}

}  // namespace

PyObject* Held::operator()(PyObject* object) {
  Py_XINCREF(object);
  return take(object);
}

PyObject* Held::take(PyObject* object) {
  if (object != nullptr) objects_.push_back(object);
  return object;
}

int Held::visit(visitproc visit, void* arg) const {
  for (auto* object : objects_) Py_VISIT(object);
  return 0;
}

void Held::clear() {
  if (objects_.empty()) return;
  const py::gil_scoped_acquire acquire;
  const auto gone = std::exchange(objects_, {});  // whatever their end runs finds none of them here
  for (auto* object : gone) Py_DECREF(object);
}

PyObject* attributes_of(PyObject* object) {
  PyObject** place = _PyObject_GetDictPtr(object);
  PyErr_Clear();
  return place == nullptr ? nullptr : *place;
}

Guards::Dict& Guards::watched(PyObject* dict) {
  const auto [place, fresh] = dict_numbers_.emplace(dict, dicts_.size());
  if (fresh) dicts_.push_back({held_(dict)});
  return dicts_[place->second];
}

Guards::Pairs Guards::pairs_of(PyObject* dict) {
  Pairs pairs;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value)) pairs.emplace_back(held_(key), held_(value));
  return pairs;
}

void Guards::entry(PyObject* dict, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(dict, name);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  watched(dict).named.emplace_back(held_(name), held_(value));
}

void Guards::dict(PyObject* dict) {
  auto& watch = watched(dict);
  if (watch.whole) return;
  watch.whole = true;
  watch.all = pairs_of(dict);
}

void Guards::items(PyObject* container, PyTypeObject* base) {
  if (base->tp_iter == nullptr || !PyObject_TypeCheck(container, base)) throw py::type_error("no such container");
  Items items{held_(container), base, {}};
  each_item(container, base, [&](PyObject* item) {
    items.values.push_back(held_(item));
    return true;
  });
  items_.push_back(std::move(items));
}

void Guards::cell(PyObject* cell) {
  cells_.emplace_back(held_(cell), held_.take(PyCell_Get(cell)));  // null for an empty cell
}

void Guards::member(PyObject* object, PyObject* descriptor) {
  if (Py_TYPE(descriptor) != &PyMemberDescr_Type) throw py::type_error("a slot has a member descriptor");
  members_.push_back({held_(object), held_(descriptor), held_.take(value_of(object, descriptor))});
}

void Guards::object(PyObject* object) {
  PyObject* attributes = attributes_of(object);
  if (attributes != nullptr && PyDict_GET_SIZE(attributes) == 0) attributes = nullptr;
  held_(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  objects_.push_back({held_(object), Py_TYPE(object), held_(attributes)});
  if (attributes != nullptr) dict(attributes);
}

void Guards::function(PyObject* function) {
  Function watch{held_(function), {}};
  parts_of(function, watch.parts);
  for (auto* part : watch.parts) held_(part);
  functions_.push_back(watch);
}

void Guards::cls(PyObject* cls) {
  auto* type = reinterpret_cast<PyTypeObject*>(held_(cls));
  Class watch{type, held_(type->tp_mro), {}, {}, version_of(type)};
  names_of(type, watch.names);
  for (auto* name : watch.names) held_(name);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if (PyType_HasFeature(base, Py_TPFLAGS_IMMUTABLETYPE) || base->tp_dict == nullptr) continue;
    watch.bodies.emplace_back(base->tp_dict, pairs_of(base->tp_dict));
  }
  classes_.push_back(std::move(watch));
}

void Guards::bytes(PyObject* object, PyTypeObject* base) {
  if (base->tp_as_buffer == nullptr || !PyObject_TypeCheck(object, base)) throw py::type_error("has no memory");
  Bytes watch{held_(object), base, {}, {}};
  if (!read_memory(object, base, watch.form, watch.contents)) throw py::value_error("its memory cannot be read");
  bytes_.push_back(std::move(watch));
}

void Guards::truth(PyObject* dict, PyObject* key) {
  truths_.emplace_back(held_(dict), held_(key));
  truth_values_.push_back(is_true(dict, key));
}

void Guards::hooks(PyObject* parameter) { parameters_.push_back(held_(parameter)); }

void Guards::setting(PyObject* function) {
  PyObject* said = PyObject_CallNoArgs(function);
  if (said == nullptr) throw py::error_already_set();
  settings_.emplace_back(held_(function), held_.take(said));
}

bool Guards::holds(const Dict& watch) {
  const uint64_t version = version_of(watch.dict);
  if (version != 0 && version == watch.version) return true;
  if (watch.whole && !same_pairs(watch.dict, watch.all)) return false;
  for (const auto& [name, value] : watch.named) {
    if (PyDict_GetItemWithError(watch.dict, name) != value) {
      if (PyErr_Occurred()) throw py::error_already_set();
      return false;
    }
  }
  watch.version = version;
  return true;
}

bool Guards::holds(const Items& items) {
  if (items.base == &PyList_Type) {
    if (PyList_GET_SIZE(items.container) != static_cast<Py_ssize_t>(items.values.size())) return false;
    for (size_t i = 0; i < items.values.size(); ++i) {
      if (PyList_GET_ITEM(items.container, i) != items.values[i]) return false;
    }
    return true;
  }
  size_t number = 0;
  const bool same = each_item(items.container, items.base, [&](PyObject* item) {
    return number < items.values.size() && items.values[number++] == item;
  });
  return same && number == items.values.size();
}

bool Guards::holds(const Member& member) {
  PyObject* now = value_of(member.object, member.descriptor);
  const bool same = now == member.value;
  Py_XDECREF(now);
  return same;
}

bool Guards::holds(const Object& watch) {
  if (Py_TYPE(watch.object) != watch.type) return false;
  PyObject* now = attributes_of(watch.object);
  return now == watch.attributes || (watch.attributes == nullptr && PyDict_GET_SIZE(now) == 0);
}

bool Guards::holds(const Function& watch) {
  PyObject* now[5];
  parts_of(watch.function, now);
  return std::equal(now, now + 5, watch.parts);
}

bool Guards::holds(const Class& watch) {
  PyObject* names[2];
  names_of(watch.type, names);
  if (!std::equal(names, names + 2, watch.names)) return false;
  const unsigned int version = version_of(watch.type);
  if (version != 0 && version == watch.version) return true;
  if (watch.type->tp_mro != watch.bases) return false;
  for (const auto& [body, pairs] : watch.bodies) {
    if (!same_pairs(body, pairs)) return false;
  }
  watch.version = version;
  return true;
}

bool Guards::holds(const Bytes& watch) {
  std::string form, contents;
  return read_memory(watch.object, watch.base, form, contents) && form == watch.form && contents == watch.contents;
}

void Guards::clear() {
  Guards gone;
  std::swap(*this, gone);
  cleared_ = true;
}

bool Guards::current() const {
  if (cleared_) return false;
  const auto all = [](const auto& watches) {
    return std::all_of(watches.begin(), watches.end(), [](const auto& watch) { return holds(watch); });
  };
  if (!all(dicts_) || !all(items_) || !all(objects_) || !all(functions_) || !all(classes_)) return false;
  if (!all(members_) || !all(bytes_)) return false;
  for (const auto& [cell, value] : cells_) {
    if (PyCell_GET(cell) != value) return false;
  }
  for (size_t i = 0; i < truths_.size(); ++i) {
    if (is_true(truths_[i].first, truths_[i].second) != truth_values_[i]) return false;
  }
  for (const auto& [function, said] : settings_) {
    const auto now = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function));
    const int same = now ? PyObject_RichCompareBool(now.ptr(), said, Py_EQ) : -1;
    if (same < 0) throw py::error_already_set();
    if (same == 0) return false;
  }
  for (auto* parameter : parameters_) {
    const auto* variable = reinterpret_cast<THPVariable*>(parameter);
    if (!empty(variable->backward_hooks) || !empty(variable->post_accumulate_grad_hooks)) return false;
  }
  return true;
}

}  // namespace waterflow
