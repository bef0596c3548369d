#include "waterflow/executor/csrc/program/program.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <unordered_map>

#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/executor/csrc/kernels/small_gemm.h"

namespace waterflow {
namespace {

std::unordered_map<std::string, DirectCall>& calls() {
  static std::unordered_map<std::string, DirectCall> made;
  return made;
}

#ifdef WATERFLOW_TEST_HOOKS
std::string wrong;  // the kernel's name
DirectCall right_call = nullptr;

at::Tensor wrong_call(const c10::IValue* const* arguments) {
  auto result = right_call(arguments);
  if (result.numel() > 0) *static_cast<unsigned char*>(result.data_ptr()) ^= 1;
  return result;
}
#endif

}  // namespace

#ifdef WATERFLOW_TEST_HOOKS
void plant_wrong_bit(const std::string& name) {
  const auto found = calls().find(name);
  if (!name.empty() && found == calls().end()) throw std::invalid_argument("no kernel is called '" + name + "'");
  if (!name.empty()) right_call = found->second;
  wrong = name;
}
#endif

DirectCall find_direct_call(const std::string& name) {
#ifdef WATERFLOW_TEST_HOOKS
  if (!wrong.empty() && name == wrong) return &wrong_call;
#endif
  const auto found = calls().find(name);
  return found == calls().end() ? nullptr : found->second;
}

RegisterDirectCall::RegisterDirectCall(std::string name, DirectCall call) { calls().emplace(std::move(name), call); }

bool strides_match(const at::Tensor& tensor, const std::vector<int64_t>& expected) {
  const auto strides = tensor.strides();
  const auto sizes = tensor.sizes();
  if (strides.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (strides[i] != expected[i] && sizes[i] > 1) return false;
  }
  return true;
}

namespace {

at::Tensor with_strides(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  auto copy = at::empty_strided(tensor.sizes(), strides, tensor.options());
  copy._set_conj(tensor.is_conj());  // views behind it were captured with these bits
  copy._set_neg(tensor.is_neg());
  copy.copy_(tensor);
  return copy;
}

void match_strides(const ExpectedStrides& expected, c10::IValue& value) {
  if (expected.element < 0) {
    if (!value.isTensor() || strides_match(value.toTensor(), expected.strides)) return;
    value = with_strides(value.toTensor(), expected.strides);
    return;
  }
  auto list = value.toTensorList();
  at::Tensor element = list.get(expected.element);
  if (!strides_match(element, expected.strides)) list.set(expected.element, with_strides(element, expected.strides));
}

at::Tensor make_alias(const Alias& alias, const at::Tensor& given) {
  const at::Tensor source = strides_match(given, alias.expected) ? given : with_strides(given, alias.expected);
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(source.storage()),
                                                       source.key_set(), source.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes, alias.strides, source.storage_offset() + alias.offset);
  return view;
}

[[noreturn]] void fail(int32_t index, Frame& frame, const std::exception& error) {
  frame.stack.clear();
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  const std::string what = torchs != nullptr ? torchs->what_without_backtrace() : error.what();
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) throw NodeIndexError(index, what);
  throw NodeError(index, what);
}

}  // namespace

at::Tensor wrapped_number(const at::Scalar& number) {
  auto tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

void Program::execute(const Instruction& instruction, Frame& frame) const {
  auto& stack = frame.stack;
  auto& slots = frame.slots;
  if (!instruction.op) {
    if (const auto& alias = instruction.alias) {
      slots[instruction.results[0]] = make_alias(*alias, slots[alias->source].toTensor());
    }
    for (auto slot : instruction.drops) slots[slot] = c10::IValue();
    return;
  }
  if (instruction.direct != nullptr) return call_directly(instruction, frame);
  gather(instruction, frame);
  for (const auto& expected : instruction.expected) match_strides(expected, stack[expected.argument]);
  if (instruction.draws_by_default && frame.generator.defined()) {
    GeneratorSwap swap(frame.generator);
    instruction.op->callBoxed(stack);
  } else {
    instruction.op->callBoxed(stack);
  }
  take_results(instruction, frame);
}

void Program::call_directly(const Instruction& instruction, Frame& frame) {
  auto& slots = frame.slots;
  std::array<const c10::IValue*, kMostDirectArguments> given;
  size_t count = 0;
  for (const auto& argument : instruction.arguments) {
    given[count++] = argument.kind == Argument::Kind::slot ? &slots[argument.slot] : &argument.value;
  }
  at::Tensor result = instruction.direct(given.data());
  for (const auto& argument : instruction.arguments) {
    if (argument.last_use) slots[argument.slot] = c10::IValue();
  }
  if (instruction.results[0] >= 0) slots[instruction.results[0]] = std::move(result);
  for (auto slot : instruction.drops) slots[slot] = c10::IValue();
}

void Program::gather(const Instruction& instruction, Frame& frame) {
  auto& stack = frame.stack;
  auto& slots = frame.slots;
  stack.clear();
  for (const auto& argument : instruction.arguments) {
    switch (argument.kind) {
      case Argument::Kind::constant:
        stack.push_back(argument.value);
        break;
      case Argument::Kind::slot:
        if (argument.last_use) {
          stack.push_back(std::move(slots[argument.slot]));
        } else {
          stack.push_back(slots[argument.slot]);
        }
        break;
      case Argument::Kind::generator:
        if (frame.generator.defined()) {
          stack.emplace_back(frame.generator);
        } else {
          stack.emplace_back();
        }
        break;
      case Argument::Kind::tensor_list: {
        c10::List<at::Tensor> list;
        list.reserve(argument.slots.size());
        for (auto slot : argument.slots) list.push_back(slots[slot].toTensor());
        stack.emplace_back(std::move(list));
        break;
      }
      case Argument::Kind::optional_tensor_list: {
        c10::List<std::optional<at::Tensor>> list;
        list.reserve(argument.slots.size());
        for (auto slot : argument.slots) {
          if (slot < 0) {
            list.push_back(std::nullopt);
          } else {
            list.push_back(slots[slot].toTensor());
          }
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }
}

void Program::take_results(const Instruction& instruction, Frame& frame) {
  auto& stack = frame.stack;
  auto& slots = frame.slots;
  if (instruction.result_is_list) {
    auto list = stack.back().toTensorVector();
    for (size_t i = 0; i < instruction.results.size(); ++i) {
      if (instruction.results[i] >= 0) slots[instruction.results[i]] = std::move(list[i]);
    }
  } else {
    for (size_t i = 0; i < instruction.results.size(); ++i) {
      if (instruction.results[i] >= 0) slots[instruction.results[i]] = std::move(stack[i]);
    }
  }
  stack.clear();
  for (auto slot : instruction.drops) slots[slot] = c10::IValue();
}

void Program::execute(int32_t index, Frame& frame) const {
  try {
    execute(instructions_[index], frame);
  } catch (const std::exception& error) {
    fail(index, frame, error);
  }
}

void Program::run(Frame& frame, int32_t begin, int32_t end, Placer* placer, Pace* pace) const {
  BelowAutograd below;
  ProductsScope products;
  for (int32_t i = begin; i < end; ++i) {
    if (pace != nullptr) pace->before_operation();
    if (placer != nullptr) placer->instruction(i);
    execute(i, frame);
  }
}

void Program::run_profiled(Frame& frame, int32_t begin, int32_t end, StepProfile& profile) const {
  using clock = std::chrono::steady_clock;
  BelowAutograd below;
  StepRequests& log = profile.log;
  const auto& stream = profile.stream;
  MeterGuard meter(&log, stream ? stream->device_type() : c10::DeviceType::CPU);
  for (int32_t i = begin; i < end; ++i) {
    const int64_t before = meter.current();
    meter.restart_peak();
    log.first.push_back(static_cast<int32_t>(log.requests.size()));
    const auto start = clock::now();
    try {
      execute(instructions_[i], frame);
      if (stream) stream->synchronize();
    } catch (const std::exception& error) {
      fail(i, frame, error);
    }
    log.ends.push_back(log.ticks++);
    auto& entry = profile.instructions[i];
    entry.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - start).count();
    entry.peak = meter.peak() - before;
    entry.net = meter.current() - before;
    entry.requests = meter.requests();
  }
}

void Program::make_views(Frame& frame) const {
  BelowAutograd below;
  for (const auto& view : views_) execute(view, frame);
}

std::vector<at::Tensor> Frame::finish(const Placer* arena) {
  BelowAutograd below;
  mark_written();
  std::vector<at::Tensor> outputs;
  outputs.reserve(program->outputs().size());
  for (size_t i = 0; i < program->outputs().size(); ++i) {
    const int32_t slot = program->outputs()[i];
    if (slot < 0 || !slots[slot].isTensor()) {
      outputs.emplace_back();
      continue;
    }
    at::Tensor value = slots[slot].toTensor();
    // What a user may keep owns its memory, and no more of it than it shows. An operation that asks for memory in
    // another order than in its profile may have a result where a temporary of the same size was planned.
    const bool copy = program->shared()[i] || value.storage().nbytes() > value.nbytes() ||
                      (arena != nullptr && arena->contains(value.const_data_ptr()));
    outputs.push_back(copy ? value.detach().clone() : value);
  }
  return outputs;
}

void Frame::mark_written() {
  for (auto slot : program->written()) {
    if (slots[slot].isTensor()) slots[slot].toTensor().unsafeGetTensorImpl()->bump_version();
  }
}

void Frame::pass_on_sizes(bool to_python) {
  for (auto& [slot, weak] : shown) {
    c10::TensorImpl* here = slots[slot].toTensor().unsafeGetTensorImpl();
    // Looked at without a reference, which torch would take under the interpreter lock; the weak one keeps the sizes.
    if (weak._unsafe_get_target()->sizes() == here->sizes()) continue;
    const auto pythons = weak.lock();
    if (!pythons) continue;
    const auto [from, to] = to_python ? std::pair(here, pythons.get()) : std::pair(pythons.get(), here);
    to->set_storage_keep_dtype(from->storage());
    to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  }
}

void Frame::clear_intermediates() {
  for (size_t i = program->fixed(); i < slots.size(); ++i) slots[i] = c10::IValue();
  stack.clear();
}

}  // namespace waterflow
