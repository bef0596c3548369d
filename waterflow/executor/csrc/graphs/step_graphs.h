// Captured steps as device graphs: one operation recorded at its planned addresses (RecordedCall), the graphs of one
// job's step (StepGraphs), and those of all of an engine's jobs (GraphCache).
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/cuda/cuda_device.h"
#include "waterflow/allocator/csrc/cuda/cuda_memory.h"
#include "waterflow/allocator/csrc/planned/placer.h"
#include "waterflow/executor/csrc/engine/step_run.h"
#include "waterflow/executor/csrc/program/program.h"

namespace waterflow {

// One operation at the addresses that it has in a step's plan: learnt without running it there, run again and again.
// Between device graphs it runs what they cannot hold: random operations, what reads such a one's seeds in host memory,
// and updates whose numbers change. In the stand-in for a GPU it is what a graph is made of.
class RecordedCall {
 public:
  // Puts into the frame what running the instruction would put there, asks `placer` for what `plan` says that it asks
  // for, and leaves bytes and generators as they are: what it returns is learnt from zeros elsewhere. Throws
  // std::runtime_error where that cannot be done.
  RecordedCall(const Program& program, int32_t index, Frame& frame, Placer* placer, const RequestPlan& plan);
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

  // Numbers that this step brings for it, as a learning rate.
  void take_numbers(const StepRun& run);
  // On the calling thread and its current stream. Its arguments must be what they were, at the same addresses; memory
  // that it asks for beside them is not planned.
  void run();

 private:
  struct Given {
    at::Tensor own, zeros;
  };
  at::Tensor zeros_like(const at::Tensor& own);
  const Given* given_to(const at::Tensor& learnt) const;
  void make_memory(const torch::jit::Stack& learnt, int32_t index, Placer* placer, const RequestPlan& plan);
  at::Tensor placed(const at::Tensor& learnt);

  const Instruction& instruction_;
  at::Generator random_;                             // stands in for the default one, where the operator takes none
  torch::jit::Stack arguments_;                      // none of them holds memory
  std::vector<std::pair<size_t, int32_t>> numbers_;  // arguments that are numbers, and their slots
  std::vector<at::Tensor> results_;                  // where they belong; undefined for what lies in an argument
  std::vector<at::Tensor> in_host_;  // what it returns there beside a device, as attention does with its seeds
  // While it is made: its arguments, and the memory of what it returns.
  std::vector<Given> given_;
  struct Fresh {
    const void* storage;
    int64_t bytes;
    c10::Device device;
    at::Tensor memory = {};
  };
  std::vector<Fresh> fresh_;
};

// One job's captured step as device graphs: each node group launched as a whole, without a call of the dispatcher.

// Where a lane's graphs are captured and launched. They are captured on a stream of their own, of which nobody else
// knows: other threads may record events on a lane's stream at any time, and wait for them.
struct GraphLane {
  std::shared_ptr<CudaDevice> device;
  StreamId stream = -1, capture = -1;
  // The same as torch knows them. None in the stand-in for a GPU, where graphs are made of calls of the host.
  std::optional<c10::Stream> current, capturing;
  cu::Stream capture_handle = nullptr;
  GraphPoolId pool{};
};

class RecordedCall;

// Why a step is not made of graphs, now or ever.
struct NotGraphed : std::runtime_error {
  explicit NotGraphed(const std::string& why, bool for_now = false) : std::runtime_error(why), for_now(for_now) {}
  bool for_now;
};

// Not thread-safe: a job's steps come one after the other.
class StepGraphs {
 public:
  // Captures the groups of a step whose memory `placer` serves, which is not active. Nothing is run, and nothing is
  // left of it where this throws: NotGraphed, or what the device or an operation says. `room`: bytes that copies of
  // inputs, and outputs, may take. `numbers_change`: those of updates may be others in each step.
  StepGraphs(GraphLane lane, StepRun& run, Placer& placer, int64_t room, bool numbers_change);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Whether these inputs can be brought to where the graphs read them, so that every kernel would be the same.
  bool takes(const StepRun& run) const;
  // A step begins: brings its inputs there, on the lane's stream.
  void fill(const StepRun& run);
  void launch(int32_t group);
  // Behind the last group: what the user gets, in memory of its own.
  std::vector<at::Tensor> outputs();
  bool launched() const { return launched_; }  // once, as a whole

  int64_t graphs() const { return graphs_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Piece {
    cu::Executable graph = nullptr;
    std::shared_ptr<RecordedCall> call;  // instead of a graph
  };
  struct HostNode;
  struct Input {
    int32_t slot;
    at::Tensor place;
  };

  bool on_host() const { return !lane_.current; }
  void place_inputs(const StepRun& run, int64_t room);
  void capture(StepRun& run, Placer& placer);
  void capture_group(StepRun& run, Placer& placer, int32_t begin, int32_t end);
  bool reads(const Instruction& instruction, const std::unordered_set<int32_t>& slots) const;
  void add_host_node(StepRun& run, int32_t index, Placer& placer);
  void open();
  void close();
  void give_back() noexcept;

  const GraphLane lane_;
  std::vector<Input> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::vector<Piece>> groups_;
  std::vector<std::shared_ptr<HostNode>> host_nodes_;
  std::unordered_set<int32_t> in_host_;  // slots of what calls between graphs return there: no kernel can read it
  std::unordered_set<int32_t> numbers_;  // slots of numbers that change
  std::exception_ptr failure_;           // of a call of the host
  bool open_ = false, launched_ = false;
  int64_t graphs_ = 0, bytes_ = 0;
};

// The device graphs of an engine's jobs: who has some, what they were captured with, and when they go.

struct GraphCounts {
  int64_t captured = 0, launched = 0, dropped = 0;  // graphs
  int64_t bytes = 0;                                // of inputs and outputs, now
};

// A step's graphs belong to one binding, one plan and one end of an arena at its addresses, and to the numbers that
// kernels got as arguments; where those have changed once, the updates that take them are called between graphs. The
// first step there is run as it is; the next one is captured, if that one asked for memory as planned, on the same
// thread, and nothing has changed since. Where anything has, its graphs are dropped. A capture is left to a later
// step where something goes on beside it for long. Thread-safe; steps of one job come one after the other.
class GraphCache {
 public:
  static constexpr size_t MOST_OF_A_JOB = 8;    // bindings and ends with graphs; the one that was used last goes
  static constexpr int32_t MOST_CAPTURES = 16;  // of one binding on one end
  // In a row, where requests were not as planned, or the capture was spoiled: after two steps, after four, and so on.
  static constexpr int32_t MOST_TRIES = 8;

  // `most`: bytes that copies of inputs, and outputs, of all graphs may take.
  GraphCache(std::vector<GraphLane> lanes, int64_t most);

  // Before a step's first group: its graphs, found or captured; null where it runs as it is.
  std::shared_ptr<StepGraphs> find(int32_t lane, StepRun& run, Placer& placer);
  // A step has run as it is, all of its memory as planned.
  void ran_as_planned(int32_t lane, const StepRun& run, const Placer& placer);
  // What there was of a job: to be let go without the engine's lock.
  std::vector<std::shared_ptr<void>> forget(int64_t job);
  // No step runs any more: what there was of all jobs. The device is let go.
  std::vector<std::shared_ptr<void>> close();

  GraphCounts counts() const;
  // Jobs whose steps stay as they are, and why; each reason is told once.
  std::vector<std::pair<int64_t, std::string>> take_refusals();

 private:
  // What a capture holds for, beside the end it was made on.
  struct Conditions {
    std::shared_ptr<const GroupPlan> plan;
    const char* base = nullptr;
    std::vector<bool> flags;
    std::vector<double> numbers;
    bool operator==(const Conditions& other) const = default;
  };
  struct Entry {
    int64_t job;
    std::weak_ptr<Frame> frame;
    int32_t lane;
    Conditions conditions;
    std::thread::id thread;  // what libraries make for a thread at its first call cannot be made in a capture
    std::shared_ptr<StepGraphs> graphs;
    int32_t captures = 0, tries = 0, postponed = 0;
    int32_t pause = 0;  // steps until the next try
    bool numbers_change = false, refused = false;
  };
  using Entries = std::list<std::shared_ptr<Entry>>;

  static Conditions conditions_of(const StepRun& run, const Placer& placer, const Entry& entry);
  std::shared_ptr<Entry> entry(int32_t lane, const StepRun& run) const;
  std::shared_ptr<StepGraphs> capture(Entry& entry, StepRun& run, Placer& placer);
  std::shared_ptr<StepGraphs> drop(Entry& entry);
  void refuse(Entry& entry, const std::string& why);

  std::vector<GraphLane> lanes_;
  const int64_t most_;
  mutable std::mutex lock_;
  Entries entries_;  // oldest first
  GraphCounts counts_;
  std::vector<std::pair<int64_t, std::string>> refusals_;
};

}  // namespace waterflow
