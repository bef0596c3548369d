// Where a request finds its memory: the tiers of the search, in order.
#include <algorithm>

#include "stream_allocator.h"

namespace waterflow {

const char* tier_name(Tier tier) {
  static const char* const names[TIERS] = {"own", "synchronized", "others", "grow", "coalesce", "fail"};
  return names[static_cast<size_t>(tier)];
}

std::string bytes_text(int64_t bytes) {
  static const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

// The lock was open: somebody may have removed the stream that asks.
void StreamAllocator::must_still_be(const Request& request, StreamId stream) const {
  if (clocks_.live(request.stream) && clocks_.stream(request.stream) == stream) return;
  throw UsageError("stream " + std::to_string(stream) + " was removed while it waited for memory");
}

Chunk* StreamAllocator::counted(Tier tier, Chunk* chunk) {
  if (chunk != nullptr) ++tiers_[static_cast<size_t>(tier)];
  return chunk;
}

Chunk* StreamAllocator::search(const Request& request, Lock& lock) {
  sets_.settle();
  if (Chunk* chunk = counted(Tier::own, from_own(request))) return chunk;
  if (Chunk* chunk = counted(Tier::synchronized, from_synchronized(request))) return chunk;
  if (clocks_.poll()) {
    sets_.promote();
    if (Chunk* chunk = counted(Tier::synchronized, from_synchronized(request))) return chunk;
  }
  if (Chunk* chunk = counted(Tier::others, from_others(request))) return chunk;
  if (Chunk* chunk = counted(Tier::grow, grow(request))) return chunk;
  if (Chunk* chunk = counted(Tier::coalesce, sync_and_coalesce(request, lock))) return chunk;
  ++tiers_[static_cast<size_t>(Tier::fail)];
  fail(request);
}

Chunk* StreamAllocator::cut(Chunk* chunk, const Request& request, SetId rest) {
  sets_.split(chunk, request.size, rest);
  return chunk;
}

Chunk* StreamAllocator::from_own(const Request& request) {
  Chunk* chunk = sets_.best(request.stream, request.size, options_.looks);
  if (chunk == nullptr) return nullptr;
  if (!WATERFLOW_PLANTED(options_.fault == Fault::no_rerecord)) return sets_.take_front(chunk, request.size);
  const bool own = chunk->uses.all([&](Use use) { return use.slot == request.stream; });
  chunk = sets_.take_front(chunk, request.size);
  if (own) chunk->uses = Uses();
  return chunk;
}

Chunk* StreamAllocator::from_synchronized(const Request& request) {
  Chunk* chunk = sets_.best(SYNCHRONIZED, request.size, options_.looks);
  if (chunk == nullptr) return nullptr;
  sets_.remove(chunk);
  return cut(chunk, request, SYNCHRONIZED);
}

// The chunk of another stream that costs the fewest waits, then the fewest new events, then the smallest.
Chunk* StreamAllocator::from_others(const Request& request) {
  Chunk* best = nullptr;
  std::array<int64_t, 3> least{};
  for (SetId set = APART; set < sets_.sets(); ++set) {
    if (set == SYNCHRONIZED || set == request.stream) continue;
    Chunk* chunk = sets_.best(set, request.size, options_.looks);
    if (chunk == nullptr) continue;
    std::array<int64_t, 3> cost{0, 0, chunk->size};
    for (int32_t i = 0; i < chunk->uses.size(); ++i) {
      const Use use = chunk->uses[i];
      if (clocks_.ordered(use, request.stream)) continue;
      ++cost[0];
      if (use.tick >= clocks_.now(use.slot)) ++cost[1];
    }
    if (best != nullptr && cost >= least) continue;
    best = chunk;
    least = cost;
  }
  if (best == nullptr) return nullptr;
  const SetId giver = best->set;
  sets_.remove(best);
  if (least[0] == 0) return cut(best, request, giver);
  wait_for_uses(request, best->uses);
  cut(best, request, request.stream);
  sets_.move_to(request.stream);
  sets_.promote();
  return best;
}

void StreamAllocator::wait_for_uses(const Request& request, const Uses& uses) {
  for (int32_t i = 0; i < uses.size(); ++i) clocks_.wait(request.stream, uses[i]);
}

Chunk* StreamAllocator::new_segment(int64_t bytes) {
  if (bytes > limit_ - grown_) return nullptr;
  const uintptr_t base = device_->reserve(bytes);
  if (base == 0) return nullptr;
  if (!device_->grow(base, bytes)) {
    device_->unreserve(base, bytes);
    return nullptr;
  }
  grown_ += bytes;
  auto segment = std::make_unique<Segment>();
  segment->base = base;
  segment->bytes = bytes;
  Chunk* chunk = segment->first = pool_.take();
  *chunk = Chunk();
  chunk->address = base;
  chunk->size = bytes;
  chunk->segment = segment.get();
  segments_.push_back(std::move(segment));
  return chunk;
}

Chunk* StreamAllocator::grow(const Request& request) {
  auto whole = [&](int64_t bytes) { return (bytes + granularity_ - 1) / granularity_ * granularity_; };
  const int64_t exact = whole(request.size);
  int64_t wanted = exact;
  if (request.size <= options_.small_segment / 2) {
    wanted = std::max(exact, whole(options_.small_segment));
  } else if (request.size <= options_.medium_segment / 2) {
    wanted = std::max(exact, whole(options_.medium_segment));
  }
  Chunk* chunk = new_segment(wanted);
  if (chunk == nullptr && wanted > exact) chunk = new_segment(exact);
  return chunk == nullptr ? nullptr : cut(chunk, request, request.stream);
}

// First without the host: the stream waits for all others, and neighbours of all sets become one. Then the host waits
// until whole segments are complete, and grows a new one in their place.
Chunk* StreamAllocator::sync_and_coalesce(const Request& request, Lock& lock) {
  if (Chunk* chunk = coalesce(request)) return chunk;
  if (!reclaim(request, lock)) return nullptr;
  // Others may have come while the lock was open.
  sets_.settle();
  if (Chunk* chunk = from_own(request)) return chunk;
  if (Chunk* chunk = from_synchronized(request)) return chunk;
  if (Chunk* chunk = from_others(request)) return chunk;
  return grow(request);
}

Chunk* StreamAllocator::coalesce(const Request& request) {
  if (sets_.free_bytes() < request.size) return nullptr;
  for (Slot slot = 0; slot < clocks_.slots(); ++slot) clocks_.wait(request.stream, {slot, sets_.last_use(slot)});
  for (auto& segment : segments_) sets_.merge_segment(*segment, request.stream);
  sets_.move_to(request.stream);
  sets_.promote();
  for (SetId set : {request.stream, SYNCHRONIZED, APART}) {
    if (Chunk* chunk = sets_.best(set, request.size, SizeBins::ALL)) {
      sets_.remove(chunk);
      return cut(chunk, request, set == APART ? request.stream : set);
    }
  }
  for (SetId set = 0; set < sets_.sets(); ++set) {
    if (Chunk* chunk = sets_.best(set, request.size, SizeBins::ALL)) {
      sets_.remove(chunk);
      return cut(chunk, request, request.stream);
    }
  }
  return nullptr;
}

bool StreamAllocator::reclaim(const Request& request, Lock& lock) {
  int64_t given = 0;
  Uses uses;
  for (const auto& segment : segments_) {
    if (!whole_free(*segment, false)) continue;
    given += segment->bytes;
    for (const Chunk* chunk = segment->first; chunk != nullptr; chunk = chunk->after) {
      for (int32_t i = 0; i < chunk->uses.size(); ++i) clocks_.add_use(uses, chunk->uses[i]);
    }
  }
  const int64_t room = limit_ - grown_ + given;
  if (given == 0 || (request.size + granularity_ - 1) / granularity_ * granularity_ > room) return false;
  const StreamId stream = clocks_.stream(request.stream);
  std::vector<EventId> events;
  for (int32_t i = 0; i < uses.size(); ++i) events.push_back(clocks_.pin(uses[i]));
  lock.unlock();
  for (EventId event : events) {
    if (event != 0) device_->synchronize(event);
  }
  lock.lock();
  clocks_.poll();
  for (size_t i = 0; i < events.size(); ++i) clocks_.unpin();
  must_still_be(request, stream);
  sets_.promote();
  trim_locked();
  return true;
}

void StreamAllocator::fail(const Request& request) {
  sets_.settle();
  const std::string text =
      "there is no room for " + bytes_text(request.bytes) + " on stream " +
      std::to_string(clocks_.stream(request.stream)) + "; " + bytes_text(held_) + " are held, " +
      bytes_text(grown_ - held_) + " are free in pieces of up to " + bytes_text(sets_.largest()) +
      (limit_ == NO_LIMIT ? ", and the device has no more" : ", and the limit is " + bytes_text(limit_)) +
      ". Lower the batch size, or raise the limit.";
  throw OutOfMemory(text + "\n" + map_locked(64), request.size, limit_);
}

}  // namespace waterflow
