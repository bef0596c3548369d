#include "random_state.h"

#include <ATen/core/Generator.h>

namespace waterflow {
namespace {

std::mutex& swap_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

at::CPUGeneratorImpl& cpu(const at::Generator& generator) {
  TORCH_CHECK(generator.defined() && generator.device().is_cpu(),
              "a job on the CPU draws from a CPU generator; got one on ",
              generator.defined() ? generator.device().str() : std::string("no device"));
  return *generator.get<at::CPUGeneratorImpl>();
}

at::CPUGeneratorImpl& shared() { return cpu(at::detail::getDefaultCPUGenerator()); }

}  // namespace

GeneratorSwap::State GeneratorSwap::read(at::CPUGeneratorImpl& generator) {
  std::lock_guard<std::mutex> guard(generator.mutex_);
  return {generator.engine(), generator.next_float_normal_sample(), generator.next_double_normal_sample()};
}

void GeneratorSwap::write(at::CPUGeneratorImpl& generator, const State& state) {
  std::lock_guard<std::mutex> guard(generator.mutex_);
  generator.set_engine(state.engine);
  generator.set_next_float_normal_sample(state.next_float);
  generator.set_next_double_normal_sample(state.next_double);
}

GeneratorSwap::GeneratorSwap(const at::Generator& own) : lock_(swap_lock()), own_(cpu(own)), outer_(read(shared())) {
  write(shared(), read(own_));
}

GeneratorSwap::~GeneratorSwap() {
  write(own_, read(shared()));
  write(shared(), outer_);
}

}  // namespace waterflow
