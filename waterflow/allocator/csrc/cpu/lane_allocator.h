// Torch's CPU allocator while an engine lives: lanes are served at planned addresses, and outside of their plans from a
// pool (CpuPool); all other threads by torch's own, before which ours stand in a chain (AllocatorChain).
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "waterflow/allocator/csrc/planned/placer.h"

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
// one, and from the pool otherwise. Not a `lane`: the thread's requests go to torch's own allocator, whatever step they
// are nested in.
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

// What lanes ask for outside of their plans, on the CPU: served by the multi-stream allocator from pages that stay.

// One for the process, for blocks may outlive every engine. Thread-safe. A CPU has done whatever was asked of it before
// it goes on, so all its threads are one stream, and what is given back is free for all.
class CpuPool {
 public:
  // Null where there is no memory: torch's own allocator then has its turn.
  static void* request(size_t bytes);
  static bool owns(const void* address);
  static void release(void* address);

  // Bytes that nobody holds and that stay for later requests; and giving those back to the system.
  static int64_t idle();
  static int64_t held();
  static void trim();

  // In a forked child: what is there is the parent's, and nobody may give it back.
  static void begin_anew();
  static bool of_parents(const void* address);

  // While nobody uses it nothing idle stays.
  static void open();
  static void close();
};

// Who stands before torch's CPU allocator: the lanes' allocator, and above it the one that counts in tests.

// An allocator that hands on to another what it does not do itself. It is never destroyed: blocks outlive everything.
class ChainedAllocator : public c10::Allocator {
 public:
  c10::Allocator* inner() const { return inner_.load(std::memory_order_relaxed); }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    inner()->copy_data(target, source, count);
  }

 private:
  friend class AllocatorChain;
  std::atomic<c10::Allocator*> inner_{nullptr};
};

// Links of the chain are put in and taken out by name, in any order, so that it never becomes a loop. In a forked child
// torch's own allocator is back in its place.
class AllocatorChain {
 public:
  enum Link { kLanes, kWitness, kLinks };
  static void put_in(Link link, ChainedAllocator* allocator);
  static void take_out(Link link);
  static bool in_place(Link link);  // whether torch's requests come by it

 private:
  static void connect();  // each link to the one below, and torch to the topmost; the lock is held
};

}  // namespace waterflow

// The one hook that the tests' own extension (tests/native) has: `witness` stands above all others, and sees every
// request of the process; with null nobody does. It is exported, and nothing here calls it.
extern "C" __attribute__((visibility("default"))) void waterflow_witness(waterflow::ChainedAllocator* witness);
