// A job's own random numbers, shown to operations that draw from the process's default generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

namespace waterflow {

// While it lives, the default generator of `own`'s device carries on the sequence of `own`; afterwards `own` stands
// where the sequence stopped and the default generator where it was. One lock for the whole process: swapping from two
// threads without it spoils masks silently. On a GPU numbers are counted when work is issued, so that is all there is
// to swap there, too.
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
    uint64_t seed = 0, offset = 0;  // of a GPU's
  };
  static State read(const at::Generator& given);
  static void write(const at::Generator& given, const State& state);

  std::unique_lock<std::mutex> lock_;
  at::Generator own_, shared_;
  State outer_;
};

}  // namespace waterflow
