// A lock for a few dozen nanoseconds of work: cheap to take where nobody else wants it, patient where somebody does.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace waterflow {

class SpinLock {
 public:
  void lock() {
    while (held_.exchange(true, std::memory_order_acquire)) wait();
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  void wait() const {
    // The holder may be asking the device for memory, or have lost its processor: leave it to others, then sleep.
    for (int32_t tries = 0; held_.load(std::memory_order_relaxed); ++tries) {
      if (tries < 64) continue;
      if (tries < 256) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }

  std::atomic<bool> held_{false};
};

}  // namespace waterflow
