// Which work runs after which: a vector clock per stream, and what the host knows to be complete.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "waterflow/allocator/csrc/stream/chunk.h"
#include "waterflow/allocator/csrc/device.h"
#include "waterflow/allocator/csrc/test_hooks.h"

namespace waterflow {

// Mistakes on purpose, so that tests can show that they are found (test_hooks.h). Nothing else sets one.
enum class Fault : int32_t {
  none,
  dropped_wait,
  no_rerecord,            // a chunk that was taken over keeps the giver's use
  free_under_allocator,   // a released chunk belongs to the stream that asked for it
  free_under_last_user,   // ... to the last that used it, whoever else still does
  synchronized_too_soon,  // after only one stream waited
  reused_handle,          // a new stream takes a removed one's place while that still works
  split_off_by_one,
  merge_across_sets,
};

// An event of the allocator: (slot, tick), good for ever as neither is given out twice.
using Mark = int64_t;

// Not thread-safe: the allocator's lock is around it.
class StreamClocks {
 public:
  StreamClocks(Device& device, Fault fault) : device_(device), fault_(fault) {}
  ~StreamClocks();

  // A new stream first waits for all that every other one has waited for.
  Slot add(StreamId stream);
  // Records the stream's last event. Its slot stays until that is complete and `passes_on` says so.
  void remove(Slot slot);
  Slot slot_of(StreamId stream) const {
    const auto index = static_cast<size_t>(stream);
    if (index < slot_of_.size() && slot_of_[index] >= 0) return slot_of_[index];
    return no_such_stream(stream);
  }

  int64_t now(Slot slot) const { return slots_[static_cast<size_t>(slot)].tick; }
  bool live(Slot slot) const { return slots_[static_cast<size_t>(slot)].live; }
  StreamId stream(Slot slot) const { return slots_[static_cast<size_t>(slot)].stream; }
  int32_t slots() const { return static_cast<int32_t>(slots_.size()); }
  // Set while live chunks are accounted to the stream: its slot may not pass on.
  int64_t& held(Slot slot) { return slots_[static_cast<size_t>(slot)].held; }
  int64_t held(Slot slot) const { return slots_[static_cast<size_t>(slot)].held; }

  bool complete(Use use) const { return use.tick <= done_[static_cast<size_t>(use.slot)]; }
  // What `slot` issues from now on runs after `use`.
  bool ordered(Use use, Slot slot) const {
    return use.slot == slot || complete(use) || use.tick <= at(*slots_[static_cast<size_t>(slot)].known, use.slot);
  }
  // The same for every live stream.
  bool ordered_for_all(Use use) const { return use.tick <= floor_[static_cast<size_t>(use.slot)]; }
  // `earlier` is over before `later`'s event: waiting for that one covers both.
  bool covered(Use earlier, Use later) const;
  // Adds a use, and drops what is covered by another.
  void add_use(Uses& uses, Use use) const;

  Mark mark(Slot slot);
  // The event behind a mark; throws UsageError for what was never recorded.
  Use at_mark(Mark mark) const;
  // Lets `slot` wait on the device for `use`: for its own event, or for one that is recorded now. True if it had to.
  bool wait(Slot slot, Use use);
  // The same where somebody else has issued the wait.
  void waited(Slot slot, Use use);
  // Asks the device what is complete by now; true if that is more than before.
  bool poll();
  // The event that makes `use` complete, 0 if it is; stays valid until `unpin`.
  EventId pin(Use use);
  void unpin();

  int64_t waits() const { return waits_; }
  int64_t events() const { return events_; }
  void check() const;

 private:
  using Clock = std::vector<int64_t>;  // by slot
  struct Event {
    EventId id;
    std::shared_ptr<const Clock> known;
  };
  struct State {
    StreamId stream = -1;
    int64_t tick = 1;
    int64_t first = 1;  // tick of the first event that is kept; those before are complete
    std::deque<Event> events;
    std::shared_ptr<Clock> known = std::make_shared<Clock>();
    int64_t held = 0;
    bool live = false;
  };

  [[noreturn]] Slot no_such_stream(StreamId stream) const;
  static int64_t at(const Clock& clock, Slot slot) {
    return static_cast<size_t>(slot) < clock.size() ? clock[static_cast<size_t>(slot)] : 0;
  }
  State& state(Slot slot) { return slots_[static_cast<size_t>(slot)]; }
  const State& state(Slot slot) const { return slots_[static_cast<size_t>(slot)]; }
  const Event& event(Use use) const;
  static void join(Clock& clock, const Clock& other);
  void finished(Use use);
  void forget_complete();
  void renew_floor();
  Slot place();

  Device& device_;
  const Fault fault_;
  std::deque<State> slots_;
  std::vector<Slot> slot_of_;  // by stream: -1 never seen, -2 removed
  Clock done_, floor_;
  std::vector<EventId> to_forget_;
  int32_t pins_ = 0;
  int64_t waits_ = 0, events_ = 0;
};

}  // namespace waterflow
