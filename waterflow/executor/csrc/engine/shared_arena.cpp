#include "waterflow/executor/csrc/engine/shared_arena.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "waterflow/executor/csrc/engine/step_run.h"

namespace waterflow {
SharedArena::SharedArena(int32_t lanes, int64_t capacity, int64_t most, const MakeArena& make_arena, bool behind,
                         OrderFault fault)
    : admission(capacity), order(fault), lanes_(lanes), behind_(behind), wanted_(capacity) {
  if (!make_arena) return;
  pages_ = make_arena(most);
  pages_->resize(size_for(most));  // no page is there before it is touched
}

void SharedArena::begin(int32_t index, int64_t job, const GroupPlan& plan, bool plannable) {
  ArenaEnd& mine = ends_[index];
  mine.job = job;
  mine.largest = plan.heights.largest();
  mine.planned = false;
  if (pages_ && plannable && !retired_) {
    try {
      fit_pages(index, mine.largest);
    } catch (const std::exception&) {
      retired_ = true;  // the system has no addresses or memory left: steps go on without plans
      grow(index);
      return;
    }
    const ArenaEnd& facing = ends_[1 - index];
    const int64_t beside = facing.job >= 0 && facing.planned ? facing.largest : 0;
    // Admission lets both in group by group; they share no byte as long as the arena has what they are admitted to.
    mine.planned = std::min(mine.largest + beside, admission.capacity()) <= room();
    if (mine.planned && pages_->backs()) {
      const int64_t height = std::min(mine.largest, pages_->size());
      mine.touched = std::max(mine.touched, whole_pages(height));  // also what is backed before there is no more
      if (!pages_->back(index, height)) {
        make_room();
        mine.planned = pages_->back(index, height);
      }
    }
  }
  grow(index);
}

// While an end is idle that can move, the arena is made as large as what steps may hold: then the ends take pages from
// each other, and none has to be given back in between. Larger is as good where both fit without.
void SharedArena::fit_pages(int32_t index, int64_t height) {
  if (index != 1 && ends_[1].job >= 0) return;
  const int64_t both = height + ends_[1 - index].largest;
  const int64_t capacity = admission.capacity();
  const int64_t wanted = both > capacity ? size_for(capacity) : std::max(pages_->size(), size_for(both));
  if (wanted == pages_->size() || wanted > pages_->most()) return;
  if (admission.pending_capacity() || whole_pages(ends_[0].job >= 0 ? ends_[0].largest : 0) > wanted) return;
  // The pages of the end that moves would lie in the middle, and nobody would know of them.
  pages_->discard(1, 0, std::min(ends_[1].touched, pages_->size() - in_use(ends_[0])));
  pages_->resize(wanted);
  ends_[0].touched = std::min(ends_[0].touched, wanted);
  ends_[1].touched = 0;
}

void SharedArena::grow(int32_t index) {
  ArenaEnd& mine = ends_[index];
  if (mine.planned) mine.touched = std::max(mine.touched, whole_pages(held(mine)));
}

void SharedArena::finish(int32_t index) {
  ends_[index].job = -1;
  ends_[index].planned = false;
  if (wanted_ > admission.capacity()) set_capacity(wanted_);
}

void SharedArena::set_capacity(int64_t bytes) {
  wanted_ = bytes;
  if (pages_ && ends_[0].planned && ends_[1].planned && ends_[0].largest + ends_[1].largest > room()) {
    bytes = std::min(bytes, room());
  }
  admission.set_capacity(bytes);
}

void SharedArena::detach(int32_t index) noexcept {
  ends_[index].planned = false;
  try {
    pages_->detach(index);
  } catch (const std::exception&) {
    // What is held stays in the pages that both ends have: nobody takes a place there any more.
    retired_ = true;
    pages_->placer(1 - index).close();
  }
}

void SharedArena::check() const {
  admission.check();
  if (!pages_ || !ends_[0].planned || !ends_[1].planned) return;
  if (held(ends_[0]) + held(ends_[1]) > room()) {
    throw std::logic_error("two steps hold " + std::to_string(held(ends_[0])) + " and " +
                           std::to_string(held(ends_[1])) + " bytes of " + std::to_string(room()));
  }
}

int64_t SharedArena::pages_in_use() const {
  if (!pages_) return 0;
  return std::min(pages_->size(), ends_[0].touched + ends_[1].touched);
}

int64_t SharedArena::held_elsewhere() const {
  int64_t bytes = 0;
  for (const auto& end : ends_) {
    if (end.job >= 0 && !end.planned) bytes += held(end);
  }
  return bytes;
}

// What may be live on an end: a device that runs behind still uses what the host has given back.
int64_t SharedArena::in_use(const ArenaEnd& end) const {
  return !end.planned ? 0 : behind_ ? end.touched : whole_pages(held(end));
}

void SharedArena::discard() {
  if (!pages_ || retired_) return;
  const int64_t keep[2] = {in_use(ends_[0]), in_use(ends_[1])};
  for (int32_t i = 0; i < 2; ++i) {
    // The other end may stand on pages that this one touched before it.
    const int64_t until = std::min(ends_[i].touched, pages_->size() - keep[1 - i]);
    pages_->discard(i, keep[i], until);
  }
  for (int32_t i = 0; i < 2; ++i) ends_[i].touched = std::min(ends_[i].touched, keep[i]);
}

}  // namespace waterflow
