// A captured step as a program, a flat list of operator calls over numbered slots; the frame that holds one job's
// values while it runs; and direct calls, which replace the dispatcher for some operators.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/meter.h"
#include "waterflow/allocator/csrc/planned/placer.h"
#include "waterflow/executor/csrc/engine/throttle.h"
#include "waterflow/executor/csrc/program/random_state.h"

namespace waterflow {

// A kernel of waterflow's own for an operator with one tensor as its result, called with the values of slots instead of
// through the dispatcher: no stack, no copies of arguments, no keys to look up. Arguments come in the schema's order.
using DirectCall = at::Tensor (*)(const c10::IValue* const* arguments);

// The call of the operator with this name; null where it has none. Called on CPU tensors alone.
DirectCall find_direct_call(const std::string& name);

#ifdef WATERFLOW_TEST_HOOKS
// In what is captured from now on, the kernel with this name gives results of which the lowest bit of the first byte is
// wrong; none does where the name is empty. Raises where there is no such kernel.
void plant_wrong_bit(const std::string& name);
#endif

struct RegisterDirectCall {
  RegisterDirectCall(std::string name, DirectCall call);
};

// Whether the tensor's memory holds its values as they are. The dispatcher would see to it.
inline bool has_plain_memory(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers(
      {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
  return !tensor.key_set().has_any(kOthers);
}

template <typename T>
decltype(auto) given(const c10::IValue& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.toTensor();
  } else if constexpr (std::is_same_v<T, at::Scalar>) {
    return value.toScalar();
  } else {
    return value.to<T>();
  }
}

template <auto Kernel>
struct Direct;

template <typename... Args, at::Tensor (*Kernel)(Args...)>
struct Direct<Kernel> {
  static at::Tensor call(const c10::IValue* const* arguments) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Kernel(given<std::remove_cvref_t<Args>>(*arguments[I])...);
    }(std::index_sequence_for<Args...>{});
  }
};

// The parts of a program.

struct Argument {
  enum class Kind : uint8_t { constant, slot, tensor_list, optional_tensor_list, generator };
  Kind kind = Kind::constant;
  int32_t slot = -1;
  bool last_use = false;  // a slot whose value may be moved out
  c10::IValue value;
  std::vector<int32_t> slots;  // of a list; -1 is None
};

// A tensor argument whose strides the captured graph relied on. Fake tensors predict strides that real
// kernels do not always return; where a call walks raw memory it must see the predicted ones.
struct ExpectedStrides {
  int32_t argument;
  int32_t element;  // of a list argument; -1 for a plain one
  std::vector<int64_t> strides;
};

// A view, made from what is known of it instead of through an operator.
struct Alias {
  int32_t source;  // slot
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;                 // elements behind the source's first
  std::vector<int64_t> expected;  // strides of the source, on which the others rely
};

struct Instruction {
  std::optional<c10::OperatorHandle> op;  // none for an alias, and where another did the work
  DirectCall direct = nullptr;            // what to call instead of the operator, with the same result
  std::optional<Alias> alias;
  std::vector<Argument> arguments;
  std::vector<int32_t> results;  // slot per result; -1 drops it
  std::vector<int32_t> drops;    // slots that die here
  std::vector<ExpectedStrides> expected;
  bool result_is_list = false;
  bool draws = false;             // random numbers
  bool draws_by_default = false;  // and takes no generator: the job's stands in for the default one
};

// What one instruction did to memory and how long it took; filled while a step is profiled.
struct InstructionProfile {
  int64_t peak = 0;  // bytes above what was held when it began
  int64_t net = 0;   // bytes held after it, less bytes held before
  int64_t nanoseconds = 0;
  int64_t requests = 0;
};

struct StepProfile {
  std::vector<InstructionProfile> instructions;
  StepRequests log;
  std::optional<c10::Stream> stream;  // of a GPU: an instruction ends when that has done it
};

struct NodeError : std::runtime_error {
  NodeError(int32_t node, const std::string& what) : std::runtime_error(what), node(node) {}
  int32_t node;
};

// What eager training raises as an IndexError.
struct NodeIndexError : NodeError {
  using NodeError::NodeError;
};

// Graphs are captured below autograd, so their operations run below it, too.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView guard;
  // The casts of an autocast around the caller are in the graph.
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  // A program's operations draw from the generators that it binds.
  NoOwnNumbers no_own_numbers;
};

// Whether strides are those that were captured; where a dimension has one element they do not matter.
bool strides_match(const at::Tensor& tensor, const std::vector<int64_t>& expected);

// A number in a tensor's place: it takes no part in type promotion.
at::Tensor wrapped_number(const at::Scalar& number);

constexpr size_t kMostDirectArguments = 8;

struct Frame;

// Immutable once built; shared by every job whose capture is the same.
class Program {
 public:
  // Slots [0, inputs) are inputs; [inputs, fixed) are views of inputs that stay as long as their storage does.
  Program(int32_t inputs, int32_t fixed, int32_t slots) : inputs_(inputs), fixed_(fixed), slots_(slots) {}

  void add(Instruction instruction) { instructions_.push_back(std::move(instruction)); }
  void add_view(Instruction instruction) { views_.push_back(std::move(instruction)); }
  // `shared` marks outputs that share memory with an input or with an output before them: the user gets copies.
  void set_outputs(std::vector<int32_t> slots, std::vector<bool> shared) {
    outputs_ = std::move(slots);
    shared_ = std::move(shared);
  }
  void set_written(std::vector<int32_t> slots) { written_ = std::move(slots); }
  // Why its steps cannot be device graphs.
  void set_not_graphed(std::string reason) { not_graphed_ = std::move(reason); }

  int32_t inputs() const { return inputs_; }
  int32_t fixed() const { return fixed_; }
  int32_t slots() const { return slots_; }
  const std::vector<int32_t>& written() const { return written_; }
  int32_t size() const { return static_cast<int32_t>(instructions_.size()); }
  const std::vector<int32_t>& outputs() const { return outputs_; }
  const std::vector<bool>& shared() const { return shared_; }
  const std::string& not_graphed() const { return not_graphed_; }
  const Instruction& instruction(int32_t index) const { return instructions_[index]; }

  // Computes the fixed views, once the inputs that they look at are in the frame.
  void make_views(Frame& frame) const;
  // Runs instructions [begin, end) on the calling thread, without the interpreter lock.
  // Throws NodeError; the frame is then to be cleared by the caller.
  // `placer` serves its requests, if there is one.
  void run(Frame& frame, int32_t begin, int32_t end, Placer* placer, Pace* pace = nullptr) const;
  // The same, recording what each instruction does into `profile`, which has seen all those before.
  void run_profiled(Frame& frame, int32_t begin, int32_t end, StepProfile& profile) const;

  // The two halves of an operation's call: its arguments onto the frame's stack; what is there then into slots.
  static void gather(const Instruction& instruction, Frame& frame);
  static void take_results(const Instruction& instruction, Frame& frame);

 private:
  void execute(const Instruction& instruction, Frame& frame) const;
  // The same for the one with this number; throws NodeError.
  void execute(int32_t index, Frame& frame) const;
  static void call_directly(const Instruction& instruction, Frame& frame);

  int32_t inputs_;
  int32_t fixed_;
  int32_t slots_;
  std::vector<Instruction> instructions_;
  std::vector<Instruction> views_;
  std::vector<int32_t> outputs_;
  std::vector<bool> shared_;
  std::vector<int32_t> written_;  // inputs that the step changes in place
  std::string not_graphed_;
};

// The values of one job while a step runs.
struct Frame {
  explicit Frame(std::shared_ptr<const Program> program_) : program(std::move(program_)), slots(program->slots()) {}

  // After the last group: what the user gets, in memory of its own, and not of `arena`; marks changed inputs as
  // changed.
  std::vector<at::Tensor> finish(const Placer* arena = nullptr);
  void mark_written();  // the second half of that
  void clear_intermediates();
  // Slots have other tensors over the memory of those that Python has. A kernel may resize the former and user code the
  // latter: before a step slots take the sizes of Python's tensors, behind it they give theirs.
  void pass_on_sizes(bool to_python);

  std::shared_ptr<const Program> program;
  std::vector<c10::IValue> slots;
  std::vector<std::pair<int32_t, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>> shown;
  torch::jit::Stack stack;
  at::Generator generator;  // undefined: the process's own, as in eager
};

}  // namespace waterflow
