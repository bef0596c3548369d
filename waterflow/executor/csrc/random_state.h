// A job's own random numbers, shown to operations that draw from the process's default generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace waterflow {

// While it lives, the default CPU generator carries on the sequence of `own`; afterwards `own` stands where the
// sequence stopped and the default generator where it was. One lock for the whole process: swapping from two
// threads without it spoils masks silently.
class GeneratorSwap {
 public:
  explicit GeneratorSwap(const at::Generator& own);
  ~GeneratorSwap();
  GeneratorSwap(const GeneratorSwap&) = delete;
  GeneratorSwap& operator=(const GeneratorSwap&) = delete;

 private:
  struct State {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  static State read(at::CPUGeneratorImpl& generator);
  static void write(at::CPUGeneratorImpl& generator, const State& state);

  std::unique_lock<std::mutex> lock_;
  at::CPUGeneratorImpl& own_;
  State outer_;
};

}  // namespace waterflow
