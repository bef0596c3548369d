// Admission: the banker's algorithm (Dijkstra, EWD 623) over node groups, and the counter barriers before them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace waterflow {

// What a job's step holds, group by group, in bytes: the shape of its claim.
struct Heights {
  std::vector<int64_t> peak;   // while group g runs
  std::vector<int64_t> after;  // once it has run
  std::vector<int64_t> rest;   // the largest peak of group g and all behind it

  Heights() = default;
  Heights(std::vector<int64_t> peak, std::vector<int64_t> after);
  int32_t groups() const { return static_cast<int32_t>(peak.size()); }
  int64_t largest() const { return rest.empty() ? 0 : rest.front(); }
};

// Which jobs are in mid-step, and where. A group may be issued when its peak fits beside what the others
// hold now, and when every job in mid-step could still finish, one after the other, from the state after it.
// Pure book-keeping: no clock, no threads, no torch. Not thread-safe: the engine's lock guards it.
class Admission {
 public:
  using Id = int64_t;

  // `patience`: how many steps may start before one that waits for room, until it must come first.
  explicit Admission(int64_t capacity, int32_t patience = 1);

  int64_t capacity() const { return capacity_; }
  // A larger capacity holds at once. A smaller one is pending until a state is safe under it: steps go on meanwhile,
  // and none starts. Returns whether it holds already.
  bool set_capacity(int64_t capacity);
  std::optional<int64_t> pending_capacity() const { return pending_; }

  // Lets `job` run the next group of its step, which is then in flight, and ends its wait; or returns false and changes
  // nothing. The first group begins the step, with these heights, which must outlive it. Any group is refused whose
  // peak exceeds the capacity beside what is held, or after which some step could not finish (the banker's rule). A
  // first group is also refused while a lower capacity is pending, or if the job must yield. Throws std::logic_error
  // if a group of the job is in flight.
  bool try_issue(Id job, const Heights* heights, bool opportunistic = false);
  // Its group in flight has ended. Returns whether its step has ended, too.
  bool complete(Id job);
  // Its step ends here, whatever is left of it; a job that holds nothing is no error.
  void release(Id job);

  int64_t held() const { return held_; }  // by all steps; groups in flight count with their peak
  int64_t held_by(Id job) const;
  int32_t groups_left(Id job) const;  // 0 for a job that is not in mid-step
  bool in_step(Id job) const { return running_.count(job) != 0; }

  // The job waits for room, until it is let in. Once `patience` steps of other jobs have started meanwhile, no further
  // one starts before this job is let in. For an opportunistic job only the steps of other opportunistic jobs count,
  // and only they are held up.
  void wait(Id job, bool opportunistic = false);
  void stop_waiting(Id job);
  // Another job waits, of its class or a higher one, and was overtaken too often: that job starts first.
  bool must_yield(Id job, bool opportunistic = false) const;
  bool anyone_waiting() const { return !waiting_.empty(); }
  std::vector<Id> waiting() const;  // in the order in which room is offered

  void check() const;  // walks everything; throws std::logic_error

 private:
  struct Running {
    const Heights* heights;
    int32_t next = 0;
    bool in_flight = false;
    int64_t held() const { return in_flight ? heights->peak[next] : settled(); }
    int64_t settled() const { return next == 0 ? 0 : heights->after[next - 1]; }
    // The state once the group in flight has run, which needs nothing more.
    int64_t held_then() const { return in_flight ? heights->after[next] : settled(); }
    int64_t rest_then() const {
      const int32_t position = in_flight ? next + 1 : next;
      return position < heights->groups() ? heights->rest[position] : 0;
    }
  };
  struct Waiting {
    Id job;
    int64_t ticket;
    int32_t overtaken;
    bool opportunistic;
  };

  bool safe(int64_t capacity, const Running* extra) const;
  void adopt_pending();
  void count_start(Id job, bool opportunistic);

  int64_t capacity_;
  int32_t patience_;
  std::optional<int64_t> pending_;
  int64_t held_ = 0;
  int64_t tickets_ = 0;
  std::map<Id, Running> running_;
  std::vector<Waiting> waiting_;
};

// The counter barrier: the only way in which a node group becomes issuable.

// Counts arrivals down to zero. The barrier of a step's first group waits for the end of the step before, for the
// batch, which arrives when the step has been submitted, and for room; that of a later group waits for the group before
// it and for room. Room is one arrival, made once admission has let the group in. `pass` arms the barrier anew. Not
// thread-safe by itself: the engine's lock guards it.
class CounterBarrier {
 public:
  static constexpr int32_t kFirstGroup = 3;  // parties: the step before, the batch, room
  static constexpr int32_t kLaterGroup = 2;  // the group before, room

  explicit CounterBarrier(int32_t parties) : parties_(parties), waiting_for_(parties) {}

  // One party has come. True when this arrival opened the barrier.
  bool arrive() {
    if (waiting_for_ == 0) throw std::logic_error("an arrival at a barrier that is open: nothing was waited for");
    return --waiting_for_ == 0;
  }
  bool open() const { return waiting_for_ == 0; }
  int32_t waiting_for() const { return waiting_for_; }

  // The group behind the barrier is issued: wait for the parties of its next step.
  void pass() {
    if (waiting_for_ != 0) {
      throw std::logic_error("a group was issued before its barrier: " + std::to_string(waiting_for_) +
                             " arrival(s) missing");
    }
    waiting_for_ = parties_;
  }
  // Back to the beginning of a step, whatever had arrived (a failed or cancelled step).
  void rearm() { waiting_for_ = parties_; }

 private:
  int32_t parties_;
  int32_t waiting_for_;
};

}  // namespace waterflow
