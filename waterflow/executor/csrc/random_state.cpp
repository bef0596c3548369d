#include "random_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

namespace waterflow {
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

}  // namespace waterflow
