// A device without memory: addresses, logical clocks, and a check of every access. Plans for any capacity on a laptop.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/device.h"

namespace waterflow {

// The stretch of a stream's work between two of its events: what lies in stretch `tick` runs before event `tick`.
struct Stretch {
  StreamId stream = -1;
  int64_t tick = 0;
};

// Two accesses to one byte, one of them a write, with nothing that orders them.
struct Race : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thread-safe. Work takes no time and completes when it is told to, so any stream can be stalled for as long as wanted.
class SimulatedDevice : public Device {
 public:
  explicit SimulatedDevice(int64_t capacity, int64_t granularity = int64_t{2} << 20);

  int64_t granularity() const override { return granularity_; }
  uintptr_t reserve(int64_t bytes) override;
  void unreserve(uintptr_t base, int64_t bytes) override;
  bool grow(uintptr_t at, int64_t bytes) override;
  // Throws Race where work that touched this memory is not known to be complete.
  void shrink(uintptr_t at, int64_t bytes) override;

  StreamId add_stream() override;
  void remove_stream(StreamId stream) override;
  EventId record(StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool complete(EventId event) override;
  // The host would block until the work is done; so it is done.
  void synchronize(EventId event) override;
  void forget(EventId event) override;

  // -- the work
  // Work issued on `stream` now touches these bytes. Throws Race, or std::out_of_range where no memory is behind them.
  void access(StreamId stream, uintptr_t at, int64_t bytes, bool write = true);
  // The device gets as far as this event, and as far as others must have got for that.
  void advance(EventId event);
  // The same with all that was issued on `stream`, or on every stream.
  void advance_stream(StreamId stream);
  void finish_all();

  // -- questions
  int64_t capacity() const { return capacity_; }
  int64_t grown() const;     // bytes that have memory behind them
  int64_t accesses() const;  // checked so far
  int64_t waits() const;     // issued so far
  // Walks everything; throws std::logic_error at what cannot be.
  void check() const;

 private:
  using Clock = std::vector<int64_t>;  // by stream: the last of its events that lies before
  struct Stream {
    int64_t tick = 1;  // the stretch that work issued now lies in
    std::shared_ptr<Clock> others = std::make_shared<Clock>();
    bool removed = false;
  };
  struct Event {
    Stretch last;
    std::shared_ptr<const Clock> others;  // shared with the stream until that waits again
  };
  // Who touched a range of bytes last: one write, and reads since then.
  struct Last {
    uintptr_t end = 0;
    std::optional<Stretch> write;
    std::vector<Stretch> reads;
  };
  using History = std::map<uintptr_t, Last>;

  Stream& live(StreamId stream);
  const Event& known(EventId event) const;
  static int64_t at(const Clock& clock, StreamId stream);
  static void join(Clock& clock, const Event& event);
  bool before(const Stretch& stretch, StreamId stream) const;
  bool backed(uintptr_t begin, uintptr_t end) const;
  void aligned(uintptr_t at, int64_t bytes) const;
  void within_reserved(uintptr_t at, int64_t bytes) const;
  void must_be_ordered(const Last& last, StreamId stream, bool write, uintptr_t begin, uintptr_t end) const;
  void note_read(uintptr_t begin, uintptr_t end, Stretch now);
  void split(uintptr_t at);
  History::iterator first_over(uintptr_t begin);

  mutable std::mutex lock_;
  const int64_t capacity_, granularity_;
  int64_t grown_ = 0, accesses_ = 0, waits_ = 0;
  uintptr_t next_address_;
  std::map<uintptr_t, uintptr_t> reserved_, backed_;  // begin to end
  std::vector<Stream> streams_;
  std::unordered_map<EventId, Event> events_;
  EventId next_event_ = 1;
  Clock done_;  // what the device has done
  Clock seen_;  // what the host has learned of that: it issues nothing earlier
  History history_;
};

}  // namespace waterflow
