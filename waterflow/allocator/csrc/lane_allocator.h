// Torch's CPU allocator while an engine lives: lanes are served at planned addresses, all others by torch's own.
#pragma once

#include "placer.h"

namespace waterflow {

// While any of these lives, torch's CPU allocator is ours. Threads without a PlacerScope go straight on to the one that
// was there before, without a lock; that one is put back when the last goes, and in every forked child.
class LaneAllocatorInstalled {
 public:
  LaneAllocatorInstalled();
  ~LaneAllocatorInstalled();
  LaneAllocatorInstalled(const LaneAllocatorInstalled&) = delete;
  LaneAllocatorInstalled& operator=(const LaneAllocatorInstalled&) = delete;
};

// While it lives, the calling thread's requests are the placer's.
class PlacerScope {
 public:
  explicit PlacerScope(Placer* placer);
  ~PlacerScope();
  PlacerScope(const PlacerScope&) = delete;
  PlacerScope& operator=(const PlacerScope&) = delete;

 private:
  Placer* before_;
};

// The calling thread's placer; null where it has none.
Placer* placer_here();
// The same where it serves memory of a device.
Placer* device_placer_here();

}  // namespace waterflow
