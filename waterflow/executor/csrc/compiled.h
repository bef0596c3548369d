// Native code of operations that were compiled, loaded into the process.
#pragma once

#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <cstdint>
#include <string>
#include <vector>

namespace waterflow {

// A shared object that torch's Inductor made ahead of time. `waterflow::compiled` finds it by its number as long as it
// lives: programs that call it keep it. Thread-safe: torch's container has as many instances as threads can call it at
// once, and a lock for taking one. It needs no interpreter lock, and asks torch's allocator for memory on the calling
// thread.
class CompiledRegion {
 public:
  explicit CompiledRegion(const std::string& path);
  ~CompiledRegion();
  CompiledRegion(const CompiledRegion&) = delete;
  CompiledRegion& operator=(const CompiledRegion&) = delete;

  int64_t number() const { return number_; }
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) { return runner_.boxed_run(std::move(inputs)); }

 private:
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
  int64_t number_;
};

}  // namespace waterflow
