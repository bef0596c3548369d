// A program bound to one job's tensors, and the means to notice that the user has replaced any of them.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/python_headers.h>

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine.h"
#include "program.h"

namespace waterflow {

// Needs the interpreter lock in every call: it looks into the dictionaries of modules and optimizers.
class Binding {
 public:
  explicit Binding(std::shared_ptr<const Program> program) : frame_(std::make_shared<Frame>(std::move(program))) {}
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  void set_input(int32_t slot, const at::Tensor& tensor);
  void set_number(int32_t slot, double number, bool wrapped);  // wrapped into a tensor, or as it is
  void set_generators(std::vector<at::Generator> generators) { frame_->random = std::move(generators); }  // by job
  // The entry must stay the very object that it was when the program was bound.
  void watch(PyObject* dict, PyObject* key);
  void watch_size(PyObject* container);
  void watch_items(PyObject* list);  // each must stay the very object that it was
  void watch_cell(PyObject* cell);   // of a closure
  void watch_attribute(PyObject* object, PyObject* name);
  void watch_class(PyObject* cls);                  // and its bases: what their bodies say
  void watch_truth(PyObject* dict, PyObject* key);  // an entry that may change, but not to or from zero
  void watch_hooks(PyObject* parameter);            // there are none, and there must be none
  void watch_form(const at::Tensor& tensor);        // memory, shape, type, and whether it requires gradients
  enum class Kind { number, flag, rate };
  // A slot read from dict[key], or from dict[key][index], before each step; a rate becomes a scalar tensor.
  void read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind, at::ScalarType dtype);
  void finish_inputs();
  // The parameters that the step's optimizer trains: whatever lies in their gradients counts for nothing.
  void own_gradient(PyObject* parameter) { trained_.push_back(held_(parameter)); }
  void clear_gradients();

  // False when something was replaced: bind again.
  bool current() const;
  // What the entries that are read before each step say now, by slot.
  struct Readings {
    std::vector<std::pair<int32_t, c10::IValue>> values;
  };
  Readings look();
  // A step with this batch, and with what other bindings of the program have read. `run`, which somebody may wait for
  // already, becomes that step; a new one where it is null.
  std::shared_ptr<StepRun> run(std::shared_ptr<const GroupPlan> plan, std::vector<std::pair<int32_t, at::Tensor>> batch,
                               bool profile, const std::vector<const Readings*>& others = {},
                               std::shared_ptr<StepRun> run = nullptr);

 private:
  struct Watch {
    PyObject* object;
    PyObject* key;
    PyObject* value;
  };
  // Of a dict nothing needs a look while its version is the one that was looked at (PEP 509).
  struct DictWatch {
    PyObject* dict;
    Py_ssize_t size = -1;  // -1: any
    std::vector<std::pair<PyObject*, PyObject*>> entries;
    uint64_t version = 0;
  };
  DictWatch& watched(PyObject* dict);
  struct Read {
    int32_t slot;
    PyObject* dict;
    PyObject* key;
    int32_t index;
    Kind kind;
    at::ScalarType dtype;
    pybind11::object seen;
    c10::IValue value;
  };

  // References that this object holds; they go with it.
  class Held {
   public:
    Held() = default;
    ~Held();
    PyObject* operator()(PyObject* object);  // a new reference to `object`, which may be null
    PyObject* take(PyObject* object);        // the caller's own reference

   private:
    std::vector<PyObject*> objects_;
  };

  Held held_;
  std::shared_ptr<Frame> frame_;
  mutable std::vector<DictWatch> dicts_;
  std::unordered_map<PyObject*, size_t> dict_numbers_;
  std::vector<Watch> attributes_;
  std::vector<std::pair<PyTypeObject*, unsigned int>> classes_;
  std::vector<std::pair<PyObject*, PyObject*>> truths_;  // dict and key
  std::vector<bool> truth_values_;
  std::vector<PyObject*> parameters_;
  std::vector<std::pair<PyObject*, Py_ssize_t>> sizes_;
  std::vector<Read> reads_;
  // All of a tensor that `tensor.data = other` replaces, and whether it requires gradients. Fixed views, and what the
  // capture says of shapes, hold for this one form.
  struct Form {
    explicit Form(const at::Tensor& tensor);
    bool holds_for(const at::Tensor& tensor) const;

    const void* storage;
    const void* address;
    int64_t offset;
    c10::SmallVector<int64_t, 10> sizes_and_strides;
    c10::DispatchKeySet keys;  // with the bits of conjugate and negative views
    caffe2::TypeMeta dtype;
    bool requires_grad;
  };
  struct Items {
    PyObject* list;
    std::vector<PyObject*> values;
  };
  std::vector<std::pair<at::Tensor, Form>> forms_;
  std::vector<PyObject*> trained_;
  std::vector<Items> items_;
  std::vector<std::pair<PyObject*, PyObject*>> cells_;
};

}  // namespace waterflow
