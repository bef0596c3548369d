// One operation at the addresses that it has in a step's plan: learnt without running it there, run again and again.
#pragma once

#include <cstdint>
#include <vector>

#include "../../allocator/csrc/placer.h"
#include "program.h"

namespace waterflow {

// Between device graphs it runs what they cannot hold: random operations. In the stand-in for a GPU it is what a graph
// is made of.
class RecordedCall {
 public:
  // Puts into the frame what running the instruction would put there, asks `placer` for what `plan` says that it asks
  // for, and leaves bytes and generators as they are: what it returns is learnt from zeros elsewhere. Throws
  // std::runtime_error where that cannot be done.
  RecordedCall(const Program& program, int32_t index, Frame& frame, Placer* placer, const RequestPlan& plan);
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

  // On the calling thread and its current stream. Its arguments must be what they were, at the same addresses; memory
  // that it asks for beside them is not planned.
  void run();

 private:
  struct Given {
    at::Tensor own, zeros;
  };
  at::Tensor zeros_like(const at::Tensor& own);
  const Given* given_to(const at::Tensor& learnt) const;
  void make_memory(const torch::jit::Stack& learnt, int32_t index, Placer* placer, const RequestPlan& plan);
  at::Tensor placed(const at::Tensor& learnt);

  const Instruction& instruction_;
  at::Generator random_;             // stands in for the default one, where the operator takes none
  torch::jit::Stack arguments_;      // none of them holds memory
  std::vector<at::Tensor> results_;  // where they belong; undefined for what lies in an argument
  // While it is made: its arguments, and the memory of what it returns.
  std::vector<Given> given_;
  struct Fresh {
    const void* storage;
    int64_t bytes;
    c10::Device device;
    at::Tensor memory = {};
  };
  std::vector<Fresh> fresh_;
};

}  // namespace waterflow
