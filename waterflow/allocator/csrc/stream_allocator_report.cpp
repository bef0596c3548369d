// What the allocator says about itself, and what it gives back.
#include <algorithm>

#include "stream_allocator.h"

namespace waterflow {
namespace {

using Guard = std::lock_guard<SpinLock>;

void must(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("stream allocator: ") + what);
}

}  // namespace

// -- giving back

bool StreamAllocator::whole_free(const Segment& segment, bool complete) const {
  if (segment.live > 0) return false;
  for (const Chunk* chunk = segment.first; complete && chunk != nullptr; chunk = chunk->after) {
    if (!chunk->uses.all([&](Use use) { return clocks_.complete(use); })) return false;
  }
  return true;
}

void StreamAllocator::drop_segment(size_t index) {
  auto segment = std::move(segments_[index]);
  segments_[index] = std::move(segments_.back());
  segments_.pop_back();
  for (Chunk* chunk = segment->first; chunk != nullptr;) {
    Chunk* after = chunk->after;
    sets_.remove(chunk);
    pool_.give(chunk);
    chunk = after;
  }
  device_->shrink(segment->base, segment->bytes);
  device_->unreserve(segment->base, segment->bytes);
  grown_ -= segment->bytes;
}

int64_t StreamAllocator::trimmable() const {
  sets_.settle();
  int64_t sum = 0;
  for (const auto& segment : segments_) sum += whole_free(*segment, true) ? segment->bytes : 0;
  return sum;
}

int64_t StreamAllocator::trim_locked() {
  sets_.settle();
  int64_t given = 0;
  for (size_t i = segments_.size(); i-- > 0;) {
    if (!whole_free(*segments_[i], true)) continue;
    given += segments_[i]->bytes;
    drop_segment(i);
  }
  return given;
}

int64_t StreamAllocator::trim() {
  Guard guard(lock_);
  if (clocks_.poll()) sets_.promote();
  const int64_t given = trim_locked();
  // What is left may be free behind work that no event closes yet: a later call learns of its end by this one.
  for (Slot slot = 0; slot < clocks_.slots(); ++slot) {
    if (clocks_.live(slot) && sets_.last_use(slot) >= clocks_.now(slot)) clocks_.mark(slot);
  }
  return given;
}

// -- questions

AllocatorReport StreamAllocator::report() const {
  Guard guard(lock_);
  sets_.settle();
  AllocatorReport made;
  made.held = held_;
  made.peak = peak_;
  made.grown = grown_;
  made.synchronized = sets_.bytes(SYNCHRONIZED);
  made.apart = sets_.bytes(APART);
  for (Slot slot = 0; slot < clocks_.slots(); ++slot) {
    if (const int64_t bytes = sets_.bytes(slot); clocks_.live(slot) || bytes > 0) {
      made.unsynchronized.emplace_back(clocks_.stream(slot), bytes);
    }
  }
  made.largest_free = sets_.largest();
  made.waits = clocks_.waits();
  made.events = clocks_.events();
  made.segments = static_cast<int64_t>(segments_.size());
  made.requests = requests_;
  made.tiers = tiers_;
  return made;
}

int64_t StreamAllocator::held() const {
  std::lock_guard<SpinLock> guard(lock_);
  return held_;
}

int64_t StreamAllocator::idle() const {
  std::lock_guard<SpinLock> guard(lock_);
  return grown_ - held_;
}

int64_t StreamAllocator::limit() const {
  Guard guard(lock_);
  return limit_;
}

std::string StreamAllocator::map(int32_t width) const {
  Guard guard(lock_);
  sets_.settle();
  return map_locked(width);
}

std::string StreamAllocator::map_locked(int32_t width) const {
  constexpr size_t MOST = 64;  // segments, the largest
  if (width < 1) throw UsageError("a map is at least one character wide");
  std::vector<const Segment*> shown;
  for (const auto& segment : segments_) shown.push_back(segment.get());
  std::stable_sort(shown.begin(), shown.end(), [](auto* one, auto* other) { return one->bytes > other->bytes; });
  std::string text = std::to_string(shown.size()) + " segments, " + bytes_text(grown_) + " (" + bytes_text(held_) +
                     " held). # held, . free for all, digit: free for that stream, ? free behind several";
  if (shown.size() > MOST) shown.resize(MOST);
  for (const Segment* segment : shown) {
    std::string line(static_cast<size_t>(width), ' ');
    std::vector<int64_t> most(line.size());  // a cell shows what most of it is
    const double scale = static_cast<double>(width) / static_cast<double>(segment->bytes);
    for (const Chunk* chunk = segment->first; chunk != nullptr; chunk = chunk->after) {
      char sign = chunk->set == LIVE ? '#' : chunk->set == SYNCHRONIZED ? '.' : '?';
      if (chunk->set >= 0) sign = static_cast<char>('0' + clocks_.stream(chunk->set) % 10);
      const double begin = static_cast<double>(chunk->address - segment->base) * scale;
      const double end = begin + static_cast<double>(chunk->size) * scale;
      for (auto cell = static_cast<size_t>(begin); cell < line.size() && static_cast<double>(cell) < end; ++cell) {
        const double here = std::min(end, static_cast<double>(cell) + 1) - std::max(begin, static_cast<double>(cell));
        const auto share = static_cast<int64_t>(here * 1e6);
        if (share < most[cell]) continue;
        most[cell] = share;
        line[cell] = sign;
      }
    }
    text += "\n[" + line + "] " + bytes_text(segment->bytes);
  }
  return text;
}

void StreamAllocator::check_segment(const Segment& segment) const {
  uintptr_t at = segment.base;
  int64_t sum = 0;
  int32_t live = 0;
  const Chunk* before = nullptr;
  for (const Chunk* chunk = segment.first; chunk != nullptr; chunk = chunk->after) {
    must(chunk->address == at && chunk->before == before, "a gap or an overlap between neighbours");
    must(chunk->segment == &segment, "a chunk is in the wrong segment");
    must(chunk->size > 0 && chunk->size % options_.alignment == 0, "a size is wrong");
    if (chunk->set == LIVE) {
      ++live;
      must(live_.find(chunk->address) == chunk, "what is held cannot be found");
      must(!chunk->uses.empty(), "nobody uses what is held");
      must(chunk->uses.all([&](Use use) { return use.tick == OPEN || use.tick <= clocks_.now(use.slot); }),
           "a use from the future");
    }
    at += static_cast<uintptr_t>(chunk->size);
    sum += chunk->size;
    before = chunk;
  }
  must(sum == segment.bytes && live == segment.live, "a segment's sums are wrong");
}

void StreamAllocator::check() const {
  Guard guard(lock_);
  sets_.settle();
  clocks_.check();
  sets_.check();
  int64_t grown = 0, held = 0;
  for (const auto& segment : segments_) {
    check_segment(*segment);
    grown += segment->bytes;
  }
  std::vector<int64_t> by_slot(static_cast<size_t>(clocks_.slots()));
  live_.each([&](const Chunk* chunk) {
    held += chunk->size;
    by_slot[static_cast<size_t>(chunk->stream)] += chunk->size;
  });
  must(grown == grown_ && grown_ <= limit_, "the sum of segments is wrong");
  must(held == held_, "the sum of what is held is wrong");
  must(sets_.free_bytes() + held_ == grown_, "free and held do not make up the segments");
  for (Slot slot = 0; slot < clocks_.slots(); ++slot) {
    must(by_slot[static_cast<size_t>(slot)] == clocks_.held(slot), "a stream's sum is wrong");
  }
}

}  // namespace waterflow
