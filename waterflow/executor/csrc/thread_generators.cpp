#include "thread_generators.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "random_state.h"

namespace waterflow {
namespace {

// Autograd hands the calling thread's debug info to the threads that it works on, as it does the included keys.
const auto kPlace = c10::DebugInfoKind::TEST_INFO_2;

struct Own : c10::DebugInfoBase {
  std::vector<at::Generator> generators;
};

bool is_default(const at::Generator& generator) {
  return generator == at::globalContext().defaultGenerator(generator.device());
}

// Where an operator draws: on the device of its first tensor, or on the one that it is asked to fill.
c10::Device device_of(const c10::IValue* given, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (given[i].isTensor() && given[i].toTensor().defined()) return given[i].toTensor().device();
    if (given[i].isTensorList() && !given[i].toTensorList().empty()) return given[i].toTensorVector()[0].device();
  }
  for (size_t i = 0; i < count; ++i) {
    if (given[i].isDevice()) return given[i].toDevice();
  }
  return c10::kCPU;
}

int generator_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return static_cast<int>(i);
  }
  return -1;
}

// A trace on fake tensors, or of calls into a graph: nothing is drawn for anybody, and a generator does not belong
// there.
bool tracing() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDrawingKey);
  const size_t count = op.schema().arguments().size();
  auto* given = stack->data() + (stack->size() - count);
  if (const auto* own = tracing() ? nullptr : ThreadGenerators::of(device_of(given, count))) {
    const int place = generator_argument(op.schema());
    if (place >= 0) {
      auto& generator = given[place];
      if (generator.isNone() || is_default(generator.toGenerator())) generator = *own;
    } else if (!own->device().is_cpu()) {  // on the CPU such operators call others, which take a generator
      const c10::impl::ExcludeDispatchKeyGuard swapped(kDrawingKey);
      const GeneratorSwap swap(*own);
      return op.redispatchBoxed(below, stack);
    }
  }
  op.redispatchBoxed(below, stack);
}

// By torch's tags and schemas: whatever draws.
TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const bool takes = generator_argument(op->schema()) >= 0;
    const bool draws =
        op->hasTag(at::Tag::nondeterministic_seeded) && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!takes && !draws) continue;
    const auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

ThreadGenerators::ThreadGenerators(std::vector<at::Generator> own) : any_(!own.empty()) {
  for (const auto& generator : own) TORCH_CHECK(generator.defined(), "a thread's generator must be a torch.Generator");
  auto made = std::make_shared<Own>();
  made->generators = std::move(own);
  own_ = std::move(made);
}

void ThreadGenerators::enter() {
  TORCH_CHECK(!guard_, "generators of a thread are entered once at a time");
  guard_.emplace(kPlace, own_);
  outer_ = c10::impl::tls_is_dispatch_key_included(kDrawingKey);
  c10::impl::tls_set_dispatch_key_included(kDrawingKey, any_);
}

void ThreadGenerators::exit() {
  if (!guard_) return;
  c10::impl::tls_set_dispatch_key_included(kDrawingKey, outer_);
  guard_.reset();
}

const at::Generator* ThreadGenerators::of(const c10::Device& device) {
  const auto* own = static_cast<const Own*>(c10::ThreadLocalDebugInfo::get(kPlace));
  if (own == nullptr) return nullptr;
  for (const auto& generator : own->generators) {
    const auto& at = generator.device();
    if (at.type() == device.type() && (!device.has_index() || at.index() == device.index())) return &generator;
  }
  return nullptr;
}

}  // namespace waterflow
