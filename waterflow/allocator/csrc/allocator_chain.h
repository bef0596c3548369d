// Who stands before torch's CPU allocator: the lanes' allocator, and above it the one that counts in tests.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>

namespace waterflow {

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
