#include "step_graphs.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "../../allocator/csrc/cuda_memory.h"
#include "../../allocator/csrc/lane_allocator.h"
#include "recorded_call.h"

namespace waterflow {
namespace {

// Kernels are chosen by the alignment of what they read, up to this many bytes.
constexpr uintptr_t ALIGNED_ON_DEVICE = 256, ALIGNED_ON_HOST = 64;

// One number that the host knows: a kernel would take it as an argument, a graph must read it from memory.
bool is_scalar(const at::Tensor& tensor) { return tensor.dim() == 0 && tensor.device().is_cpu(); }

// What is asked for on the stream of a capture lies in its pool.
class InPool {
 public:
  explicit InPool(const GraphLane& lane) : id_(lane.pool) {
    if (!lane.current) return;
    pools_ = &CudaMemory::of(lane.device->index()).graphs();
    const auto mine = [on = lane.capture_handle](CUstream_st* stream) { return stream == on; };
    pools_->begin(id_, mine, lane.device->granularity());
  }
  ~InPool() {
    if (pools_ == nullptr) return;
    pools_->end(id_);
    pools_->release(id_);
  }
  InPool(const InPool&) = delete;
  InPool& operator=(const InPool&) = delete;

 private:
  GraphPools* pools_ = nullptr;
  const GraphPoolId id_;
};

}  // namespace

struct StepGraphs::HostNode {
  StepGraphs* owner;
  RecordedCall call;
};

StepGraphs::StepGraphs(GraphLane lane, StepRun& run, Placer& placer, int64_t room) : lane_(std::move(lane)) {
  const std::string& why = run.frame->program->not_graphed();
  if (!why.empty()) throw NotGraphed(why);
  place_inputs(run, room);
  try {
    placer.begin(run.plan->requests);
    capture(run, placer);
    const bool kept = placer.any_live();
    const int64_t missed = placer.counts().missed;
    placer.finish();
    if (missed > 0) throw NotGraphed(std::to_string(missed) + " requests for memory were not as planned", true);
    if (kept) throw NotGraphed("it keeps memory that was planned to be given back");
    if (bytes_ > room) throw NotGraphed("its inputs and outputs take more than the reserve has for device graphs");
  } catch (...) {
    if (open_) lane_.device->abandon_capture(lane_.capture);
    run.frame->clear_intermediates();
    for (const auto& [slot, place] : inputs_) run.frame->slots[slot] = c10::IValue();
    placer.finish();
    give_back();
    throw;
  }
}

StepGraphs::~StepGraphs() { give_back(); }

void StepGraphs::give_back() noexcept {
  for (auto& group : groups_) {
    for (auto& piece : group) {
      if (piece.graph != nullptr) lane_.device->destroy(piece.graph);
    }
  }
  groups_.clear();
}

// -- inputs that change from step to step

void StepGraphs::place_inputs(const StepRun& run, int64_t room) {
  const c10::OptionalStreamGuard on(lane_.current);
  const LaneScope outside(nullptr);
  for (const auto& [slot, value] : run.inputs) {
    if (!value.isTensor()) continue;
    const auto& given = value.toTensor();
    auto options = given.options();
    if (lane_.current && is_scalar(given)) {
      options = options.device(lane_.current->device());
    } else if (lane_.current && given.device() != lane_.current->device()) {
      throw NotGraphed("its batch lies on " + given.device().str());
    }
    if (!given.is_non_overlapping_and_dense()) throw NotGraphed("a tensor of its batch has gaps");
    bytes_ += static_cast<int64_t>(given.nbytes());
    if (bytes_ > room) {
      throw NotGraphed("copies of its batch take " + std::to_string(bytes_) + " bytes; the reserve has " +
                       std::to_string(room) + " left for device graphs");
    }
    inputs_.push_back({slot, at::empty_strided(given.sizes(), given.strides(), options)});
  }
}

bool StepGraphs::takes(const StepRun& run) const {
  size_t next = 0;
  for (const auto& [slot, value] : run.inputs) {
    if (!value.isTensor()) continue;
    if (next == inputs_.size() || inputs_[next].slot != slot) return false;
    const auto& given = value.toTensor();
    const auto& place = inputs_[next++].place;
    if (given.dtype() != place.dtype() || given.sizes() != place.sizes() || given.strides() != place.strides()) {
      return false;
    }
    if (is_scalar(given)) continue;
    const uintptr_t aligned = on_host() ? ALIGNED_ON_HOST : ALIGNED_ON_DEVICE;
    if (given.device() != place.device() || reinterpret_cast<uintptr_t>(given.const_data_ptr()) % aligned != 0) {
      return false;
    }
  }
  return next == inputs_.size();
}

void StepGraphs::fill(const StepRun& run) {
  const c10::OptionalStreamGuard on(lane_.current);
  const LaneScope outside(nullptr);
  const BelowAutograd below;
  size_t next = 0;
  for (const auto& [slot, value] : run.inputs) {
    if (!value.isTensor()) continue;
    at::Tensor& place = inputs_[next++].place;
    if (is_scalar(value.toTensor())) {
      place.fill_(value.toTensor().item());  // an argument of the kernel that fills: nothing to wait for
    } else {
      place.copy_(value.toTensor(), true);
    }
  }
}

// -- capture

void StepGraphs::open() {
  if (open_) return;
  lane_.device->begin_capture(lane_.capture);
  open_ = true;
}

void StepGraphs::close() {
  if (!open_) return;
  open_ = false;
  groups_.back().push_back({lane_.device->end_capture(lane_.capture), nullptr});
  ++graphs_;
}

void StepGraphs::capture(StepRun& run, Placer& placer) {
  const InPool pool(lane_);
  Frame& frame = *run.frame;
  for (const auto& [slot, value] : run.inputs) frame.slots[slot] = value;
  for (const auto& [slot, place] : inputs_) frame.slots[slot] = place;
  int32_t begin = 0;
  for (const int32_t end : run.plan->ends) {
    groups_.emplace_back();
    capture_group(run, placer, begin, end);
    close();
    begin = end;
  }
  for (const int32_t slot : frame.program->outputs()) {
    const bool tensor = slot >= 0 && frame.slots[slot].isTensor();
    outputs_.push_back(tensor ? frame.slots[slot].toTensor() : at::Tensor());
    if (tensor) bytes_ += static_cast<int64_t>(outputs_.back().storage().nbytes());
  }
  frame.clear_intermediates();
  // What outlives the step must be held here, or a later launch would write to memory that is somebody else's.
  int64_t left = 0;
  for (int32_t i = 0; i < run.plan->requests->size(); ++i) left += run.plan->requests->request(i).offset == kUnplanned;
  for (size_t i = 0; i < outputs_.size(); ++i) left -= outputs_[i].defined() && !frame.program->shared()[i];
  if (left > 0) throw NotGraphed(std::to_string(left) + " blocks of memory outlive the step that it does not hand out");
}

void StepGraphs::capture_group(StepRun& run, Placer& placer, int32_t begin, int32_t end) {
  Frame& frame = *run.frame;
  const Program& program = *frame.program;
  for (int32_t i = begin; i < end; ++i) {
    if (program.instruction(i).draws) {
      close();
      const c10::OptionalStreamGuard on(lane_.current);
      groups_.back().push_back(
          {nullptr, std::make_shared<RecordedCall>(program, i, frame, &placer, *run.plan->requests)});
    } else if (on_host()) {
      add_host_node(run, i, placer);
    } else {
      open();
      const c10::OptionalStreamGuard on(lane_.capturing);
      const LaneScope scope(&placer);
      program.run(frame, i, i + 1, &placer);
    }
  }
}

void StepGraphs::add_host_node(StepRun& run, int32_t index, Placer& placer) {
  Frame& frame = *run.frame;
  const Program& program = *frame.program;
  const auto& instruction = program.instruction(index);
  if (!instruction.op) {
    if (const auto& alias = instruction.alias) {
      const auto& source = frame.slots[alias->source].toTensor();
      if (!strides_match(source, alias->expected)) throw NotGraphed("a view is of other strides");
    }
    program.run(frame, index, index + 1, &placer);
    return;
  }
  open();
  host_nodes_.emplace_back(new HostNode{this, {program, index, frame, &placer, *run.plan->requests}});
  const auto call = [](void* data) {
    auto& node = *static_cast<HostNode*>(data);
    if (node.owner->failure_) return;
    try {
      node.call.run();
    } catch (...) {
      node.owner->failure_ = std::current_exception();
    }
  };
  lane_.device->launch_host(lane_.capture, call, host_nodes_.back().get());
}

// -- launches

void StepGraphs::launch(int32_t group) {
  for (const auto& piece : groups_[static_cast<size_t>(group)]) {
    if (piece.call) {
      piece.call->run();
      continue;
    }
    lane_.device->launch(piece.graph, lane_.stream);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

std::vector<at::Tensor> StepGraphs::outputs() const {
  std::vector<at::Tensor> copies;
  copies.reserve(outputs_.size());
  for (const auto& output : outputs_) copies.push_back(output.defined() ? output.detach().clone() : output);
  return copies;
}

}  // namespace waterflow
