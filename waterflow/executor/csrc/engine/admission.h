// Admission: the banker's algorithm (Dijkstra, EWD 623) over node groups.
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

  explicit Admission(int64_t capacity);

  int64_t capacity() const { return capacity_; }
  // A larger capacity holds at once; a smaller one from the first state that is safe under it: until then
  // steps finish and none starts. Returns whether it holds already.
  bool set_capacity(int64_t capacity);
  std::optional<int64_t> pending_capacity() const { return pending_; }

  // `job` wants to run the next group of its step (the first one begins the step, with these heights, which
  // must outlive it). Returns whether it may; if so the group is in flight.
  bool try_issue(Id job, const Heights* heights, bool opportunistic = false);
  // Its group in flight has ended. Returns whether its step has ended, too.
  bool complete(Id job);
  // Its step ends here, whatever is left of it; a job that holds nothing is no error.
  void release(Id job);

  int64_t held() const { return held_; }  // by all steps; groups in flight count with their peak
  int64_t held_by(Id job) const;
  int32_t groups_left(Id job) const;  // 0 for a job that is not in mid-step
  bool in_step(Id job) const { return running_.count(job) != 0; }

  // Waiting for memory. A job that a neighbour's whole step has overtaken goes first: no step starts before it.
  // Opportunistic ones do not hold up others.
  void wait(Id job, bool opportunistic = false);
  void stop_waiting(Id job);
  // Another, of its class or a higher one, has waited longer than a step of its neighbour.
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
  std::optional<int64_t> pending_;
  int64_t held_ = 0;
  int64_t tickets_ = 0;
  std::map<Id, Running> running_;
  std::vector<Waiting> waiting_;
};

// The counter barrier: the only way in which a node group becomes issuable.

// Counts arrivals down to zero. A group's barrier waits for the group before it, for its batch's copy (the
// first group of a step) and for the groups that must give it room. It re-arms itself once it is passed, and
// its number of parties may change while it is in use (jobs come and go). Not thread-safe by itself: the
// engine's lock guards it.
class CounterBarrier {
 public:
  static constexpr int32_t kFirstGroup = 3;  // parties: the step before, the batch, room
  static constexpr int32_t kLaterGroup = 2;  // the group before, room

  explicit CounterBarrier(int32_t parties) : parties_(check(parties)), waiting_for_(parties) {}

  // One party has come. True when this arrival opened the barrier.
  bool arrive() {
    if (waiting_for_ == 0) throw std::logic_error("an arrival at a barrier that is open: nothing was waited for");
    return --waiting_for_ == 0;
  }
  bool open() const { return waiting_for_ == 0; }
  int32_t waiting_for() const { return waiting_for_; }
  int32_t parties() const { return parties_; }

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

  // One more party from now on, also in the round that is under way.
  void add_party() {
    ++parties_;
    ++waiting_for_;
  }
  // A party that has not yet come in this round leaves. True when that opened the barrier.
  bool remove_party() {
    if (parties_ == 0 || waiting_for_ == 0) throw std::logic_error("no party left to remove from this barrier");
    --parties_;
    return --waiting_for_ == 0;
  }

 private:
  static int32_t check(int32_t parties) {
    if (parties < 0) throw std::invalid_argument("a barrier cannot have " + std::to_string(parties) + " parties");
    return parties;
  }

  int32_t parties_;
  int32_t waiting_for_;
};

}  // namespace waterflow
