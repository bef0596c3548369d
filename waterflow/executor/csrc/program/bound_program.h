// A program bound to one job's tensors, and the means to notice that the user has replaced any of them.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/python_headers.h>

#include <memory>
#include <utility>
#include <vector>

#include "waterflow/executor/csrc/engine/engine.h"
#include "waterflow/executor/csrc/program/guards.h"
#include "waterflow/executor/csrc/program/program.h"

namespace waterflow {

// Needs the interpreter lock in every call: it looks into the dictionaries of modules and optimizers.
class Binding {
 public:
  explicit Binding(std::shared_ptr<const Program> program);
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  void set_input(int32_t slot, PyObject* tensor, bool may_resize);
  void set_generator(at::Generator generator) { frame_->generator = std::move(generator); }
  // Python's Guards: what must stay as it is for the program to be this job's.
  PyObject* guards() const { return held_.first(); }
  void watch_form(PyObject* tensor);  // memory, shape, type, and whether it requires gradients
  enum class Kind { number, flag, rate };
  // A slot read from dict[key], or from dict[key][index], before each step; a rate is a tensor.
  void read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind);
  void finish_inputs();
  // The parameters that the step's optimizer trains: whatever lies in their gradients counts for nothing.
  void own_gradient(PyObject* parameter) { trained_.push_back(held_(parameter)); }

  // False when something was replaced: bind again.
  bool current() const;
  // A step with this batch.
  std::shared_ptr<StepRun> run(std::shared_ptr<const GroupPlan> plan, std::vector<std::pair<int32_t, at::Tensor>> batch,
                               bool profile);

  int visit(visitproc visit, void* arg) const;
  void clear();

 private:
  void clear_gradients();
  // What the entries that are read before each step say now, by slot.
  std::vector<std::pair<int32_t, c10::IValue>> look();

  struct Read {
    int32_t slot;
    PyObject* dict;
    PyObject* key;
    int32_t index;
    Kind kind;
    pybind11::object seen;
    c10::IValue value;
  };

  Held held_;  // the guards come first
  std::shared_ptr<Frame> frame_;
  const Guards* guards_;
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
  std::vector<std::pair<PyObject*, Form>> forms_;
  std::vector<PyObject*> trained_;
};

}  // namespace waterflow
