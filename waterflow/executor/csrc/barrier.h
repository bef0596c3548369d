// The counter barrier: the only way in which a node group becomes issuable.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace waterflow {

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
