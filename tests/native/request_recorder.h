// The requests of a real run, as torch's allocators report them.
#pragma once

#include <mutex>
#include <unordered_map>
#include <vector>

#include "waterflow/allocator/csrc/meter.h"
#include "request_log.h"

namespace waterflow {

// What the operations of one thread, and of its backward passes, ask for, as a request log of one stream.
// Blocks that were there before are not known to it, so their release does not show.
class RequestRecorder : public Meter {
 public:
  void reportMemoryUsage(void* pointer, int64_t bytes, size_t, size_t, c10::Device) override {
    std::lock_guard<std::mutex> guard(lock_);
    if (bytes > 0) {
      const int64_t id = live_[pointer] = ++ids_;
      table_.insert(table_.end(), {ROW_REQUEST, id, 0, bytes});
    } else if (auto found = live_.find(pointer); found != live_.end()) {
      table_.insert(table_.end(), {ROW_RELEASE, found->second, 0, 0});
      live_.erase(found);
    }
  }
  std::vector<int64_t> take() {
    std::lock_guard<std::mutex> guard(lock_);
    return std::move(table_);
  }

 private:
  std::mutex lock_;
  std::unordered_map<void*, int64_t> live_;
  std::vector<int64_t> table_;
  int64_t ids_ = 0;
};

}  // namespace waterflow
