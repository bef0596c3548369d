#include "waterflow/executor/csrc/program/random_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

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

namespace {

std::mutex& swap_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

const at::Generator& known(const at::Generator& generator) {
  TORCH_CHECK(generator.defined() && (generator.device().is_cpu() || generator.device().is_cuda()),
              "a job draws from a generator on the CPU or on a GPU; got one on ",
              generator.defined() ? generator.device().str() : std::string("no device"));
  return generator;
}

const at::Generator& shared_like(const at::Generator& own) {
  if (own.device().is_cpu()) return at::detail::getDefaultCPUGenerator();
  return at::globalContext().defaultGenerator(own.device());
}

}  // namespace

GeneratorSwap::State GeneratorSwap::read(const at::Generator& given) {
  at::Generator generator = given;  // another name for the same
  std::lock_guard<std::mutex> guard(generator.mutex());
  State state;
  if (generator.device().is_cpu()) {
    auto& from = *generator.get<at::CPUGeneratorImpl>();
    state.engine = from.engine();
    state.next_float = from.next_float_normal_sample();
    state.next_double = from.next_double_normal_sample();
  } else {
    state.seed = generator.current_seed();
    state.offset = generator.get_offset();
  }
  return state;
}

void GeneratorSwap::write(const at::Generator& given, const State& state) {
  at::Generator generator = given;
  std::lock_guard<std::mutex> guard(generator.mutex());
  if (generator.device().is_cpu()) {
    auto& to = *generator.get<at::CPUGeneratorImpl>();
    to.set_engine(state.engine);
    to.set_next_float_normal_sample(state.next_float);
    to.set_next_double_normal_sample(state.next_double);
  } else {
    generator.set_current_seed(state.seed);  // begins at offset 0
    generator.set_offset(state.offset);
  }
}

GeneratorSwap::GeneratorSwap(const at::Generator& own)
    : lock_(swap_lock()), own_(known(own)), shared_(shared_like(own_)), outer_(read(shared_)) {
  write(shared_, read(own_));
}

GeneratorSwap::~GeneratorSwap() {
  write(own_, read(shared_));
  write(shared_, outer_);
}

// Operators on the default generator of a device, as a step asks for its state and sets it.

namespace {

// A job's own generator stands in for the default one of its own device, and for no other.
at::Generator drawn_from(at::Device device, const std::optional<at::Generator>& own) {
  if (own && own->defined() && own->device().type() == device.type()) return *own;
  return at::globalContext().defaultGenerator(device);
}

at::Tensor random_state(at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state, at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_state(state);
}

void seed_random(int64_t seed, at::Device device, std::optional<at::Generator> own) {
  auto generator = drawn_from(device, own);
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

}  // namespace
}  // namespace waterflow

TORCH_LIBRARY_FRAGMENT(waterflow, m) {
  const std::vector<at::Tag> random = {at::Tag::nondeterministic_seeded};
  m.def("random_state(Device device, *, Generator? generator=None) -> Tensor", random);
  m.def("set_random_state(Tensor state, Device device, *, Generator? generator=None) -> ()", random);
  m.def("seed_random(int seed, Device device, *, Generator? generator=None) -> ()", random);
}
TORCH_LIBRARY_IMPL(waterflow, CompositeExplicitAutograd, m) {
  m.impl("random_state", &waterflow::random_state);
  m.impl("set_random_state", &waterflow::set_random_state);
  m.impl("seed_random", &waterflow::seed_random);
}
