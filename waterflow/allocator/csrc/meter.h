// Counting what the operations of one thread ask of torch's allocators.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/Logging.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace waterflow {

// The requests of a step in their order. Ticks count them, and the ends of instructions; a request dies with the last
// tick before it is given back, -1 where that does not happen within the step.
struct StepRequests {
  struct Request {
    int64_t bytes;
    int32_t birth, death;
  };
  std::vector<Request> requests;
  std::vector<int32_t> first;  // of each instruction; then the end
  std::vector<int32_t> ends;   // tick of each instruction's end
  std::unordered_map<void*, size_t> live;
  int32_t ticks = 0;
};

// A profiler that is off, as autograd's functions take whatever is in this place for a profiler and ask it.
class Meter : public torch::profiler::impl::ProfilerStateBase {
 public:
  Meter() : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  void reportMemoryUsage(void* address, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != counted) return;
    current += bytes;
    if (current > peak) peak = current;
    if (bytes > 0) ++requests;
    if (log == nullptr) return;
    if (bytes > 0) {
      log->live[address] = log->requests.size();
      log->requests.push_back({bytes, log->ticks++, -1});
    } else if (auto found = log->live.find(address); found != log->live.end()) {
      log->requests[found->second].death = log->ticks - 1;
      log->live.erase(found);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t current = 0;
  int64_t peak = 0;
  int64_t requests = 0;
  StepRequests* log = nullptr;
  c10::DeviceType counted = c10::DeviceType::CPU;
};

// While any of these lives, torch does not warn of freed memory that a profiler has not seen allocated, as a meter's
// steps free much of it: from level 2 on only errors. The level is the process's: other warnings of torch's C++ log are
// lost meanwhile, errors are not.
class NoProfilerWarnings {
 public:
  NoProfilerWarnings() {
    std::lock_guard<std::mutex> guard(lock_);
    if (living_++ == 0) before_ = std::exchange(FLAGS_caffe2_log_level, std::max(FLAGS_caffe2_log_level, 2));
  }
  ~NoProfilerWarnings() {
    std::lock_guard<std::mutex> guard(lock_);
    if (--living_ == 0) FLAGS_caffe2_log_level = before_;
  }
  NoProfilerWarnings(const NoProfilerWarnings&) = delete;

 private:
  static inline std::mutex lock_;
  static inline int living_ = 0, before_ = 0;
};

// While it lives, requests and releases of the calling thread are counted. Blocks that were there before are not known
// to it, so their release does not show. A profiler of the user's does not see this thread's operations meanwhile: the
// meter is in the place where its callbacks look for it, and they would take the one for the other.
class MeterGuard {
 public:
  explicit MeterGuard(StepRequests* log = nullptr, c10::DeviceType counted = c10::DeviceType::CPU)
      : meter_(std::make_shared<Meter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, meter_) {
    meter_->log = log;
    meter_->counted = counted;
  }

  int64_t current() const { return meter_->current; }
  int64_t peak() const { return meter_->peak; }
  int64_t requests() const { return meter_->requests; }
  void restart_peak() {
    meter_->peak = meter_->current;
    meter_->requests = 0;
  }

 private:
  NoProfilerWarnings quiet_;
  at::DisableRecordFunctionGuard unprofiled_;
  std::shared_ptr<Meter> meter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace waterflow
