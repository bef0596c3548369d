// One step of one job: what the engine runs, group by group.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/device.h"
#include "waterflow/allocator/csrc/planned/placer.h"
#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/program/guards.h"
#include "waterflow/executor/csrc/engine/throttle.h"
#include "waterflow/executor/csrc/program/program.h"

namespace waterflow {

// The groups of one captured step: where each ends in its program, and what it holds.
struct GroupPlan {
  GroupPlan(std::vector<int32_t> ends, Heights heights);
  std::vector<int32_t> ends;
  Heights heights;
  int64_t expected_ns = 0;                      // of one step alone; 0 where it was not measured
  std::shared_ptr<const RequestPlan> requests;  // where its memory lies; null where that is not planned
};

struct Cancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Lane;       // of the engine
class StepGraphs;  // step_graphs.h

// One step of one job on its way through the engine.
struct StepRun {
  std::shared_ptr<const GroupPlan> plan;
  // A captured step ...
  std::shared_ptr<Frame> frame;
  std::vector<std::pair<int32_t, c10::IValue>> inputs;  // slots to fill when it starts
  bool profile = false;
  StepProfile profiled;
  // ... or a callable of Python's, which is one group, until it is called.
  Held work;
  Held told;  // what Python is told of the step: the list of its outputs, or what the callable has raised
  const uint32_t denormals = denormals_here();  // as on the thread that made it, wherever it runs

  // On a GPU: it runs behind all that the calling thread has issued on its current stream of the device ...
  void behind_caller(c10::Device device);
  // ... on this stream, from now on; none elsewhere.
  void on_stream(std::optional<c10::Stream> stream);
  void fill();                    // puts the inputs into their slots
  void run_group(int32_t group);  // on the calling thread
  void call();                    // the callable
  void finish();                  // behind the last group, and on its stream: what the user gets
  void let_go();                  // of batches, values that change from step to step, and all that is left in between
  bool may_be_planned() const { return plan->requests != nullptr && frame && !profile; }
  bool loads_kernels() const;  // at first calls, as all may be but the launch of graphs that were launched before
  int visit(visitproc visit, void* arg) const { return work.visit(visit, arg) || told.visit(visit, arg); }
  void clear() { work.clear(), told.clear(); }

  std::shared_ptr<StepGraphs> graphs;  // launched instead of the program's operations
  std::optional<c10::Event> caller;
  std::optional<c10::Stream> stream;
  bool detached = false;        // its memory has left the arena: somebody held what was planned to be gone
  bool in_arenas = false;       // the engine has arenas: what is asked outside of plans comes from the pool
  Placer* placer = nullptr;     // of the lane's end, where its memory is planned
  Pace* pace = nullptr;         // of an opportunistic job
  std::vector<EventId> issued;  // on a device that runs behind the host: an event behind each group
  std::exception_ptr failure;   // of a group there
  PlacedCounts placed;

  std::vector<at::Tensor> outputs;
  std::exception_ptr error;
  int32_t failed_node = -1;
  bool done = false;
  int64_t job = -1;
  bool by_caller = false;  // its caller waits for it at once, and may run it
  Lane* lane = nullptr;    // where the caller is to run it now
  int64_t waited_ns = 0;   // for room, at all of its groups
  int64_t busy_ns = 0;     // on the lane, its groups running
  std::condition_variable finished;
};

// Sets the intra-op threads of the calling thread, and of no other.
void set_threads_here(int32_t threads);

// A captured step, run on the calling thread with no engine.
void run_alone(StepRun& run);

}  // namespace waterflow
