// Jobs on the lanes of arenas in virtual time: real admission, barriers and device order over a device without memory.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <tuple>
#include <vector>

#include "../../allocator/csrc/simulated_device.h"
#include "admission.h"
#include "barrier.h"
#include "device_order.h"

namespace waterflow {

// Bytes that a group reads or writes, counted from its lane's end of the arena.
struct Touch {
  int64_t offset, bytes;
  bool write;
};

// One step of a job, group by group. Group g touches touches[first[g]] up to touches[first[g + 1]], in this order.
struct SimulatedStep {
  Heights heights;
  std::vector<int64_t> nanoseconds;
  std::vector<int64_t> first;
  std::vector<Touch> touches;
  int64_t copy_ns;  // of one batch, from the host

  SimulatedStep(Heights heights, std::vector<int64_t> nanoseconds, std::vector<int64_t> first,
                std::vector<Touch> touches, int64_t copy_ns);
};

struct SimulationSettings {
  int64_t arena = 0;      // bytes of each arena
  int32_t arenas = 1;     // of two lanes each
  int32_t run_ahead = 2;  // groups that a lane may hold beyond what its device has finished
  uint64_t seed = 0;
  int32_t stalled = 0;  // of 1,000 groups, so many take longer, by up to:
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
  std::vector<int64_t> busy;      // by lane
  int64_t overlapped = 0;         // while two lanes or more were busy
  std::vector<int64_t> peaks;     // by arena: the most bytes that its lanes held at once, as the device ran
  int64_t peak = 0;               // the same of all arenas together
  int64_t waits = 0;              // of groups for events of the facing lane
  std::vector<int32_t> steps;     // done, by job
  int64_t races = 0;              // accesses without an order to others; none, or something is wrong
  std::vector<std::string> told;  // the first of them, in words
  std::vector<SimulatedSpan> spans;
};

// The host issues groups at once, in the order in which admission offers room; each lane runs what it was given one by
// one, at full speed. A job takes whichever lane is free when its step starts, has one batch on the device, and its
// next one is copied there when the step is done. All in integers, and equal settings give equal runs: what is due at
// the same time is handled by kind, then by number; who waits for room comes first, then lanes by number, then steps
// that would start, the longest ready first.
//
// Not thread-safe; runs on the calling thread. `run` throws std::logic_error where groups can no longer go on.
class Simulation {
 public:
  explicit Simulation(const SimulationSettings& settings);
  ~Simulation();

  // A job of so many steps. Throws std::invalid_argument for a step that exceeds an arena.
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
    int32_t index, arena, end;
    StreamId stream;
    Job* job = nullptr;
    int64_t free_at = 0, held = 0, busy = 0;
    std::deque<EventId> in_flight;  // behind groups that its device has not finished
  };
  struct Arena {
    Admission admission;
    DeviceOrder order;
    uintptr_t base;
    Lane* lanes[2];
    int64_t held() const { return lanes[0]->held + lanes[1]->held; }
  };
  enum class Due { group_done, batch_copied };
  struct Entry {
    int64_t at;
    Due due;
    int32_t number;  // of the lane or the job
    bool operator>(const Entry& other) const {
      return std::tie(at, due, number) > std::tie(other.at, other.due, other.number);
    }
  };

  bool has_enough(const Lane& lane) const { return std::ssize(lane.in_flight) >= settings_.run_ahead; }
  bool issue_one();
  bool go_on(Lane& lane);
  bool start(Job& job);
  void issue(Job& job);
  void touch(const Job& job, const Lane& lane);
  void access(const Job& job, StreamId stream, uintptr_t at, int64_t bytes, bool write);
  void copy_batch(Job& job);
  void handle(const Entry& entry);
  // The stream waits for the event. Returns when the device can go on that was there at `time`.
  int64_t wait(StreamId stream, std::optional<EventId> event, int64_t time);
  EventId record(StreamId stream, int64_t time);
  int64_t stall();
  void measure();

  SimulationSettings settings_;
  std::unique_ptr<SimulatedDevice> device_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::deque<Job*> ready_;  // the step before is issued and the batch is there
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> due_;
  std::map<EventId, int64_t> reached_;  // when the device gets there
  StreamId copies_ = 0;
  int64_t copies_free_at_ = 0;
  int64_t now_ = 0;
  uint64_t random_;
  SimulationResult result_;
};

}  // namespace waterflow
