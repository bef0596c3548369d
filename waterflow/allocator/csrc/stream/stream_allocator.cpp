#include "waterflow/allocator/csrc/stream/stream_allocator.h"

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

// The lock is held, so that this is no more than an addition.
void add(std::atomic<int64_t>& sum, int64_t bytes) {
  sum.store(sum.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
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
  const Slot slot = clocks_.add(stream);
  sets_.add_slot(slot);
  sets_.promote();
  lanes_.resize(static_cast<size_t>(clocks_.slots()));
  lanes_[static_cast<size_t>(slot)] = 0;
}

void StreamAllocator::set_lane(StreamId stream, bool lane) {
  Guard guard(lock_);
  const Slot slot = clocks_.slot_of(stream);
  int32_t& count = lanes_[static_cast<size_t>(slot)];
  count += lane ? 1 : -1;
  if (count > 0) return;
  sets_.settle();
  live_.each([&](Chunk* chunk) {
    if (chunk->set == LIVE && chunk->stream == slot && std::exchange(chunk->lane, false)) {
      add(held_by_lanes_, -chunk->size);
    }
  });
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
  chunk->lane = lanes_[static_cast<size_t>(request.stream)] > 0;
  add(held_, chunk->size);
  if (chunk->lane) add(held_by_lanes_, chunk->size);
  peak_ = std::max(peak_, held_.load(std::memory_order_relaxed));
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
  add(held_, -chunk->size);
  if (chunk->lane) add(held_by_lanes_, -chunk->size);
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

// Where a request finds its memory: the tiers of the search, in order.

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
  // The device may look at what is held without it, and others than lanes have no limit there.
  const int64_t others = lanes_[static_cast<size_t>(request.stream)] > 0 ? 0 : exact;
  asked_ = others;
  Chunk* chunk = new_segment(wanted);
  if (chunk == nullptr && wanted > exact) chunk = new_segment(exact);
  asked_ = 0;
  return chunk == nullptr ? nullptr : cut(chunk, request, request.stream);
}

// First without the host: the stream waits for all others, and neighbours of all sets become one. Then the host waits
// until whole segments are complete, and grows a new one in their place.
Chunk* StreamAllocator::sync_and_coalesce(const Request& request, Lock& lock) {
  if (Chunk* chunk = coalesce(request)) return chunk;
  const StreamId stream = clocks_.stream(request.stream);
  const int64_t whole = (request.size + granularity_ - 1) / granularity_ * granularity_;
  if (!reclaim(whole - (limit_ - grown_), lock)) return nullptr;
  must_still_be(request, stream);
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

// Waits until all segments that are free are complete, and gives them back, where those are so many bytes; the lock is
// open meanwhile.
bool StreamAllocator::reclaim(int64_t least, Lock& lock) {
  int64_t given = 0;
  Uses uses;
  for (const auto& segment : segments_) {
    if (!whole_free(*segment, false)) continue;
    given += segment->bytes;
    for (const Chunk* chunk = segment->first; chunk != nullptr; chunk = chunk->after) {
      for (int32_t i = 0; i < chunk->uses.size(); ++i) clocks_.add_use(uses, chunk->uses[i]);
    }
  }
  if (given == 0 || given < least) return false;
  std::vector<EventId> events;
  for (int32_t i = 0; i < uses.size(); ++i) events.push_back(clocks_.pin(uses[i]));
  lock.unlock();
  for (EventId event : events) {
    if (event != 0) device_->synchronize(event);
  }
  lock.lock();
  clocks_.poll();
  for (size_t i = 0; i < events.size(); ++i) clocks_.unpin();
  sets_.promote();
  trim_locked();
  return true;
}

int64_t StreamAllocator::give_back() {
  Lock lock(lock_);
  sets_.settle();
  const int64_t before = grown_;
  reclaim(0, lock);
  return std::max<int64_t>(0, before - grown_);  // others may have grown it meanwhile
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

// What the allocator says about itself, and what it gives back.

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
  int64_t grown = 0, held = 0, lanes = 0;
  for (const auto& segment : segments_) {
    check_segment(*segment);
    grown += segment->bytes;
  }
  std::vector<int64_t> by_slot(static_cast<size_t>(clocks_.slots()));
  live_.each([&](const Chunk* chunk) {
    held += chunk->size;
    lanes += chunk->lane ? chunk->size : 0;
    by_slot[static_cast<size_t>(chunk->stream)] += chunk->size;
  });
  must(grown == grown_ && grown_ <= limit_, "the sum of segments is wrong");
  must(held == held_ && lanes == held_by_lanes_, "the sum of what is held is wrong");
  must(sets_.free_bytes() + held_ == grown_, "free and held do not make up the segments");
  for (Slot slot = 0; slot < clocks_.slots(); ++slot) {
    must(by_slot[static_cast<size_t>(slot)] == clocks_.held(slot), "a stream's sum is wrong");
  }
}

}  // namespace waterflow
