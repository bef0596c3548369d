// Arenas on every device, two ends that face each other over the same memory; and all ranges of planned addresses in
// the process, by which a request is given back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "waterflow/allocator/csrc/planned/placer.h"

namespace waterflow {

// One arena, as shared arenas use it. End 0 grows up from its origin, end 1 down from its own. Each end has addresses
// of its own, which never change; both see the same memory, from opposite sides, so they share no byte while their
// heights add up to no more than the size. Not thread-safe: the engine's lock guards it.
class Arena {
 public:
  virtual ~Arena() = default;

  virtual int64_t most() const = 0;  // bytes that it has addresses for
  virtual int64_t size() const = 0;
  virtual int64_t unit() const = 0;  // of memory: a page
  // At least `bytes`, in whole units. End 1 must be idle, and end 0 stand no higher than the new size. No address
  // changes.
  virtual void resize(int64_t bytes) = 0;
  // Who serves the requests of an end's step.
  virtual Placer& placer(int32_t end) = 0;
  // An idle end is about to grow to `bytes`: from here on there is memory behind them. False where the device has none
  // left. Where pages come when they are touched there is nothing to do.
  virtual bool back(int32_t end, int64_t bytes) = 0;
  // Whether memory is behind an end's addresses once `back` has been called, and not when it is touched.
  virtual bool backs() const = 0;
  // Gives back the memory that lies wholly between two distances from an end. What was there is gone.
  virtual void discard(int32_t end, int64_t from, int64_t to) = 0;
  // A step at an idle end has left something behind that is still held: it keeps its addresses, in memory of its own,
  // and the end moves to others.
  virtual void detach(int32_t end) = 0;
};

// Every range of planned addresses in the process, for releases that know nothing but an address.

// Thread-safe; releases take a lock only for what was left behind.
class PlannedRanges {
 public:
  // Throws std::runtime_error where there are too many.
  static void add(Placer* placer);
  static void remove(const Placer* placer);
  // A range is kept until nothing in it is held; then `give_back` is called. Once its step is over, `discard` is called
  // for what lies between its live requests. `instead`, where there is one, takes its place among the ranges of arenas.
  static void keep(std::unique_ptr<Placer> placer, std::function<void()> give_back,
                   std::function<void(char* from, char* to)> discard = nullptr, Placer* instead = nullptr);
  // Looks at all that is kept: to be called when a step is over whose range is.
  static void sweep();

  // In a forked child: what is there is the parent's, and nobody may give it back.
  static void begin_anew();
  static bool of_parents(const void* address);
};

// Gives back a planned request by its address alone, on any thread. False where no arena has that address.
bool release_planned(void* address);

// Bytes that steps left behind and somebody still holds.
int64_t detached_bytes();

}  // namespace waterflow
