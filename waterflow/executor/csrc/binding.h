// A program bound to one job's tensors, and the means to notice that the user has replaced any of them.
#pragma once

#include <torch/csrc/python_headers.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine.h"
#include "program.h"

namespace waterflow {

// Needs the interpreter lock in every call: it looks into the dictionaries of modules and optimizers.
class Binding {
 public:
  explicit Binding(std::shared_ptr<const Program> program) : frame_(std::make_shared<Frame>(std::move(program))) {}
  ~Binding();
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

  void set_input(int32_t slot, const at::Tensor& tensor);
  void set_number(int32_t slot, double number) { frame_->slots.at(slot) = number; }
  void set_generator(const at::Generator& generator) { frame_->random = generator; }
  // The entry must stay the very object that it was when the program was bound.
  void watch(PyObject* dict, PyObject* key);
  void watch_size(PyObject* container);
  void watch_items(PyObject* list);  // each must stay the very object that it was
  void watch_cell(PyObject* cell);   // of a closure
  enum class Kind { number, flag, rate };
  // A slot read from dict[key], or from dict[key][index], before each step; a rate becomes a scalar tensor.
  void read(int32_t slot, PyObject* dict, PyObject* key, int32_t index, Kind kind, at::ScalarType dtype);
  void finish_inputs();

  // False when something was replaced: bind again.
  bool current() const;
  std::shared_ptr<StepRun> run(std::shared_ptr<const GroupPlan> plan, std::vector<std::pair<int32_t, at::Tensor>> batch,
                               bool profile);

 private:
  struct Watch {
    PyObject* dict;
    PyObject* key;
    PyObject* value;
  };
  struct Read {
    int32_t slot;
    PyObject* dict;
    PyObject* key;
    int32_t index;
    Kind kind;
    at::ScalarType dtype;
    PyObject* seen;
    c10::IValue value;
  };

  std::shared_ptr<Frame> frame_;
  std::vector<Watch> watches_;
  std::vector<std::pair<PyObject*, Py_ssize_t>> sizes_;
  std::vector<Read> reads_;
  struct Storage {
    int32_t slot;
    const void* address;
    bool requires_grad;
  };
  struct Items {
    PyObject* list;
    std::vector<PyObject*> values;
  };
  std::vector<Storage> storages_;
  std::vector<Items> items_;
  std::vector<std::pair<PyObject*, PyObject*>> cells_;
};

}  // namespace waterflow
