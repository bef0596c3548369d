#include "waterflow/allocator/csrc/stream/stream_clocks.h"

#include <algorithm>
#include <exception>

#include "waterflow/allocator/csrc/errors.h"

namespace waterflow {
namespace {

constexpr int SLOT_BITS = 16;
constexpr size_t MANY_EVENTS = 64;  // kept for one stream before the device is asked which are complete

}  // namespace

StreamClocks::~StreamClocks() {
  try {
    for (auto& slot : slots_) {
      for (const auto& event : slot.events) device_.forget(event.id);
    }
    for (EventId event : to_forget_) device_.forget(event);
  } catch (const std::exception&) {
    // A device that fails now keeps its events; nobody can do more about it here.
  }
}

Slot StreamClocks::no_such_stream(StreamId stream) const {
  const auto index = static_cast<size_t>(stream);
  const bool removed = index < slot_of_.size() && slot_of_[index] == -2;
  throw UsageError("stream " + std::to_string(stream) + (removed ? " was removed" : " is not known here") +
                   "; add a stream before it is named, and name it no more once it is removed");
}

// A slot to be passed on, or a new one.
Slot StreamClocks::place() {
  for (Slot slot = 0; slot < slots(); ++slot) {
    const auto& old = state(slot);
    const bool over = done_[static_cast<size_t>(slot)] >= old.tick - 1 && old.held == 0;
    if (!old.live && (over || WATERFLOW_PLANTED(fault_ == Fault::reused_handle))) return slot;
  }
  if (slots() >= (1 << SLOT_BITS)) {
    throw UsageError("there are " + std::to_string(slots()) + " streams with unfinished work; remove none before " +
                     "its work is done, or use fewer");
  }
  slots_.emplace_back();
  done_.push_back(0);
  floor_.push_back(0);
  return slots() - 1;
}

Slot StreamClocks::add(StreamId stream) {
  const auto index = static_cast<size_t>(stream);
  if (stream < 0 || (index < slot_of_.size() && slot_of_[index] != -1)) {
    throw UsageError("stream " + std::to_string(stream) + " cannot be added: a number is given to one stream, once");
  }
  if (index >= slot_of_.size()) slot_of_.resize(index + 1, -1);
  const Slot slot = place();
  auto& made = state(slot);
  made.stream = stream;
  made.live = true;
  made.known = std::make_shared<Clock>();
  slot_of_[index] = slot;
  for (Slot other = 0; other < slots(); ++other) {
    if (other != slot) wait(slot, {other, floor_[static_cast<size_t>(other)]});
  }
  renew_floor();
  return slot;
}

void StreamClocks::remove(Slot slot) {
  mark(slot);
  auto& removed = state(slot);
  removed.live = false;
  slot_of_[static_cast<size_t>(removed.stream)] = -2;
  renew_floor();
}

void StreamClocks::join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

const StreamClocks::Event& StreamClocks::event(Use use) const {
  const auto& giver = state(use.slot);
  return giver.events[static_cast<size_t>(use.tick - giver.first)];
}

bool StreamClocks::covered(Use earlier, Use later) const {
  if (earlier.slot == later.slot) return earlier.tick <= later.tick;
  if (complete(earlier)) return true;
  if (complete(later)) return false;
  // An event that is still to be recorded will know all that its stream knows now.
  const auto& known = later.tick < now(later.slot) ? *event(later).known : *state(later.slot).known;
  return earlier.tick <= at(known, earlier.slot);
}

void StreamClocks::add_use(Uses& uses, Use use) const {
  for (int32_t i = 0; i < uses.size();) {
    if (covered(use, uses[i])) return;
    if (covered(uses[i], use)) {
      uses.erase(i);
    } else {
      ++i;
    }
  }
  uses.push(use);
}

Mark StreamClocks::mark(Slot slot) {
  auto& self = state(slot);
  if (self.events.size() >= MANY_EVENTS && self.events.size() % MANY_EVENTS == 0) poll();
  self.events.push_back({device_.record(self.stream), self.known});
  ++events_;
  return (self.tick++ << SLOT_BITS) | slot;
}

Use StreamClocks::at_mark(Mark mark) const {
  const Use use{static_cast<Slot>(mark & ((1 << SLOT_BITS) - 1)), mark >> SLOT_BITS};
  if (mark < 0 || use.slot >= slots() || use.tick < 1 || use.tick >= now(use.slot)) {
    throw UsageError("there is no mark " + std::to_string(mark) + "; wait for what mark() returned here");
  }
  return use;
}

bool StreamClocks::wait(Slot slot, Use use) {
  if (ordered(use, slot)) return false;
  if (use.tick >= now(use.slot)) mark(use.slot);
  if (!WATERFLOW_PLANTED(fault_ == Fault::dropped_wait)) device_.wait(stream(slot), event(use).id);
  ++waits_;
  waited(slot, use);
  return true;
}

void StreamClocks::waited(Slot slot, Use use) {
  if (ordered(use, slot)) return;
  auto& self = state(slot);
  if (self.known.use_count() > 1) self.known = std::make_shared<Clock>(*self.known);
  join(*self.known, *event(use).known);
  auto& own = *self.known;
  if (own.size() <= static_cast<size_t>(use.slot)) own.resize(static_cast<size_t>(use.slot) + 1);
  own[static_cast<size_t>(use.slot)] = std::max(own[static_cast<size_t>(use.slot)], use.tick);
  renew_floor();
}

void StreamClocks::renew_floor() {
  int32_t others = 0;
  for (const auto& slot : slots_) others += slot.live;
  for (Slot giver = 0; giver < slots(); ++giver) {
    int64_t least = OPEN, most = 0;
    for (Slot slot = 0; slot < slots(); ++slot) {
      if (slot == giver || !live(slot)) continue;
      least = std::min(least, at(*state(slot).known, giver));
      most = std::max(most, at(*state(slot).known, giver));
    }
    const bool alone = others - live(giver) == 0;
    if (WATERFLOW_PLANTED(fault_ == Fault::synchronized_too_soon)) least = most;
    auto& floor = floor_[static_cast<size_t>(giver)];
    // Never less than before: who knew it knows it still, and who came since has waited for it.
    floor = std::max({floor, done_[static_cast<size_t>(giver)], alone ? 0 : least});
  }
}

void StreamClocks::finished(Use use) {
  join(done_, *event(use).known);
  auto& own = done_[static_cast<size_t>(use.slot)];
  own = std::max(own, use.tick);
}

bool StreamClocks::poll() {
  const Clock before = done_;
  for (Slot slot = 0; slot < slots(); ++slot) {
    auto& self = state(slot);
    // What is complete of a stream is a beginning of its events: search for where that ends.
    int64_t low = std::max(done_[static_cast<size_t>(slot)], self.first - 1), high = self.tick;
    if (low + 1 >= high || !device_.complete(event({slot, low + 1}).id)) continue;
    ++low;
    while (low + 1 < high) {
      const int64_t middle = low + (high - low) / 2;
      (device_.complete(event({slot, middle}).id) ? low : high) = middle;
    }
    finished({slot, low});
  }
  if (done_ == before) return false;
  forget_complete();
  renew_floor();
  return true;
}

void StreamClocks::forget_complete() {
  for (Slot slot = 0; slot < slots(); ++slot) {
    auto& self = state(slot);
    while (!self.events.empty() && self.first <= done_[static_cast<size_t>(slot)]) {
      to_forget_.push_back(self.events.front().id);
      self.events.pop_front();
      ++self.first;
    }
  }
  if (pins_ > 0) return;
  for (EventId event : to_forget_) device_.forget(event);
  to_forget_.clear();
}

EventId StreamClocks::pin(Use use) {
  ++pins_;
  if (complete(use)) return 0;
  if (use.tick >= now(use.slot)) mark(use.slot);
  return event(use).id;
}

void StreamClocks::unpin() {
  if (--pins_ == 0) forget_complete();
}

void StreamClocks::check() const {
  auto must = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("stream clocks: ") + what);
  };
  for (Slot slot = 0; slot < slots(); ++slot) {
    const auto& self = state(slot);
    const auto index = static_cast<size_t>(slot);
    must(self.first + static_cast<int64_t>(self.events.size()) == self.tick, "events and ticks do not match");
    must(self.first <= done_[index] + 1 && done_[index] < self.tick, "an event that is not complete was forgotten");
    must(done_[index] <= floor_[index] && floor_[index] < self.tick, "the floor is wrong");
    must(self.known->size() <= slots_.size(), "a clock is too long");
    must(self.held >= 0, "a stream holds less than nothing");
    for (Slot other = 0; other < slots(); ++other) {
      must(at(*self.known, other) < now(other), "a clock runs ahead");
      must(slot == other || !self.live || ordered({other, floor_[static_cast<size_t>(other)]}, slot),
           "what all are said to know, one does not");
    }
  }
}

}  // namespace waterflow
