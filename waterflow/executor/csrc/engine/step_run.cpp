#include "waterflow/executor/csrc/engine/step_run.h"

#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/allocator/csrc/cuda/captures.h"
#include "waterflow/executor/csrc/graphs/step_graphs.h"

namespace waterflow {

void StepRun::let_go() {
  if (!frame) return;
  graphs.reset();
  for (const auto& [slot, value] : inputs) frame->slots[slot] = c10::IValue();
  inputs.clear();
  frame->clear_intermediates();
  frame->pass_on_sizes(true);
}

void StepRun::call() {
  const pybind11::gil_scoped_acquire acquire;
  const Held called = std::move(work);
  PyObject* callable = called.first();
  if (callable == nullptr || pybind11::reinterpret_steal<pybind11::object>(PyObject_CallNoArgs(callable))) return;
  // Not in the C++ exception, where the garbage collector would not find what its frames hold.
  const pybind11::error_already_set raised;
  if (raised.trace()) PyException_SetTraceback(raised.value().ptr(), raised.trace().ptr());
  told(raised.value().ptr());
  throw std::runtime_error("Python's callable has raised");
}

void StepRun::finish() {
  const BesideCaptures beside(loads_kernels());
  const c10::OptionalStreamGuard current(stream);
  if (graphs) {
    frame->mark_written();
  } else {
    outputs = frame->finish(stream ? placer : nullptr);
  }
}

bool StepRun::loads_kernels() const { return stream && !(graphs && graphs->launched()); }

void StepRun::behind_caller(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  caller.emplace(device.type());
  caller->record(guard.getStream(device));
}

void StepRun::on_stream(std::optional<c10::Stream> given) {
  stream = given;
  if (caller && stream) caller->block(*stream);
}

void StepRun::fill() {
  if (!frame) return;
  frame->pass_on_sizes(false);
  for (const auto& [slot, value] : inputs) frame->slots[slot] = value;
  if (profile) profiled = {std::vector<InstructionProfile>(frame->program->size()), {}, stream};
}

void StepRun::run_group(int32_t group) {
  const BesideCaptures beside(loads_kernels());
  LaneScope scope(in_arenas && !graphs ? placer : nullptr, in_arenas);
  c10::OptionalStreamGuard current(stream);
  Denormals as_caller(denormals);
  if (graphs) {
    if (group == 0) graphs->fill(*this);
    graphs->launch(group);
    if (group + 1 == plan->heights.groups()) outputs = graphs->outputs();
    return;
  }
  if (!frame) return call();
  const int32_t begin = group == 0 ? 0 : plan->ends[group - 1];
  const int32_t end = plan->ends[group];
  if (profile) {
    frame->program->run_profiled(*frame, begin, end, profiled);
  } else {
    // What is issued to a GPU takes no time there before it is done: a pace is kept between groups.
    frame->program->run(*frame, begin, end, placer, stream ? nullptr : pace);
  }
}

GroupPlan::GroupPlan(std::vector<int32_t> ends_, Heights heights_)
    : ends(std::move(ends_)), heights(std::move(heights_)) {
  if (static_cast<int32_t>(ends.size()) != heights.groups()) {
    throw std::invalid_argument("a plan has " + std::to_string(ends.size()) + " groups and heights for " +
                                std::to_string(heights.groups()));
  }
  if (!std::is_sorted(ends.begin(), ends.end())) throw std::invalid_argument("groups must follow one another");
}

void run_alone(StepRun& run) {
  run.in_arenas = on_lane_here();  // as part of what a lane runs, an audit
  try {
    run.fill();
    for (int32_t group = 0; group < run.plan->heights.groups(); ++group) run.run_group(group);
    if (run.frame) run.finish();
    run.let_go();
  } catch (const NodeError& error) {
    run.failed_node = error.node;
    run.error = std::current_exception();
    run.let_go();
  } catch (...) {
    run.error = std::current_exception();
    run.let_go();
  }
  run.done = true;
}

void set_threads_here(int32_t threads) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  // torch sets a thread's number when the thread first asks for it, over whatever was set before: ask first.
  at::get_num_threads();
  int before = 0;
  // A fresh thread takes the number that threads start with; setting ours changes that number: put it back.
  std::thread([&] { before = at::get_num_threads(); }).join();
  at::set_num_threads(threads);
  std::thread([&] {
    at::get_num_threads();
    at::set_num_threads(before);
  }).join();
}

}  // namespace waterflow
