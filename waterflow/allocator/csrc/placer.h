// Serves the requests of one lane's step at their planned addresses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "request_plan.h"

namespace waterflow {

// What became of a step's requests.
struct PlacedCounts {
  int64_t planned = 0;  // served at their planned addresses
  int64_t missed = 0;   // asked for otherwise than planned, or before their ground was free
  int64_t outside = 0;  // bytes of those that were missed

  void add(const PlacedCounts& other) {
    planned += other.planned;
    missed += other.missed;
    outside += other.outside;
  }
};

// Whose requests it serves: torch's for memory of the host, or for that of a device. A step on a device makes both.
enum class PlacedIn : uint8_t { host, device };

// One range of addresses that begins at an arena's end, and the step whose memory lies there. The thread that runs the
// step asks; releases come from anywhere. A request is served at its place only when all that had that ground before it
// in this step have given it back: a step that does otherwise than its profile loses speed, and never a byte.
class Placer {
 public:
  // The range [base, base + bytes); its origin is the first byte where it grows up, one behind its last where it grows
  // `down`.
  Placer(char* base, int64_t bytes, bool down, PlacedIn memory = PlacedIn::host)
      : base_(base), bytes_(bytes), down_(down), memory_(memory) {}
  Placer(const Placer&) = delete;
  Placer& operator=(const Placer&) = delete;

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  PlacedIn memory() const { return memory_; }
  bool contains(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - base_) < static_cast<uint64_t>(bytes_);
  }

  void begin(std::shared_ptr<const RequestPlan> plan);
  // Whether something is still held that was planned to be given back before the end of this instruction. To be asked
  // for later instructions each time, by the thread that runs the step.
  bool overdue(int32_t instruction);
  void instruction(int32_t index) {
    next_ = plan_->first(index);
    end_ = plan_->first(index + 1);
  }
  // The memory of a request; null where it is not planned.
  void* request(size_t bytes);
  // Any thread. False where no live request of the step begins at this address.
  bool release(void* address);
  // The step is over. A placer that was left behind may be gone after it.
  void finish() { active_ = false; }
  // Any thread: no request is served from now on, until the next `begin`.
  void close() { closed_ = true; }
  bool active() const { return active_; }
  bool any_live() const;

  // Calls `visit(address, bytes)` for each request that is still held.
  template <typename Visit>
  void each_live(Visit visit) const {
    for (int32_t i = 0; i < plan_->size(); ++i) {
      if (states_[i].load(std::memory_order_acquire) == kLive) visit(address_of(i), plan_->request(i).bytes);
    }
  }
  const PlacedCounts& counts() const { return counts_; }

 private:
  enum : uint8_t { kNever, kLive, kReleased };

  char* address_of(int32_t index) const {
    const int64_t distance = plan_->distance(index, down_);
    return down_ ? base_ + bytes_ - distance : base_ + distance;
  }
  bool ground_is_free(int32_t index) const;
  bool ground_is_free_slowly(int32_t index) const;

  char* const base_;
  const int64_t bytes_;
  const bool down_;
  const PlacedIn memory_;
  std::shared_ptr<const RequestPlan> plan_;
  std::atomic<bool> active_{false};  // between `begin` and `finish`
  std::atomic<bool> closed_{false};
  int32_t next_ = 0;
  int32_t end_ = 0;
  size_t looked_ = 0;                               // how many of the plan's requests by death have been looked at
  std::unique_ptr<std::atomic<uint8_t>[]> states_;  // of each request
  int32_t states_size_ = 0;
  std::vector<int32_t> begins_;  // by slot of the plan's starts: the request that last began there
  PlacedCounts counts_;
};

}  // namespace waterflow
