// The device graphs of an engine's jobs: who has some, what they were captured with, and when they go.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "step_graphs.h"

namespace waterflow {

struct GraphCounts {
  int64_t captured = 0, launched = 0, dropped = 0;  // graphs
  int64_t bytes = 0;                                // of inputs and outputs, now
};

// A step's graphs belong to one binding, one plan and one end of an arena at its addresses, and to the numbers that
// kernels got as arguments. The first step there is run as it is; the next one is captured, if that one asked for
// memory as planned, on the same thread, and nothing has changed since. Where anything has, its graphs are dropped.
// Thread-safe; steps of one job come one after the other.
class GraphCache {
 public:
  static constexpr size_t MOST_OF_A_JOB = 8;    // bindings and ends with graphs; the one that was used last goes
  static constexpr int32_t MOST_CAPTURES = 16;  // of one binding on one end
  static constexpr int32_t MOST_TRIES = 3;      // in a row, where requests were not as planned

  // `most`: bytes that copies of inputs, and outputs, of all graphs may take.
  GraphCache(std::vector<GraphLane> lanes, int64_t most);

  // Before a step's first group: its graphs, found or captured; null where it runs as it is.
  std::shared_ptr<StepGraphs> find(int32_t lane, StepRun& run, Placer& placer);
  // A step has run as it is, all of its memory as planned.
  void ran_as_planned(int32_t lane, const StepRun& run, const Placer& placer);
  // What there was of a job: to be let go without the engine's lock.
  std::vector<std::shared_ptr<void>> forget(int64_t job);
  // No step runs any more: what there was of all jobs. The device is let go.
  std::vector<std::shared_ptr<void>> close();

  GraphCounts counts() const;
  // Jobs whose steps stay as they are, and why; each reason is told once.
  std::vector<std::pair<int64_t, std::string>> take_refusals();

 private:
  // What a capture holds for, beside the end it was made on.
  struct Terms {
    std::shared_ptr<const GroupPlan> plan;
    const char* base = nullptr;
    std::vector<c10::IValue> numbers;
    bool operator==(const Terms& other) const;
  };
  struct Entry {
    int64_t job;
    std::weak_ptr<Frame> frame;
    int32_t lane;
    Terms terms;
    std::thread::id thread;  // what libraries make for a thread at its first call cannot be made in a capture
    std::shared_ptr<StepGraphs> graphs;
    int32_t captures = 0, tries = 0;
    bool refused = false;
  };
  using Entries = std::list<std::shared_ptr<Entry>>;

  static Terms terms_of(const StepRun& run, const Placer& placer);
  std::shared_ptr<Entry> entry(int32_t lane, const StepRun& run) const;
  std::shared_ptr<StepGraphs> capture(Entry& entry, StepRun& run, Placer& placer);
  std::shared_ptr<StepGraphs> drop(Entry& entry);
  void refuse(Entry& entry, const std::string& why);

  std::vector<GraphLane> lanes_;
  const int64_t most_;
  mutable std::mutex lock_;
  Entries entries_;  // oldest first
  GraphCounts counts_;
  std::vector<std::pair<int64_t, std::string>> refusals_;
};

}  // namespace waterflow
