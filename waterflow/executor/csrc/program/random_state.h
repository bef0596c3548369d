// Random generators of one thread, which stand in for the default generators of the process.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace waterflow {

// Between enter() and exit() the operators that the calling thread runs, or autograd's threads for it, draw from `own`,
// one generator for each device, wherever they would draw from that device's default one: an operator that takes a
// generator is handed it; a GPU's that takes none runs while `own` is swapped with the default one, under the lock of
// GeneratorSwap. An empty list ends what an outer scope began. Scopes of a thread nest; a thread leaves those that it
// has entered, the inner ones first.
class ThreadGenerators {
 public:
  explicit ThreadGenerators(std::vector<at::Generator> own);
  void enter();
  void exit();

  // The calling thread's generator for a device; null where there is none.
  static const at::Generator* of(const c10::Device& device);

 private:
  std::shared_ptr<c10::DebugInfoBase> own_;
  std::optional<c10::DebugInfoGuard> guard_;
};

// While it lives, operators that the calling thread runs draw from the default generators, whatever it has of its own.
class NoOwnNumbers {
 public:
  NoOwnNumbers() : outer_(std::exchange(here_, true)) {}
  ~NoOwnNumbers() { here_ = outer_; }
  NoOwnNumbers(const NoOwnNumbers&) = delete;
  NoOwnNumbers& operator=(const NoOwnNumbers&) = delete;
  static bool here() { return here_; }

 private:
  static inline thread_local bool here_ = false;
  const bool outer_;
};

// A job's own random numbers, shown to operations that draw from the process's default generator.

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
