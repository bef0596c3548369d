#include "waterflow/executor/csrc/program/random_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

namespace waterflow {
namespace {

// Autograd hands the calling thread's debug info to the threads that it works on.
const auto kPlace = c10::DebugInfoKind::TEST_INFO_2;

struct Own : c10::DebugInfoBase {
  std::vector<at::Generator> generators;
};

int generator_argument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return static_cast<int>(i);
  }
  return -1;
}

// The calling thread's own generator for the kernels of `keys`, which run next; null where they draw nothing of its.
const at::Generator* own_for(c10::DispatchKeySet keys, const c10::IValue* given, size_t count) {
  if (NoOwnNumbers::here()) return nullptr;
  const auto backend = keys.highestBackendKey();
  if (backend == c10::BackendComponent::CPUBit) return ThreadGenerators::of(c10::kCPU);
  if (backend != c10::BackendComponent::CUDABit) return nullptr;
  for (size_t i = 0; i < count; ++i) {
    if (given[i].isTensor() && given[i].toTensor().is_cuda()) return ThreadGenerators::of(given[i].toTensor().device());
  }
  return nullptr;
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  const size_t count = op.schema().arguments().size();
  auto* given = stack->data() + (stack->size() - count);
  if (const auto* own = own_for(below, given, count)) {
    const int place = generator_argument(op.schema());
    if (place >= 0) {
      auto& generator = given[place];
      const auto& standard = at::globalContext().defaultGenerator(own->device());
      if (generator.isNone() || generator.toGenerator() == standard) generator = *own;
    } else if (!own->device().is_cpu()) {  // on the CPU such operators call others, which take a generator
      const NoOwnNumbers swapped;
      const GeneratorSwap swap(*own);
      return op.redispatchBoxed(below, stack);
    }
  }
  op.redispatchBoxed(below, stack);
}

// The last key above the kernels of all backends. Each thread includes it, and modes, traces, transforms and subclasses
// have had their turn: none of them sees a key or a generator that it would not see without us. By torch's tags and
// schemas what gets a kernel there is whatever draws and is not composed of such operators.
TORCH_LIBRARY_IMPL(aten, BackendSelect, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) continue;
    const auto runs_on = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool takes = generator_argument(op->schema()) >= 0, on_gpu = runs_on(c10::DispatchKey::CUDA);
    if (!on_gpu && !(takes && runs_on(c10::DispatchKey::CPU))) continue;
    if (!takes && !op->hasTag(at::Tag::nondeterministic_seeded)) continue;
    const auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
  }
}

}  // namespace

ThreadGenerators::ThreadGenerators(std::vector<at::Generator> own) {
  for (const auto& generator : own) TORCH_CHECK(generator.defined(), "a thread's generator must be a torch.Generator");
  auto made = std::make_shared<Own>();
  made->generators = std::move(own);
  own_ = std::move(made);
}

void ThreadGenerators::enter() {
  TORCH_CHECK(!guard_, "generators of a thread are entered once at a time");
  guard_.emplace(kPlace, own_);
}

void ThreadGenerators::exit() { guard_.reset(); }

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
