// The book of an arena's pages: how large the arena is, what the steps at its two ends reach, and which pages nobody
// needs any more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {

// All in bytes, counted from an end, 0 or 1. A step has pages as far as it has reached; they stay behind it for the
// next one, until they are given back. Pure book-keeping: no memory, no threads, no torch. Not thread-safe: the
// engine's lock guards it.
class PageLedger {
 public:
  // An arena of `size` bytes in pages of `page` bytes, the most that it has addresses for. Two steps hold at least
  // `apart` bytes less than its size. `behind`: the device may still use what the host has given back, so a step keeps
  // the pages that it has reached to its end.
  PageLedger(int64_t size, int64_t page, int64_t apart, bool behind)
      : page_(page), apart_(apart), most_(size), size_(size), behind_(behind) {}

  int64_t size() const { return size_; }
  int64_t room() const { return size_ - apart_; }  // for two steps that face each other
  int64_t whole_pages(int64_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }
  int64_t size_for(int64_t bytes) const { return whole_pages(bytes) + apart_; }
  bool standing(int32_t end) const { return ends_[end].standing; }

  // The size to have before a step of that height begins at an idle end. As large as what steps may hold: then the ends
  // take pages from each other, and none has to be given back in between; where both fit without that, larger is as
  // good. It stays as it is while a step stands at end 1, which a new size would move.
  int64_t fit(int32_t end, int64_t height, int64_t capacity) const {
    const int64_t both = height + ends_[1 - end].height;
    const int64_t wanted = both > capacity ? size_for(capacity) : std::max(size_, size_for(both));
    const int64_t lowest = whole_pages(end == 0 ? height : standing_height(0));
    return ends_[1].standing || wanted > most_ || lowest > wanted ? size_ : wanted;
  }
  // Both ends have the pages of the new size; those of end 1 have been given back.
  void resize(int64_t size) {
    if (ends_[1].standing) throw std::logic_error("an arena was resized under the step at its end 1");
    size_ = size;
    ends_[0].touched = std::min(ends_[0].touched, size);
    ends_[1].touched = 0;
  }

  // A step of that height begins at an idle end, unless the two could meet although they hold no more than `capacity`
  // together: then it returns false.
  bool begin(int32_t end, int64_t height, int64_t capacity) {
    if (std::min(height + standing_height(1 - end), capacity) > room()) return false;
    ends_[end] = {.standing = true, .height = height, .touched = ends_[end].touched};
    return true;
  }
  // It reaches so far, or holds so little. What it has reached has pages.
  void grow(int32_t end, int64_t bytes) {
    End& one = ends_[end];
    const int64_t now = std::min(size_, whole_pages(bytes));
    one.live = bytes;
    one.reached = std::max(one.reached, now);
    one.touched = std::max(one.touched, now);  // what it had reached before may have been given back since
  }
  void finish(int32_t end) { ends_[end].standing = false; }
  // The largest capacity up to `wanted` at which the steps that stand there cannot meet.
  int64_t capacity_up_to(int64_t wanted) const {
    return standing_height(0) + standing_height(1) > room() ? std::min(wanted, room()) : wanted;
  }

  // Bytes with pages, and those that the steps which stand there need at most, with one more of that height, if there
  // is one, at an idle end.
  int64_t pages() const { return std::min(size_, ends_[0].touched + ends_[1].touched); }
  int64_t needed() const { return std::min(size_, whole_pages(standing_height(0)) + whole_pages(standing_height(1))); }
  int64_t needed_with(int32_t end, int64_t height, int64_t capacity) const {
    return std::min(fit(end, height, capacity), whole_pages(height) + whole_pages(standing_height(1 - end)));
  }

  // Pages that nobody needs, as two distances from an end; the second is not above the first where there are none.
  std::pair<int64_t, int64_t> spare(int32_t end) const {
    return {in_use(end), std::min(ends_[end].touched, size_ - in_use(1 - end))};
  }
  // The pages from that distance up to the end of `spare` are no more.
  void give_back(int32_t end, int64_t from) {
    ends_[1 - end].touched = std::min(ends_[1 - end].touched, size_ - spare(end).second);
    ends_[end].touched = std::min(ends_[end].touched, from);
  }

  // Throws std::logic_error where two steps share a byte, or one stands on no page.
  void check() const {
    for (int32_t end = 0; end < 2; ++end) {
      const End& one = ends_[end];
      if (!one.standing || std::min(one.live, size_) <= one.touched) continue;
      throw std::logic_error("a step holds " + std::to_string(one.live) + " bytes and has pages for " +
                             std::to_string(one.touched));
    }
    if (!ends_[0].standing || !ends_[1].standing || ends_[0].live + ends_[1].live <= room()) return;
    throw std::logic_error("two steps hold " + std::to_string(ends_[0].live) + " and " + std::to_string(ends_[1].live) +
                           " bytes of " + std::to_string(room()));
  }

 private:
  struct End {
    bool standing = false;  // a step whose memory lies there
    int64_t height = 0;     // of that step, or of the last one, which the next may be like
    int64_t live = 0;       // what it holds
    int64_t reached = 0;    // the most that it held, in whole pages
    int64_t touched = 0;    // how far there may be pages
  };
  int64_t standing_height(int32_t end) const { return ends_[end].standing ? ends_[end].height : 0; }
  int64_t in_use(int32_t end) const {
    const End& one = ends_[end];
    return !one.standing ? 0 : behind_ ? one.reached : whole_pages(one.live);
  }

  int64_t page_, apart_, most_, size_;
  bool behind_;
  End ends_[2];
};

}  // namespace waterflow
