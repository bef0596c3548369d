// Arenas under lanes: where the memory of the steps of two lanes lies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/executor/csrc/engine/cross_lane_fences.h"
#include "waterflow/executor/csrc/engine/page_ledger.h"

namespace waterflow {

// An arena for two lanes, one at each end, with addresses for all that steps may hold. Which pages are there follows
// what runs. Where no arena can be made nothing is planned. Guarded by the engine's lock.
class SharedArena {
 public:
  // Makes an arena with addresses for so many bytes.
  using MakeArena = std::function<std::unique_ptr<Arena>(int64_t most)>;

  // For up to `most` bytes, on a device that runs `behind` the host, or not. `make_room` gives back what nobody needs:
  // what is too much, or all of it, where the device has no page left.
  SharedArena(int64_t most, const MakeArena& make_arena, std::function<void(bool all)> make_room, bool behind,
              OrderFault fault);

  CrossLaneFences order;  // between its two ends, on a device that runs behind the host
  Placer& placer(int32_t end) { return arena_->placer(end); }

  // A step of that height, of which all hold at most `capacity` bytes, has been let in at an idle end. Returns whether
  // its memory is planned: it is where it cannot meet the other end's.
  bool begin(int32_t end, int64_t height, int64_t capacity);
  // It holds so much, now that it has been let into its next group.
  void grow(int32_t end, int64_t bytes) { pages_.grow(end, bytes); }
  void finish(int32_t end) { pages_.finish(end); }
  bool planned(int32_t end) const { return pages_.standing(end); }
  bool stands() const { return planned(0) || planned(1); }
  // What its step holds against its plan keeps its addresses, in memory of its own, as does what is left of the step.
  void detach(int32_t end) noexcept;

  const PageLedger& pages() const { return pages_; }
  void check() const { pages_.check(); }
  void give_back();  // both ends are idle, and stay so
  // How far a group of that peak reaches on the device, in whole pages.
  int64_t reach(int64_t peak) const { return arena_->backs() ? pages_.whole_pages(peak) : peak; }
  // What whole units may take beyond the bytes that steps were let in with, at both ends.
  int64_t rounding() const { return arena_ ? 2 * (arena_->unit() - 1) : 0; }
  // Gives back pages that nobody needs, so many bytes of them if there are; returns how many.
  int64_t discard(int64_t bytes);

 private:
  void fit_pages(int32_t end, int64_t height, int64_t capacity);
  bool back(int32_t end, int64_t height);

  std::unique_ptr<Arena> arena_;
  std::function<void(bool all)> make_room_;
  bool retired_ = false;  // somebody holds what could not be moved: nothing is planned here any more
  PageLedger pages_;
};

}  // namespace waterflow
