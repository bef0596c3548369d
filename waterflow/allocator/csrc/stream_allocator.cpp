#include "stream_allocator.h"

#include <algorithm>
#include <utility>

namespace waterflow {
namespace {

using Guard = std::lock_guard<SpinLock>;

std::string hex(uintptr_t address) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%zx", static_cast<size_t>(address));
  return text;
}

AllocatorOptions checked(AllocatorOptions options) {
  if (options.alignment < 1 || (options.alignment & (options.alignment - 1)) != 0) {
    throw UsageError("an alignment is a power of two; " + std::to_string(options.alignment) + " was given");
  }
  if (options.limit < 0)
    throw UsageError("a limit is at least 0 bytes; " + std::to_string(options.limit) + " was given");
  return options;
}

}  // namespace

StreamAllocator::StreamAllocator(std::shared_ptr<Device> device, AllocatorOptions options)
    : device_(std::move(device)),
      options_(checked(options)),
      granularity_(device_->granularity()),
      clocks_(*device_, options.fault),
      sets_(clocks_, pool_, live_, options.alignment, options.fault, options.merge_at_once),
      limit_(options.limit) {
  if (granularity_ % options.alignment != 0) {
    throw UsageError("the device gives memory by " + std::to_string(granularity_) + " bytes; an alignment of " +
                     std::to_string(options.alignment) + " does not divide that");
  }
}

StreamAllocator::~StreamAllocator() {
  try {
    for (Slot slot = 0; slot < clocks_.slots(); ++slot) {
      const int64_t last = clocks_.live(slot) ? clocks_.now(slot) : clocks_.now(slot) - 1;
      if (EventId event = clocks_.pin({slot, last}); event != 0) device_->synchronize(event);
    }
    for (auto& segment : segments_) {
      device_->shrink(segment->base, segment->bytes);
      device_->unreserve(segment->base, segment->bytes);
    }
  } catch (const std::exception&) {
    // A device that fails here has nothing left to tell: whoever used it saw that before.
  }
}

void StreamAllocator::add_stream(StreamId stream) {
  Guard guard(lock_);
  clocks_.poll();
  sets_.add_slot(clocks_.add(stream));
  sets_.promote();
}

void StreamAllocator::remove_stream(StreamId stream) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  sets_.settle();
  clocks_.remove(slot);
  const int64_t last = clocks_.now(slot) - 1;
  live_.each([&](Chunk* chunk) {
    for (int32_t i = 0; i < chunk->uses.size(); ++i) {
      if (chunk->uses[i] == Use{slot, OPEN}) chunk->uses[i].tick = last;
    }
  });
}

int64_t StreamAllocator::rounded(int64_t bytes) const {
  constexpr int64_t MOST = int64_t{1} << 50;  // no device has that; sums stay far from overflow
  const int64_t size = std::min(std::max(bytes, int64_t{1}), MOST);
  return (size + options_.alignment - 1) & ~(options_.alignment - 1);
}

uintptr_t StreamAllocator::allocate(int64_t bytes, StreamId stream) {
  if (bytes < 0) throw UsageError("a request is for at least 0 bytes; " + std::to_string(bytes) + " were asked for");
  Lock lock(lock_);
  const Slot slot = clocks_.slot_of(stream);
  const Request request{bytes, rounded(bytes), slot};
  Chunk* chunk = sets_.take_aside(slot, request.size);
  const bool put_aside = chunk != nullptr;
  if (chunk == nullptr) chunk = from_own(request);
  if (chunk != nullptr) {
    ++tiers_[static_cast<size_t>(Tier::own)];
  } else {
    chunk = search(request, lock);
  }
  return hand_out(chunk, request, put_aside);
}

uintptr_t StreamAllocator::hand_out(Chunk* chunk, const Request& request, bool put_aside) {
  chunk->set = LIVE;
  chunk->stream = request.stream;
  chunk->id = ++requests_;
  // What this stream issues runs after all earlier uses, so its own stands for them.
  const bool stale = WATERFLOW_PLANTED(options_.fault == Fault::no_rerecord) && !chunk->uses.empty();
  if (!stale) chunk->uses.set({request.stream, OPEN});
  ++chunk->segment->live;
  if (!put_aside) live_.insert(chunk);
  held_ += chunk->size;
  peak_ = std::max(peak_, held_);
  clocks_.held(request.stream) += chunk->size;
  return chunk->address;
}

Chunk* StreamAllocator::live_chunk(uintptr_t address) const {
  if (Chunk* chunk = live_.find(address); chunk != nullptr && chunk->set == LIVE) return chunk;
  for (const auto& segment : segments_) {
    if (address < segment->base || address >= segment->base + static_cast<uintptr_t>(segment->bytes)) continue;
    const Chunk* chunk = segment->first;
    while (chunk->after != nullptr && chunk->after->address <= address) chunk = chunk->after;
    if (chunk->set != LIVE) {
      throw UsageError(hex(address) + " lies in free memory; it was released already, or never handed out");
    }
    throw UsageError(hex(address) + " lies inside of a block; name the address that allocate() returned, " +
                     hex(chunk->address));
  }
  throw UsageError(hex(address) + " is not from this allocator; name an address that its allocate() returned");
}

// The uses of a released chunk, and the set in which it waits for the next.
void StreamAllocator::find_owner(Chunk* chunk) {
  auto& uses = chunk->uses;
  const Slot allocated = chunk->stream;
  if (WATERFLOW_PLANTED(options_.fault == Fault::free_under_allocator)) uses.set({allocated, OPEN});
  if (WATERFLOW_PLANTED(options_.fault == Fault::free_under_last_user)) uses.set(uses[uses.size() - 1]);
  if (uses.size() == 1) {
    const Slot slot = uses[0].slot;
    if (uses[0].tick == OPEN) {
      uses[0].tick = clocks_.now(slot);
      if (sets_.put_aside(chunk, slot)) return;
    }
  } else {
    Uses last;
    for (int32_t i = 0; i < uses.size(); ++i) {
      Use use = uses[i];
      if (use.tick == OPEN) use.tick = clocks_.now(use.slot);
      clocks_.add_use(last, use);
    }
    uses = last;
  }
  live_.erase(chunk->address);
  sets_.insert(chunk, sets_.home(uses));
}

void StreamAllocator::release(uintptr_t address) {
  Guard guard(lock_);
  Chunk* chunk = live_chunk(address);
  --chunk->segment->live;
  held_ -= chunk->size;
  clocks_.held(chunk->stream) -= chunk->size;
  find_owner(chunk);
}

void StreamAllocator::use(uintptr_t address, StreamId stream) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  Chunk* chunk = live_chunk(address);
  auto& uses = chunk->uses;
  for (int32_t i = 0; i < uses.size(); ++i) {
    if (uses[i].slot == slot) uses.erase(i--);
  }
  uses.push({slot, OPEN});
}

void StreamAllocator::end_use(uintptr_t address, StreamId stream) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  Chunk* chunk = live_chunk(address);
  for (int32_t i = 0; i < chunk->uses.size(); ++i) {
    if (chunk->uses[i].slot != slot) continue;
    chunk->uses[i].tick = clocks_.now(slot);
    return;
  }
  throw UsageError("stream " + std::to_string(stream) + " does not use " + hex(address) +
                   "; only a use that was begun can end");
}

Mark StreamAllocator::mark(StreamId stream) {
  Guard guard(lock_);
  return clocks_.mark(clocks_.slot_of(stream));
}

void StreamAllocator::wait(StreamId stream, Mark mark) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  const Use use = clocks_.at_mark(mark);
  if (clocks_.wait(slot, use)) sets_.promote();
}

void StreamAllocator::waited(StreamId stream, Mark mark) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  clocks_.waited(slot, clocks_.at_mark(mark));
  sets_.promote();
}

void StreamAllocator::set_limit(int64_t bytes) {
  Guard guard(lock_);
  if (bytes < 0) throw UsageError("a limit is at least 0 bytes; " + std::to_string(bytes) + " was given");
  clocks_.poll();
  if (const int64_t kept = grown_ - trimmable(); bytes < kept) {
    throw UsageError("a limit of " + bytes_text(bytes) + " is below the " + bytes_text(kept) +
                     " in segments that are in use (" + bytes_text(held_) + " of that is held); release memory first");
  }
  if (grown_ > bytes) trim_locked();
  limit_ = bytes;
}

}  // namespace waterflow
