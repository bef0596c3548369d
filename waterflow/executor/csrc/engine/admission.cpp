#include "waterflow/executor/csrc/engine/admission.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace waterflow {

Heights::Heights(std::vector<int64_t> peak_, std::vector<int64_t> after_)
    : peak(std::move(peak_)), after(std::move(after_)), rest(peak) {
  if (peak.empty() || peak.size() != after.size()) {
    throw std::invalid_argument("a step needs one peak and one height after for each of its groups; got " +
                                std::to_string(peak.size()) + " and " + std::to_string(after.size()));
  }
  int64_t before = 0;
  for (size_t g = 0; g < peak.size(); ++g) {
    if (after[g] < 0 || peak[g] < after[g] || peak[g] < before) {
      throw std::invalid_argument("group " + std::to_string(g) + " peaks at " + std::to_string(peak[g]) +
                                  " bytes, between " + std::to_string(before) + " before and " +
                                  std::to_string(after[g]) + " after: a peak cannot lie below either");
    }
    before = after[g];
  }
  for (size_t g = peak.size() - 1; g-- > 0;) rest[g] = std::max(rest[g], rest[g + 1]);
}

Admission::Admission(int64_t capacity, int32_t patience) : capacity_(capacity), patience_(patience) {
  if (capacity < 0) throw std::invalid_argument("capacity cannot be negative: " + std::to_string(capacity));
}

bool Admission::safe(int64_t capacity, const Running* extra) const {
  // One resource: whoever can finish may do so first, for that only gives memory back.
  struct Claim {
    int64_t held, rest;
  };
  constexpr size_t kStack = 16;
  Claim small[kStack];
  std::vector<Claim> large;
  const size_t count = running_.size() + (extra != nullptr ? 1 : 0);
  Claim* claims = small;
  if (count > kStack) {
    large.resize(count);
    claims = large.data();
  }
  size_t n = 0;
  int64_t held = 0;
  auto put = [&](const Running& running) {
    claims[n] = {running.held_then(), running.rest_then()};
    held += claims[n++].held;
  };
  for (const auto& [id, running] : running_) put(running);
  if (extra != nullptr) put(*extra);
  while (n > 0) {
    size_t i = 0;
    while (i < n && held - claims[i].held + std::max(claims[i].rest, claims[i].held) > capacity) ++i;
    if (i == n) return false;
    held -= claims[i].held;
    claims[i] = claims[--n];
  }
  return true;
}

bool Admission::set_capacity(int64_t capacity) {
  if (capacity < 0) throw std::invalid_argument("capacity cannot be negative: " + std::to_string(capacity));
  pending_ = capacity;
  adopt_pending();
  return !pending_.has_value();
}

void Admission::adopt_pending() {
  if (!pending_) return;
  if (*pending_ < capacity_ && (held_ > *pending_ || !safe(*pending_, nullptr))) return;
  capacity_ = *pending_;
  pending_.reset();
}

bool Admission::try_issue(Id job, const Heights* heights, bool opportunistic) {
  auto found = running_.find(job);
  const bool starts = found == running_.end();
  if (starts) {
    if (pending_ || must_yield(job, opportunistic)) return false;
    Running fresh{heights, 0, true};
    if (held_ + heights->peak[0] > capacity_ || !safe(capacity_, &fresh)) return false;
    running_.emplace(job, fresh);
    held_ += heights->peak[0];
    count_start(job, opportunistic);
  } else {
    Running& running = found->second;
    if (running.in_flight) throw std::logic_error("job " + std::to_string(job) + " already has a group in flight");
    const int64_t more = running.heights->peak[running.next] - running.settled();
    if (held_ + more > capacity_) return false;
    running.in_flight = true;
    if (running_.size() > 1 && !safe(capacity_, nullptr)) {
      running.in_flight = false;
      return false;
    }
    held_ += more;
  }
  if (!waiting_.empty()) stop_waiting(job);
  return true;
}

bool Admission::complete(Id job) {
  auto found = running_.find(job);
  if (found == running_.end() || !found->second.in_flight) {
    throw std::logic_error("job " + std::to_string(job) + " has no group in flight");
  }
  Running& running = found->second;
  held_ -= running.heights->peak[running.next] - running.heights->after[running.next];
  running.in_flight = false;
  const bool ended = ++running.next == running.heights->groups();
  if (ended) {
    held_ -= running.settled();
    running_.erase(found);
  }
  adopt_pending();
  return ended;
}

void Admission::release(Id job) {
  auto found = running_.find(job);
  if (found != running_.end()) {
    held_ -= found->second.held();
    running_.erase(found);
  }
  stop_waiting(job);
  adopt_pending();
}

void Admission::stop_waiting(Id job) {
  std::erase_if(waiting_, [&](const Waiting& w) { return w.job == job; });
}

int64_t Admission::held_by(Id job) const {
  auto found = running_.find(job);
  return found == running_.end() ? 0 : found->second.held();
}

int32_t Admission::groups_left(Id job) const {
  auto found = running_.find(job);
  return found == running_.end() ? 0 : found->second.heights->groups() - found->second.next;
}

void Admission::wait(Id job, bool opportunistic) {
  for (const auto& waiting : waiting_) {
    if (waiting.job == job) return;
  }
  waiting_.push_back({job, tickets_++, 0, opportunistic});
}

void Admission::count_start(Id job, bool opportunistic) {
  for (auto& waiting : waiting_) {
    if (waiting.job != job && waiting.opportunistic <= opportunistic) ++waiting.overtaken;
  }
}

bool Admission::must_yield(Id job, bool opportunistic) const {
  // The longest waiting of those that were overtaken too often goes first; the others give way to it.
  for (const auto& waiting : waiting_) {
    if (waiting.overtaken >= patience_ && waiting.opportunistic <= opportunistic) return waiting.job != job;
  }
  return false;
}

std::vector<Admission::Id> Admission::waiting() const {
  auto order = waiting_;
  // Who was overtaken too often; then nearest the end of its step first; those that have not begun come last.
  const auto rank = [this](const Waiting& each) {
    const bool urgent = each.overtaken >= patience_;
    return std::tuple(!urgent, urgent || !in_step(each.job) ? INT32_MAX : groups_left(each.job), each.ticket);
  };
  std::sort(order.begin(), order.end(), [&](const Waiting& a, const Waiting& b) { return rank(a) < rank(b); });
  std::vector<Id> ids;
  ids.reserve(order.size());
  for (const auto& waiting : order) ids.push_back(waiting.job);
  return ids;
}

void Admission::check() const {
  int64_t held = 0;
  for (const auto& [id, running] : running_) {
    if (running.next < 0 || running.next >= running.heights->groups()) {
      throw std::logic_error("job " + std::to_string(id) + " stands behind its last group");
    }
    held += running.held();
  }
  if (held != held_) {
    throw std::logic_error("held is " + std::to_string(held_) + ", the steps add up to " + std::to_string(held));
  }
  if (held_ > capacity_) {
    throw std::logic_error("held " + std::to_string(held_) + " exceeds capacity " + std::to_string(capacity_));
  }
  if (!safe(capacity_, nullptr)) throw std::logic_error("the state is not safe");
}

}  // namespace waterflow
