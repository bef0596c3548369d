// Whose turn it is on a lane: a job that comes back at once goes on for a while before the next one has its turn.
//
// Going from job to job at each step would find the caches full of another's weights, and hand a thread over each time.
#include <algorithm>
#include <utility>

#include "engine.h"

namespace waterflow {
namespace {

constexpr int64_t kTurnNs = 40'000'000;     // that a job may be ahead of those that wait
constexpr int64_t kShortPauseNs = 300'000;  // of a job between steps, for which its lane waits; or an eighth of a step
constexpr int32_t kStepsNotKept = 4;        // before one that took longer is waited for again

}  // namespace

// Whether a step of this job may start there.
bool Engine::open_to(const Lane& lane, const Job& job) const {
  return lane.job == nullptr && lane.index < active_ && (lane.kept_for < 0 || lane.kept_for == job.id);
}

// The lane that is free for this job: the one that is kept for it, the one asked for, or any.
Engine::Lane* Engine::free_lane(const Job& job, Lane* here) {
  Lane* found = nullptr;
  for (auto& lane : lanes_) {
    if (!open_to(*lane, job)) continue;
    if (lane->kept_for == job.id) return lane.get();
    if (found == nullptr || lane.get() == here) found = lane.get();
  }
  return found;
}

// Whose step comes first where both wait.
bool Engine::before(const Job& one, const Job& other) const {
  if (one.opportunistic != other.opportunistic) return other.opportunistic;
  return eldest_first_ ? one.id < other.id : one.served_ns < other.served_ns;
}

// The step before and the batch are there: behind all that have had less of the lanes. Nobody is owed time in which it
// waited for something else: there others have gone on.
void Engine::line_up(Job& job) {
  job.waiting_since = now_ns();
  job.served_ns = std::max(job.served_ns, reached_ns_[job.opportunistic] - kTurnNs);
  job.ready_ns = job.waiting_since;
  const auto later = [&](const Job* each) { return before(job, *each); };
  ready_.insert(std::find_if(ready_.begin(), ready_.end(), later), &job);
}

// Its next step is there: the lane that was kept for it has not waited longer.
void Engine::arrive(Job& job) {
  for (const auto& lane : lanes_) {
    if (lane->kept_for == job.id) note_pause(job, *lane);
  }
}

// A step has ended there: should its job's next one come before those that wait?
void Engine::keep_for(Lane& lane, Job& job, const StepRun& run) {
  const int64_t now = now_ns();
  const auto other = std::find_if(ready_.begin(), ready_.end(), [&](const Job* each) { return each != &job; });
  if (other == ready_.end() || (*other)->opportunistic != job.opportunistic || stop_ || job.leaving) return;
  if (eldest_first_ ? before(**other, job) : job.served_ns >= (*other)->served_ns + kTurnNs) return;
  const int64_t patience = std::max(kShortPauseNs, run.busy_ns / 8);
  const bool queued = !job.queue.empty();
  if (!queued && !returns_within(job, patience)) return;
  for (const auto& ground : grounds_) {
    if (ground->admission.anyone_waiting()) return;  // for room, which comes first
  }
  lane.kept_for = job.id;
  lane.kept_since = now;
  lane.kept_until = now + 2 * patience;
  if (queued || lane.watched) return;
  lane.watched = true;
  lane.wake.notify_all();
}

// Now and then one that took too long is given another chance: whoever finds all lanes taken when it comes back is late
// for that reason alone.
bool Engine::returns_within(Job& job, int64_t patience) {
  if (job.pause_ns > patience && ++job.not_kept >= kStepsNotKept) job.pause_ns = job.not_kept = 0;
  return job.pause_ns <= patience;
}

void Engine::note_pause(Job& job, const Lane& lane) {
  const int64_t most = lane.kept_until - lane.kept_since;  // one that is very late is not late for ever
  job.pause_ns = (3 * job.pause_ns + std::min(now_ns() - lane.kept_since, most)) / 4;
}

// The lane is kept no longer: the job has come back, or somebody else is to have it.
void Engine::end_waits_for(Id job) {
  for (auto& lane : lanes_) {
    if (lane->kept_for == job) lane->kept_for = -1;
  }
}

// Lanes whose jobs have not come back go to others.
void Engine::end_waits() {
  const int64_t now = now_ns();
  for (auto& lane : lanes_) {
    if (lane->kept_for < 0 || now < lane->kept_until) continue;
    const auto found = jobs_.find(lane->kept_for);
    if (found != jobs_.end()) note_pause(*found->second, *lane);
    lane->kept_for = -1;
  }
}

// On the lane's own thread, now and then while it is watched.
void Engine::look_after(Lane& lane) {
  const auto kept = [&] {
    return std::count_if(lanes_.begin(), lanes_.end(), [](const auto& each) { return each->kept_for >= 0; });
  };
  const auto before = kept();
  end_waits();
  lane.watched = lane.kept_for >= 0 || (lane.job != nullptr && lane.taken);
  // Another lane's wait may have ended here, or a guaranteed job be gone.
  if (kept() < before || opportunistic_ > 0) offer_room(nullptr);
}

void Engine::set_eldest_first(bool eldest_first) {
  std::lock_guard<std::mutex> guard(lock_);
  eldest_first_ = eldest_first;
  std::stable_sort(ready_.begin(), ready_.end(),
                   [&](const Job* one, const Job* other) { return before(*one, *other); });
}

void Engine::set_active_lanes(int32_t count) {
  std::lock_guard<std::mutex> guard(lock_);
  if (count < 1 || count > lanes()) {
    throw std::invalid_argument("between 1 and " + std::to_string(lanes()) + " lanes can be in use; got " +
                                std::to_string(count));
  }
  active_ = count;
  offer_room(nullptr);
}

}  // namespace waterflow
