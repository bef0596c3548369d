// Jobs on two lanes in virtual time: real admission, barriers and fences over a device without memory
// (Simulation), and the clock of a device whose lanes share its rates (DeviceClock): a stated model of cost, never a
// measurement.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/simulated/simulated_device.h"
#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/engine/cross_lane_fences.h"

namespace waterflow {

// What keeps a lane busy: so long where nothing else runs, and the shares of the device's memory bandwidth and of its
// arithmetic that it uses meanwhile, in millionths.
struct Work {
  static constexpr int64_t kWhole = 1'000'000;
  int64_t nanoseconds = 0;
  int64_t memory = 0, compute = 0;
};

using ItemId = int64_t;  // counted from 0 in the order in which items were added

// Lanes are queues. An item starts once the one before it in its lane has ended, and all that it comes after. What runs
// at the same time runs at one speed, 1 / max(1, sum of memory shares, sum of compute shares): processor sharing, where
// one clock of progress serves all that runs (the virtual time of fair queueing, Demers, Keshav and Shenker 1989).
//
// All in integers, and exact: times are whole nanoseconds rounded down, what is cut off is carried on. Equal calls give
// equal times; what ends at the same time ends by lane number. Not thread-safe.
class DeviceClock {
 public:
  static constexpr int64_t kLongest = int64_t{1} << 42;  // nanoseconds of one item, more than an hour
  struct Done {
    ItemId item;
    int32_t lane;
    int64_t at;
  };

  explicit DeviceClock(int32_t lanes);

  // Starts now if it may. Throws std::invalid_argument for a lane or an item that is not there, and for work out of
  // bounds: time of 0 to kLongest, shares of 0 to Work::kWhole.
  ItemId add(int32_t lane, const Work& work, std::span<const ItemId> after = {});
  // Goes on to the next end, and starts what may then start, in no time; none where nothing runs. An item of no time
  // ends at the time at which it starts, by a call of its own.
  std::optional<Done> next();

  int64_t now() const { return now_; }
  // Nanoseconds of virtual time; -1 for what has not come yet. Throws std::out_of_range for an item that is not there.
  int64_t start_of(ItemId item) const { return items_.at(item).start; }
  int64_t end_of(ItemId item) const { return items_.at(item).end; }
  // Walks everything; throws std::logic_error at what cannot be.
  void check() const;

 private:
  struct Item {
    int32_t lane;
    Work work;
    int64_t start = -1, end = -1;
    int64_t missing = 0;     // items that it comes after and that have not ended
    int64_t followers = -1;  // the first of its edges
    bool ended() const { return end >= 0; }
  };
  struct Edge {
    ItemId follower;
    int64_t next;
  };
  struct Lane {
    std::deque<ItemId> queue;  // its front runs, or waits for others
    bool running = false;
  };
  struct Running {
    int64_t until;  // progress at which it ends
    int32_t lane;
    bool operator>(const Running& other) const { return std::tie(until, lane) > std::tie(other.until, other.lane); }
  };

  void start_front(int32_t lane);
  void advance(int64_t progress);

  std::vector<Item> items_;
  std::vector<Edge> edges_;
  std::vector<Lane> lanes_;
  std::priority_queue<Running, std::vector<Running>, std::greater<>> running_;
  int64_t memory_ = 0, compute_ = 0;  // shares of all that runs
  int64_t progress_ = 0;              // nanoseconds that an item would have done that ran from the beginning
  int64_t now_ = 0, millionths_ = 0;  // and the fraction of a nanosecond behind now_
};

// Bytes that a group reads or writes, counted from its lane's end of the arena.
struct Touch {
  int64_t offset, bytes;
  bool write;
};

// One step of a job, group by group. Group g is the operations work[g], one after the other, and touches
// touches[first[g]] up to touches[first[g + 1]], in this order.
struct SimulatedStep {
  Heights heights;
  std::vector<std::vector<Work>> work;
  std::vector<int64_t> first;
  std::vector<Touch> touches;
  int64_t copy_ns;  // of one batch, from the host

  // Throws std::invalid_argument for a group without work, and for touches that do not go by groups.
  SimulatedStep(Heights heights, std::vector<std::vector<Work>> work, std::vector<int64_t> first,
                std::vector<Touch> touches, int64_t copy_ns);
};

struct SimulationSettings {
  int64_t arena = 0;      // bytes
  int32_t run_ahead = 2;  // groups that a lane may hold beyond what its device has finished
  uint64_t seed = 0;
  int32_t stalled = 0;  // of 1,000 groups, so many take longer, by up to this, in which they use none of the rates:
  int64_t stall_ns = 0;
  // Whether the host tells from a finished group that its lane got so far, which then needs no wait. Without it all
  // that is ordered is ordered by waits: the stricter test.
  bool host_learns = false;
  OrderFault fault = OrderFault::none;
  bool early_issue = false;  // a mistake for tests to plant: groups do not wait for their barriers
};

// One group as it ran. Times in nanoseconds of virtual time; `waited` is the facing lane's event, or -1.
struct SimulatedSpan {
  int32_t job, step, group, lane;
  int64_t issued, start, end, peak, after;
};

struct SimulationResult {
  int64_t makespan = 0;
  int64_t alone = 0;              // what all groups would have taken one by one
  std::vector<int64_t> busy;      // by lane
  int64_t overlapped = 0;         // while two lanes or more were busy
  int64_t peak = 0;               // the most bytes that lanes held at once, as the device ran
  int64_t waits = 0;              // of groups for events of the facing lane
  std::vector<int32_t> steps;     // done, by job
  int64_t races = 0;              // accesses without an order to others; none, or something is wrong
  std::vector<std::string> told;  // the first of them, in words
  std::vector<SimulatedSpan> spans;
};

// The host issues groups at once, in the order in which admission offers room; each lane runs what it was given one by
// one, and all share the device's rates (DeviceClock). A job takes whichever lane is free when its step starts, has
// one batch on the device, and its next one is copied there, by an engine of its own, when the step is done. All in
// integers, and equal settings give equal runs: what ends at the same time is handled by lane, copies last; who waits
// for room comes first, then lanes by number, then steps that would start, the longest ready first.
//
// Not thread-safe; runs on the calling thread. `run` throws std::logic_error where groups can no longer go on.
class Simulation {
 public:
  explicit Simulation(const SimulationSettings& settings);
  ~Simulation();

  // A job of so many steps. Throws std::invalid_argument for a step that exceeds the arena.
  void add_job(std::shared_ptr<const SimulatedStep> step, int32_t steps);
  SimulationResult run();

 private:
  struct Job {
    int32_t number;
    std::shared_ptr<const SimulatedStep> step;
    int32_t steps, done = 0;
    std::vector<CounterBarrier> barriers;  // one a group: the group before, and room; the first also counts the batch
    int32_t lane = -1;                     // in mid-step
    int32_t group = 0;                     // the next one
    std::optional<EventId> last;           // behind the last step that was issued
    std::optional<EventId> copied;         // behind the copy of the next batch
    uintptr_t state, batch;
  };
  struct Lane {
    int32_t index = 0;  // and its end of the arena
    StreamId stream = -1;
    Job* job = nullptr;
    int64_t held = 0;
    std::deque<EventId> in_flight;  // behind groups that its device has not finished
  };

  int64_t held() const { return lanes_[0].held + lanes_[1].held; }
  bool has_enough(const Lane& lane) const { return std::ssize(lane.in_flight) >= settings_.run_ahead; }
  bool issue_one();
  bool go_on(Lane& lane);
  bool start(Job& job);
  void issue(Job& job);
  void touch(const Job& job, const Lane& lane);
  void access(const Job& job, StreamId stream, uintptr_t at, int64_t bytes, bool write);
  void copy_batch(Job& job);
  void handle(const DeviceClock::Done& done);
  // The stream waits for the event, and so does what is issued next.
  void wait(StreamId stream, std::optional<EventId> event);
  // Issues work on this lane of the clock, behind all that was waited for.
  ItemId enqueue(int32_t lane, const Work& work);
  EventId record(StreamId stream, ItemId behind);
  int64_t stall();  // nanoseconds that the next group takes longer
  void measure();

  SimulationSettings settings_;
  std::unique_ptr<SimulatedDevice> device_;
  uintptr_t base_ = 0;  // of the arena
  std::array<Lane, 2> lanes_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::deque<Job*> ready_;                           // the step before is issued and the batch is there
  DeviceClock clock_;                                // a lane of its own for copies, behind all others
  std::unordered_map<EventId, ItemId> items_;        // of the clock, that end with an event
  std::vector<ItemId> waited_for_;                   // by what is issued next
  std::vector<std::pair<ItemId, ItemId>> of_spans_;  // first and last
  Admission admission_;
  CrossLaneFences order_;
  StreamId copies_ = 0;
  std::deque<Job*> copying_;  // whose batches are on their way, in this order
  uint64_t random_;
  SimulationResult result_;
};

}  // namespace waterflow
