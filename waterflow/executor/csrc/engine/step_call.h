// Steps of which everything was decided at an earlier step of their kind: one call from Python runs one, or several.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "waterflow/executor/csrc/engine/engine.h"
#include "waterflow/executor/csrc/program/bound_program.h"
#include "waterflow/executor/csrc/program/held.h"

namespace waterflow {

// Waits for a step without the interpreter lock. Raises what a signal's handler raises.
void wait_done(Engine& engine, const std::shared_ptr<StepRun>& run);

// What a step that is done returns, as Python's tensors. Raises what the step raised.
pybind11::list outputs(StepRun& run);

// Raised by one thread for another to see.
struct Flag {
  std::atomic<bool> raised{false};
};

// Needs the interpreter lock in every call.
class StepCall {
 public:
  // Addresses from begin to end, by begin; no end lies before an earlier one.
  using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

  // For batches in the form of `batch`, and settings with the key `ambient`. The step reads the tensors at
  // `places` of the batch from `slots`; none of these may lie in the memory `changed`. It runs on the calling thread
  // where there is no `engine`, and where that thread has as many intra-op `threads` as a lane.
  StepCall(const pybind11::object& binding, std::shared_ptr<const GroupPlan> plan, std::vector<int32_t> slots,
           std::vector<int32_t> places, const pybind11::object& batch, const pybind11::bytes& ambient,
           std::vector<Ranges> changed, int32_t threads, Engine::Id job, std::shared_ptr<Engine> engine);

  // Whether a batch of such a form can be recognized at all: tensors in a tuple, a list or a dict, or one tensor.
  bool knows_form() const { return type_ != nullptr; }
  // Run a step. Returns what it returns; None, and does nothing, where something is other than it was.
  pybind11::object run(const pybind11::object& batch);
  // Run steps on these batches, one after the other, and append their losses, until the flag is raised or something is
  // other than it was.
  void run_all(const pybind11::sequence& batches, const Flag& flag, pybind11::list& losses);
  // Submit a step behind `before`; None, and does nothing, where something is other than it was.
  // `by_caller`: the calling thread waits for it next, and may run it.
  std::shared_ptr<StepRun> submit(const pybind11::object& batch, bool by_caller,
                                  const std::shared_ptr<StepRun>& before);
  // The operation at which the last step failed.
  int32_t failed_node() const { return failed_node_; }
  // Requests for memory of the steps since the last look, as planned and past the plan.
  std::pair<int64_t, int64_t> take_requests() { return std::exchange(requests_, {0, 0}); }

  int visit(visitproc visit, void* arg) const { return held_.visit(visit, arg); }
  void clear();

 private:
  std::shared_ptr<StepRun> prepare(PyObject* batch);
  std::shared_ptr<StepRun> done(PyObject* batch);
  bool submitted(const std::shared_ptr<StepRun>& run, const std::shared_ptr<StepRun>& before = nullptr);
  bool items_of(PyObject* batch);
  bool lies_in_changed(const at::Tensor& tensor) const;

  Held held_;  // the binding, and the keys of a dict
  Binding* binding_;
  std::shared_ptr<const GroupPlan> plan_;
  const std::vector<int32_t> slots_, places_;
  const std::vector<Ranges> changed_;
  const std::shared_ptr<Engine> engine_;
  const Engine::Id job_;
  const int32_t threads_;
  PyTypeObject* type_ = nullptr;  // of the batch, one of Python's or torch's own
  std::vector<PyObject*> keys_;
  const std::string ambient_;
  std::string form_;
  c10::DeviceType device_ = c10::kCPU;
  int32_t failed_node_ = -1;
  std::pair<int64_t, int64_t> requests_{0, 0};
  // Of the call at hand.
  std::vector<PyObject*> items_;
  std::string now_;
};

}  // namespace waterflow
