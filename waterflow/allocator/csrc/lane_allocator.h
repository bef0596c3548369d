// Torch's CPU allocator while an engine lives: lanes are served at planned addresses, all others by torch's own.
#pragma once

#include "placer.h"

namespace waterflow {

// While any of these lives, torch's CPU allocator is ours. Threads without a LaneScope go straight on to the one that
// was there before, without a lock; that one is put back when the last goes, and in every forked child.
class LaneAllocatorInstalled {
 public:
  LaneAllocatorInstalled();
  ~LaneAllocatorInstalled();
  LaneAllocatorInstalled(const LaneAllocatorInstalled&) = delete;
  LaneAllocatorInstalled& operator=(const LaneAllocatorInstalled&) = delete;
};

// While it lives, the calling thread runs a lane's step: its requests are served where the placer says, if there is
// one, and from the pool otherwise. Not a `lane`: the thread's requests go to torch's own
// allocator, whatever step they are nested in.
class LaneScope {
 public:
  explicit LaneScope(Placer* placer, bool lane = true);
  ~LaneScope();
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  Placer* placer_before_;
  bool lane_before_;
};

// Whether the calling thread runs a lane's step whose requests are served here.
bool on_lane_here();
// The calling thread's placer; null where it has none.
Placer* placer_here();
// The same where it serves memory of a device.
Placer* device_placer_here();

}  // namespace waterflow
