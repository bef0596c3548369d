// Counting what the operations of one thread ask of torch's allocators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <memory>

namespace waterflow {

// A profiler that is off, as autograd's functions take whatever is in this place for a profiler and ask it.
class Meter : public torch::profiler::impl::ProfilerStateBase {
 public:
  Meter() : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    current += bytes;
    if (current > peak) peak = current;
    if (bytes > 0) ++requests;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t current = 0;
  int64_t peak = 0;
  int64_t requests = 0;
};

// While it lives, requests and releases of the calling thread are counted. Blocks that were there before
// are not known to it, so their release does not show.
class MeterGuard {
 public:
  MeterGuard() : meter_(std::make_shared<Meter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, meter_) {}

  int64_t current() const { return meter_->current; }
  int64_t peak() const { return meter_->peak; }
  int64_t requests() const { return meter_->requests; }
  void restart_peak() {
    meter_->peak = meter_->current;
    meter_->requests = 0;
  }

 private:
  std::shared_ptr<Meter> meter_;
  c10::DebugInfoGuard guard_;
};

// A process-wide allocator that counts every thread's bytes and hands the work to torch's own.
// It is the independent witness of tests and benchmarks; training never needs it.
class CountingAllocator {
 public:
  static void start();  // installs itself; bytes already held are not counted
  static void stop();   // restores torch's own allocator; blocks it handed out stay valid
  static void reset_peak();
  static int64_t current();
  static int64_t peak();
};

}  // namespace waterflow
