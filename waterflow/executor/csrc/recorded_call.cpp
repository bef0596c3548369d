#include "recorded_call.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "../../allocator/csrc/lane_allocator.h"

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
  if (fresh_.empty()) return;
  const int32_t first = plan.first(index), last = plan.first(index + 1), over = plan.end(index);
  std::vector<Fresh*> whose(static_cast<size_t>(last - first), nullptr);
  for (auto& one : fresh_) {
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
  const auto ask = [](int64_t bytes, c10::Device device) {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  };
  const LaneScope scope(placer);
  placer->instruction(index);
  std::vector<std::pair<int32_t, at::Tensor>> temporaries;  // by death
  for (int32_t i = first; i < last; ++i) {
    const auto& request = plan.request(i);
    std::erase_if(temporaries, [&](const auto& one) { return one.first < request.birth; });
    Fresh* const mine = whose[static_cast<size_t>(i - first)];
    auto memory = ask(request.bytes, mine != nullptr ? mine->device : fresh_[0].device);
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

}  // namespace waterflow
