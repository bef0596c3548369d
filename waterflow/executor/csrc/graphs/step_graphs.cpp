#include "waterflow/executor/csrc/graphs/step_graphs.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/allocator/csrc/cuda/captures.h"
#include "waterflow/allocator/csrc/cuda/cuda_memory.h"

namespace waterflow {
namespace {

at::Tensor view_of(const at::Tensor& like, c10::Storage storage, int64_t offset) {
  auto view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), like.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return view;
}

bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

// The same bytes under a tensor that does not hold them.
at::Tensor unowned(const at::Tensor& tensor) {
  if (!tensor.defined() || is_number(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    at::DataPtr(storage.mutable_data(), tensor.device()), nullptr, false);
  return view_of(tensor, std::move(same), tensor.storage_offset());
}

using Change = std::function<at::Tensor(const at::Tensor&)>;

// A value with other tensors, those of lists, too.
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

torch::jit::Stack changed(const torch::jit::Stack& stack, const Change& change) {
  torch::jit::Stack made;
  made.reserve(stack.size());
  for (const auto& value : stack) made.push_back(changed(value, change));
  return made;
}

void check_strides(const ExpectedStrides& expected, const c10::IValue& value, const Instruction& instruction) {
  const bool element = expected.element >= 0;
  const at::Tensor tensor = element ? value.toTensorList().get(expected.element) : value.toTensor();
  if (strides_match(tensor, expected.strides)) return;
  throw std::runtime_error(instruction.op->schema().name() + " is given other strides than were captured");
}

// Where an operator draws that is called like this.
c10::Device device_of(const torch::jit::Stack& stack) {
  for (const auto& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) return value.toTensor().device();
    if (value.isDevice()) return value.toDevice();
  }
  return c10::DeviceType::CPU;
}

}  // namespace

at::Tensor RecordedCall::zeros_like(const at::Tensor& own) {
  if (!own.defined() || is_number(own)) return own;
  int64_t extent = own.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; i < own.dim() && extent > 0; ++i) extent += (own.size(i) - 1) * own.stride(i);
  const auto memory = at::zeros({extent}, at::TensorOptions().dtype(own.dtype()).device(own.device()));
  auto zeros = view_of(own, memory.storage(), 0);
  given_.push_back({own, zeros});
  return zeros;
}

const RecordedCall::Given* RecordedCall::given_to(const at::Tensor& learnt) const {
  for (const auto& given : given_) {
    if (learnt.unsafeGetTensorImpl() == given.zeros.unsafeGetTensorImpl()) return &given;
    if (learnt.storage().is_alias_of(given.zeros.storage())) return &given;
  }
  return nullptr;
}

// All requests of the instruction in their order, as when it was profiled, so that each finds its place. Those of its
// results are the ones of their size that outlive it, if there are such.
void RecordedCall::make_memory(const torch::jit::Stack& learnt, int32_t index, Placer* placer,
                               const RequestPlan& plan) {
  for (const auto& value : learnt) {
    changed(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || given_to(tensor) != nullptr) return tensor;
      const void* const storage = tensor.storage().unsafeGetStorageImpl();
      for (const auto& one : fresh_) {
        if (one.storage == storage) return tensor;
      }
      fresh_.push_back({storage, static_cast<int64_t>(tensor.storage().nbytes()), tensor.device()});
      return tensor;
    });
  }
  const auto ask = [](int64_t bytes, c10::Device device) {
    // at::empty fills what it returns under deterministic algorithms, and here may still be a neighbour's memory.
    const auto none = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
    return at::detail::empty_generic({bytes}, none.storage().allocator(), none.key_set(), at::kByte, std::nullopt);
  };
  if (placer->memory() == PlacedIn::device) {
    for (auto& one : fresh_) {
      if (one.device.is_cpu()) in_host_.push_back(one.memory = ask(one.bytes, one.device));
    }
  }
  const auto planned =
      std::find_if(fresh_.begin(), fresh_.end(), [](const auto& one) { return !one.memory.defined(); });
  if (planned == fresh_.end()) return;
  const int32_t first = plan.first(index), last = plan.first(index + 1), over = plan.end(index);
  std::vector<Fresh*> whose(static_cast<size_t>(last - first), nullptr);
  for (auto& one : fresh_) {
    if (one.memory.defined()) continue;
    Fresh** found = nullptr;
    for (int32_t i = first; i < last; ++i) {
      const auto& request = plan.request(i);
      if (request.bytes != one.bytes || whose[static_cast<size_t>(i - first)] != nullptr) continue;
      const bool outlives = request.offset == kUnplanned || request.death > over;
      if (outlives || found == nullptr) found = &whose[static_cast<size_t>(i - first)];
      if (outlives) break;
    }
    if (found != nullptr) *found = &one;
  }
  const LaneScope scope(placer);
  placer->instruction(index);
  std::vector<std::pair<int32_t, at::Tensor>> temporaries;  // by death
  for (int32_t i = first; i < last; ++i) {
    const auto& request = plan.request(i);
    std::erase_if(temporaries, [&](const auto& one) { return one.first < request.birth; });
    Fresh* const mine = whose[static_cast<size_t>(i - first)];
    auto memory = ask(request.bytes, mine != nullptr ? mine->device : planned->device);
    if (mine != nullptr) {
      mine->memory = std::move(memory);
    } else {
      temporaries.emplace_back(request.death, std::move(memory));
    }
  }
  for (auto& one : fresh_) {
    if (!one.memory.defined()) one.memory = ask(one.bytes, one.device);
  }
}

at::Tensor RecordedCall::placed(const at::Tensor& learnt) {
  results_.emplace_back();
  if (!learnt.defined()) return learnt;
  if (const Given* given = given_to(learnt)) {
    if (learnt.unsafeGetTensorImpl() == given->zeros.unsafeGetTensorImpl()) return given->own;
    return view_of(learnt, given->own.storage(), given->own.storage_offset() + learnt.storage_offset());
  }
  const void* const storage = learnt.storage().unsafeGetStorageImpl();
  const auto one = std::find_if(fresh_.begin(), fresh_.end(), [&](const auto& f) { return f.storage == storage; });
  const auto made = view_of(learnt, one->memory.storage(), learnt.storage_offset());
  results_.back() = unowned(made);
  return made;
}

RecordedCall::RecordedCall(const Program& program, int32_t index, Frame& frame, Placer* placer, const RequestPlan& plan)
    : instruction_(program.instruction(index)) {
  BelowAutograd below;
  Program::gather(instruction_, frame);
  for (const auto& expected : instruction_.expected) {
    check_strides(expected, frame.stack[expected.argument], instruction_);
  }
  arguments_ = changed(frame.stack, unowned);
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto& given = instruction_.arguments[i];
    if (given.kind == Argument::Kind::slot && arguments_[i].isDouble()) numbers_.emplace_back(i, given.slot);
  }
  if (instruction_.op->schema().returns().empty()) {  // nothing to learn
    Program::take_results(instruction_, frame);
    return;
  }
  torch::jit::Stack stack = changed(frame.stack, [&](const at::Tensor& own) {
    LaneScope outside(nullptr);
    return zeros_like(own);
  });
  if (instruction_.draws) {
    for (auto& value : stack) {
      if (value.isGenerator()) value = value.toGenerator().clone();
    }
    if (instruction_.draws_by_default) random_ = frame.generator;
  }
  {
    LaneScope outside(nullptr);
    std::optional<GeneratorSwap> swap;
    if (instruction_.draws) {
      const auto& drawn = random_.defined() ? random_ : at::globalContext().defaultGenerator(device_of(stack));
      swap.emplace(drawn.clone());
    }
    instruction_.op->callBoxed(stack);
  }
  make_memory(stack, index, placer, plan);
  frame.stack = changed(stack, [&](const at::Tensor& learnt) { return placed(learnt); });
  stack.clear();
  given_.clear();
  fresh_.clear();
  Program::take_results(instruction_, frame);
}

void RecordedCall::take_numbers(const StepRun& run) {
  for (const auto& [slot, value] : run.inputs) {
    for (const auto& [argument, from] : numbers_) {
      if (from == slot) arguments_[argument] = value;
    }
  }
}

void RecordedCall::run() {
  BelowAutograd below;
  torch::jit::Stack stack = arguments_;
  std::optional<GeneratorSwap> swap;
  if (random_.defined()) swap.emplace(random_);
  instruction_.op->callBoxed(stack);
  size_t next = 0;
  for (const auto& value : stack) {
    changed(value, [&](const at::Tensor& made) {
      const at::Tensor& place = results_[next++];
      if (place.defined()) place.copy_(made);
      return made;
    });
  }
}

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

StepGraphs::StepGraphs(GraphLane lane, StepRun& run, Placer& placer, int64_t room, bool numbers_change)
    : lane_(std::move(lane)) {
  for (const auto& [slot, value] : run.inputs) {
    if (numbers_change && value.isDouble()) numbers_.insert(slot);
  }
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
  } catch (const std::exception& error) {
    const auto* const failed = dynamic_cast<const CudaError*>(&error);
    // Whether the driver has ended the capture.
    const bool spoiled =
        open_ ? lane_.device->abandon_capture(lane_.capture) : failed != nullptr && failed->of_capture();
    if (const auto take_runtime_error = lane_.device->driver().take_runtime_error) take_runtime_error();
    run.frame->clear_intermediates();
    for (const auto& [slot, place] : inputs_) run.frame->slots[slot] = c10::IValue();
    placer.finish();
    give_back();
    if (!spoiled) throw;
    throw NotGraphed(std::string("something spoils its captures, beside them or in them: ") + error.what(), true);
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
  if (numbers_.empty()) return;
  for (const auto& group : groups_) {
    for (const auto& piece : group) {
      if (piece.call) piece.call->take_numbers(run);
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
    const auto& instruction = program.instruction(i);
    if (instruction.draws || reads(instruction, in_host_) || reads(instruction, numbers_)) {
      close();
      const c10::OptionalStreamGuard on(lane_.current);
      groups_.back().push_back(
          {nullptr, std::make_shared<RecordedCall>(program, i, frame, &placer, *run.plan->requests)});
      for (const int32_t slot : instruction.results) {
        const bool there = !on_host() && slot >= 0 && frame.slots[slot].isTensor();
        if (there && frame.slots[slot].toTensor().defined() && frame.slots[slot].toTensor().is_cpu())
          in_host_.insert(slot);
      }
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

bool StepGraphs::reads(const Instruction& instruction, const std::unordered_set<int32_t>& slots) const {
  return std::any_of(instruction.arguments.begin(), instruction.arguments.end(), [&](const Argument& argument) {
    return argument.kind == Argument::Kind::slot && slots.count(argument.slot) > 0;
  });
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

std::vector<at::Tensor> StepGraphs::outputs() {
  launched_ = true;
  std::vector<at::Tensor> copies;
  copies.reserve(outputs_.size());
  for (const auto& output : outputs_) copies.push_back(output.defined() ? output.detach().clone() : output);
  return copies;
}

using Guard = std::lock_guard<std::mutex>;

GraphCache::Conditions GraphCache::conditions_of(const StepRun& run, const Placer& placer, const Entry& entry) {
  Conditions made{run.plan, placer.base()};
  for (const auto& [slot, value] : run.inputs) {
    if (value.isBool()) made.flags.push_back(value.toBool());
    if (value.isDouble() && !entry.numbers_change) made.numbers.push_back(value.toDouble());
  }
  return made;
}

GraphCache::GraphCache(std::vector<GraphLane> lanes, int64_t most) : lanes_(std::move(lanes)), most_(most) {
  // Pools stay from one capture to the next, for they go with a wait for the whole device. All that lies there
  // is what steps hand out.
  for (const auto& lane : lanes_) {
    if (!lane.current) continue;
    auto& pools = CudaMemory::of(lane.device->index()).graphs();
    pools.begin(lane.pool, [](CUstream_st*) { return false; }, lane.device->granularity());
    pools.end(lane.pool);
  }
}

std::shared_ptr<GraphCache::Entry> GraphCache::entry(int32_t lane, const StepRun& run) const {
  for (const auto& one : entries_) {
    if (one->lane == lane && one->job == run.job && one->frame.lock() == run.frame) return one;
  }
  return nullptr;
}

std::shared_ptr<StepGraphs> GraphCache::drop(Entry& entry) {
  if (entry.graphs) {
    counts_.dropped += entry.graphs->graphs();
    counts_.bytes -= entry.graphs->bytes();
  }
  return std::exchange(entry.graphs, nullptr);
}

void GraphCache::refuse(Entry& entry, const std::string& why) {
  entry.refused = true;
  const std::pair<int64_t, std::string> told{entry.job, why};
  if (std::find(refusals_.begin(), refusals_.end(), told) == refusals_.end()) refusals_.push_back(told);
}

std::shared_ptr<StepGraphs> GraphCache::find(int32_t lane, StepRun& run, Placer& placer) {
  std::shared_ptr<Entry> mine;
  std::shared_ptr<StepGraphs> dropped;  // destroyed without the lock
  {
    Guard guard(lock_);
    mine = entry(lane, run);
    if (!mine || mine->refused || mine->conditions.plan == nullptr) return nullptr;
    entries_.remove(mine);
    entries_.push_back(mine);
    if (const auto now = conditions_of(run, placer, *mine); !(mine->conditions == now)) {
      dropped = drop(*mine);
      mine->numbers_change = mine->numbers_change || mine->conditions.numbers != now.numbers;
      mine->conditions = {};
      return nullptr;
    }
    if (!mine->graphs && mine->pause > 0) {
      --mine->pause;
      return nullptr;
    }
  }
  if (!mine->graphs && mine->thread != std::this_thread::get_id()) return nullptr;
  if (!mine->graphs && !capture(*mine, run, placer)) return nullptr;
  if (!mine->graphs->takes(run)) return nullptr;
  Guard guard(lock_);
  counts_.launched += mine->graphs->graphs();
  return mine->graphs;
}

std::shared_ptr<StepGraphs> GraphCache::capture(Entry& entry, StepRun& run, Placer& placer) {
  int64_t room = 0;
  {
    Guard guard(lock_);
    const std::string& why = run.frame->program->not_graphed();
    if (!why.empty()) refuse(entry, why);
    if (entry.captures == MOST_CAPTURES) {
      refuse(entry, "what its graphs hold for has changed " + std::to_string(MOST_CAPTURES) + " times");
    }
    if (entry.refused) return nullptr;
    room = most_ - counts_.bytes;
  }
  const Capturing alone;
  if (!alone) {
    Guard guard(lock_);
    entry.pause = 1 << std::min(++entry.postponed, MOST_TRIES);
    return nullptr;
  }
  try {
    auto made = std::make_shared<StepGraphs>(lanes_.at(static_cast<size_t>(entry.lane)), run, placer, room,
                                             entry.numbers_change);
    Guard guard(lock_);
    if (counts_.bytes + made->bytes() > most_) throw NotGraphed("another job has taken what the reserve has for them");
    entry.graphs = made;
    entry.tries = 0;
    ++entry.captures;
    counts_.captured += made->graphs();
    counts_.bytes += made->bytes();
    return made;
  } catch (const NotGraphed& why) {
    Guard guard(lock_);
    if (!why.for_now || ++entry.tries == MOST_TRIES) refuse(entry, why.what());
    entry.pause = 1 << entry.tries;
  } catch (const c10::Error& why) {
    Guard guard(lock_);
    refuse(entry, why.what_without_backtrace());
  } catch (const std::exception& why) {
    Guard guard(lock_);
    refuse(entry, why.what());
  }
  return nullptr;
}

void GraphCache::ran_as_planned(int32_t lane, const StepRun& run, const Placer& placer) {
  std::vector<std::shared_ptr<void>> dropped;  // destroyed without the lock
  Guard guard(lock_);
  auto mine = entry(lane, run);
  if (!mine) {
    mine = std::make_shared<Entry>(Entry{run.job, run.frame, lane});
    entries_.push_back(mine);
    std::vector<std::shared_ptr<Entry>> gone;
    size_t kept = 0;
    for (auto one = entries_.rbegin(); one != entries_.rend(); ++one) {
      if ((*one)->job == run.job && ((*one)->frame.expired() || ++kept > MOST_OF_A_JOB)) gone.push_back(*one);
    }
    for (const auto& one : gone) {
      dropped.push_back(drop(*one));
      entries_.remove(one);
    }
  }
  if (mine->graphs) return;
  mine->conditions = conditions_of(run, placer, *mine);
  mine->thread = std::this_thread::get_id();
}

std::vector<std::shared_ptr<void>> GraphCache::forget(int64_t job) {
  std::vector<std::shared_ptr<void>> gone;
  Guard guard(lock_);
  for (auto one = entries_.begin(); one != entries_.end();) {
    if ((*one)->job != job) {
      ++one;
      continue;
    }
    gone.push_back(drop(**one));
    gone.push_back(*one);
    one = entries_.erase(one);
  }
  return gone;
}

std::vector<std::shared_ptr<void>> GraphCache::close() {
  std::vector<std::shared_ptr<void>> gone;
  Guard guard(lock_);
  for (const auto& one : entries_) gone.push_back(drop(*one));
  entries_.clear();
  for (const auto& lane : lanes_) {
    if (lane.current) {
      CudaMemory::of(lane.device->index()).graphs().release(lane.pool);
    } else {
      lane.device->remove_stream(lane.capture);
    }
  }
  lanes_.clear();
  return gone;
}

GraphCounts GraphCache::counts() const {
  Guard guard(lock_);
  return counts_;
}

std::vector<std::pair<int64_t, std::string>> GraphCache::take_refusals() {
  Guard guard(lock_);
  return std::exchange(refusals_, {});
}

}  // namespace waterflow
