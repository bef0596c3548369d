#include "waterflow/executor/csrc/engine/shared_arena.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace waterflow {
namespace {

PageLedger ledger_of(const Arena* arena, bool behind) {
  if (arena == nullptr) return {0, 1, 0, behind};
  // Both ends of a GPU's arena have each page, at two addresses, at which it is the same between kernels alone
  // ("Virtual Aliasing Support" in CUDA's programming guide). So no two kernels that may run at the same time touch one
  // page, be it other bytes of it: there is a page more than steps are let in to hold, so that those of the two ends
  // lie apart, and a group waits where it comes to a page that a group of the other end has reached.
  return {arena->most(), arena->unit(), arena->backs() ? arena->unit() : 0, behind};
}

}  // namespace

SharedArena::SharedArena(int64_t most, const MakeArena& make_arena, std::function<void(bool all)> make_room,
                         bool behind, OrderFault fault)
    : order(fault),
      arena_(make_arena ? make_arena(most) : nullptr),
      make_room_(std::move(make_room)),
      pages_(ledger_of(arena_.get(), behind)) {
  if (arena_) arena_->resize(pages_.size());  // no page is there before it is touched
}

bool SharedArena::begin(int32_t end, int64_t height, int64_t capacity) {
  if (!arena_ || retired_) return false;
  try {
    fit_pages(end, height, capacity);
  } catch (const std::exception&) {
    retired_ = true;  // the system has no addresses or memory left: steps go on without plans
    return false;
  }
  if (!pages_.begin(end, height, capacity)) return false;
  if (!arena_->backs() || back(end, height)) return true;
  pages_.finish(end);
  return false;
}

bool SharedArena::back(int32_t end, int64_t height) {
  height = std::min(height, pages_.size());
  pages_.grow(end, height);  // also what is backed before there is no more
  make_room_(false);
  if (arena_->back(end, height)) return true;
  make_room_(true);
  return arena_->back(end, height);
}

void SharedArena::give_back() {
  arena_.reset();
  pages_ = ledger_of(nullptr, false);
}

void SharedArena::fit_pages(int32_t end, int64_t height, int64_t capacity) {
  const int64_t wanted = pages_.fit(end, height, capacity);
  if (wanted == pages_.size()) return;
  // The pages of the end that moves would lie in the middle, and nobody would know of them.
  const auto [from, until] = pages_.spare(1);
  arena_->discard(1, from, until);
  arena_->resize(wanted);
  pages_.resize(wanted);
}

void SharedArena::detach(int32_t end) noexcept {
  pages_.finish(end);
  try {
    arena_->detach(end);
  } catch (const std::exception&) {
    // What is held stays in the pages that both ends have: nobody takes a place there any more.
    retired_ = true;
    arena_->placer(1 - end).close();
  }
}

int64_t SharedArena::discard(int64_t bytes) {
  if (!arena_ || retired_) return 0;
  const int64_t before = pages_.pages();
  for (int32_t end = 0; end < 2; ++end) {
    const int64_t more = bytes - (before - pages_.pages());
    const auto [least, until] = pages_.spare(end);
    const int64_t from = std::max(least, (until - more) / pages_.whole_pages(1) * pages_.whole_pages(1));
    if (more <= 0 || from >= until) continue;
    arena_->discard(end, from, until);
    pages_.give_back(end, from);
  }
  return before - pages_.pages();
}

}  // namespace waterflow
