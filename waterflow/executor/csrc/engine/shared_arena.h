// Arenas under lanes: which steps may stand beside each other, and where their memory lies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/engine/cross_lane_fences.h"

namespace waterflow {

struct GroupPlan;

// One end of an arena, for the steps of one lane. Guarded by the engine's lock.
struct ArenaEnd {
  int64_t job = -1;      // whose step stands there; -1: idle
  bool planned = false;  // that step's memory lies at its planned addresses
  int64_t largest = 0;   // what the step reaches, or reached
  int64_t touched = 0;   // bytes from the end that may have pages behind them
};

// An arena with its one or two ends, and the admission to it. Without pages it is a book only.
class SharedArena {
 public:
  // Makes an arena with addresses for so many bytes.
  using MakeArena = std::function<std::unique_ptr<Arena>(int64_t most)>;

  // `lanes`: 1 or 2. Planned memory where arenas can be made, up to `most` bytes; on a device that runs `behind` the
  // host, or not.
  SharedArena(int32_t lanes, int64_t capacity, int64_t most, const MakeArena& make_arena, bool behind,
              OrderFault fault);

  Admission admission;
  std::function<void()> make_room;  // gives back what nobody needs; asked where the device has no page left
  CrossLaneFences order;            // between its two ends, on a device that runs behind the host
  int32_t lanes() const { return lanes_; }
  ArenaEnd& end(int32_t index) { return ends_[index]; }
  Placer& placer(int32_t end) { return pages_->placer(end); }

  // A step has been let in at an idle end. Decides whether its memory is planned: it is where the step has a plan for
  // it that fits beside the other end's.
  void begin(int32_t end, int64_t job, const GroupPlan& plan, bool plannable);
  // A larger capacity than the pages have room for comes when one of two steps that face each other there is over.
  void set_capacity(int64_t bytes);
  // It has been let into its next group.
  void grow(int32_t end);
  void finish(int32_t end);
  // What its step holds against its plan keeps its addresses, in memory of its own, as does what is left of the step.
  void detach(int32_t end) noexcept;

  void check() const;
  void give_back() { pages_.reset(); }  // all ends are idle, and stay so
  int64_t size() const { return pages_ ? pages_->size() : 0; }
  // What whole units may take beyond the bytes that steps were let in with, at both ends.
  int64_t rounding() const { return pages_ && pages_->backs() ? 2 * (pages_->unit() - 1) : 0; }
  // How far a group of that peak reaches on the device, in whole pages.
  int64_t reach(int64_t peak) const { return pages_->backs() ? whole_pages(peak) : peak; }
  int64_t pages_in_use() const;    // bytes of the arena that may have pages
  int64_t held_elsewhere() const;  // by steps here whose memory is not planned
  // Gives back all pages that nobody's live bytes lie on.
  void discard();

 private:
  int64_t held(const ArenaEnd& end) const { return end.job >= 0 ? admission.held_by(end.job) : 0; }
  int64_t in_use(const ArenaEnd& end) const;
  void fit_pages(int32_t end, int64_t height);
  // Both ends of a GPU's arena have each page, at two addresses, at which it is the same between kernels alone
  // ("Virtual Aliasing Support" in CUDA's programming guide). So no two kernels that may run at the same time touch one
  // page, be it other bytes of it: there is a page more than steps are let in to hold, so that those of the two ends
  // lie apart, and a group waits where it comes to a page that a group of the other end has reached.
  int64_t apart() const { return pages_->backs() ? pages_->unit() : 0; }
  int64_t room() const { return pages_->size() - apart(); }
  int64_t size_for(int64_t bytes) const { return whole_pages(bytes) + apart(); }
  int64_t whole_pages(int64_t bytes) const { return (bytes + pages_->unit() - 1) / pages_->unit() * pages_->unit(); }

  int32_t lanes_;
  bool behind_;
  bool retired_ = false;  // somebody holds what could not be moved: nothing is planned here any more
  int64_t wanted_;
  ArenaEnd ends_[2];
  std::unique_ptr<Arena> pages_;
};

}  // namespace waterflow
