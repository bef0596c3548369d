// One job's captured step as device graphs: each node group launched as a whole, without a call of the dispatcher.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../allocator/csrc/cuda_device.h"
#include "../../allocator/csrc/graph_pools.h"
#include "../../allocator/csrc/placer.h"
#include "step_run.h"

namespace waterflow {

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
  // inputs, and outputs, may take.
  StepGraphs(GraphLane lane, StepRun& run, Placer& placer, int64_t room);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Whether these inputs can be brought to where the graphs read them, so that every kernel would be the same.
  bool takes(const StepRun& run) const;
  // A step begins: brings its inputs there, on the lane's stream.
  void fill(const StepRun& run);
  void launch(int32_t group);
  // Behind the last group: what the user gets, in memory of its own.
  std::vector<at::Tensor> outputs() const;

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
  void add_host_node(StepRun& run, int32_t index, Placer& placer);
  void open();
  void close();
  void give_back() noexcept;

  const GraphLane lane_;
  std::vector<Input> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::vector<Piece>> groups_;
  std::vector<std::shared_ptr<HostNode>> host_nodes_;
  std::exception_ptr failure_;  // of a call of the host
  bool open_ = false;
  int64_t graphs_ = 0, bytes_ = 0;
};

}  // namespace waterflow
