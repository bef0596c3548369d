// The order of two facing lanes on the device: which event a group waits for before it grows into memory that the other
// lane gave back.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "waterflow/allocator/csrc/device.h"
#include "waterflow/allocator/csrc/test_hooks.h"

namespace waterflow {

// Mistakes for tests to plant (test_hooks.h); the simulated device must find each of them.
enum class OrderFault {
  none,
  heights_at_events,  // an event carries what its lane held behind the group, not the group's peak
  dropped_waits,      // every other wait is forgotten
};

// Each event carries the peak of the group that it closes. A group waits for the facing lane's latest event whose peak
// crosses the memory that it grows into, and for no other: whatever was issued there before that event is behind it,
// and what was issued after it stays out of that memory. Comparing the heights at events instead is wrong, for a group
// may rise and fall between two of them (docs/experiments/lanes.md).
//
// Pure book-keeping: no clock, no threads, no torch. Not thread-safe: the engine's lock guards it. Peaks are bytes from
// a lane's own end of the arena; ends are 0 and 1. An end belongs to one stream.
class CrossLaneFences {
 public:
  // Events kept per end. Beyond that the two oldest are made one: the later event with the larger peak, which may wait
  // for more than is needed and never for less.
  static constexpr size_t kMost = 4096;

  explicit CrossLaneFences(OrderFault fault = OrderFault::none) : fault_(fault) {}

  // The event that a group which reaches `peak` bytes from its own `end` has to wait for before it is issued in an
  // arena of `size` bytes; none where it stays clear of the facing lane, or has waited for that event or a later one
  // already. The caller lets the end's stream wait for it.
  std::optional<EventId> before(int end, int64_t peak, int64_t size);
  // The group was issued, `event` recorded behind it. `held_after`, what the lane holds then, counts for a fault only.
  void after(int end, int64_t peak, EventId event, int64_t held_after = 0);
  // The host has learned that the device is past this event of that end: whatever is issued from now on runs after it,
  // so nobody has to wait for it, or for what lies before it. Not needed for the order, but it spares waits, and an
  // event that was given here is never named again.
  void reached(int end, EventId event);

  size_t kept(int end) const { return groups_[side(end)].size(); }
  void check() const;  // walks everything; throws std::logic_error

 private:
  struct Issued {
    int64_t peak;
    EventId event;
  };

  static size_t side(int end);

  OrderFault fault_;
  bool forget_ = false;
  // By end, oldest first, peaks falling: a later group that reaches at least as far stands for all before it. What the
  // facing lane has waited for is gone.
  std::deque<Issued> groups_[2];
};

}  // namespace waterflow
