// Guaranteed jobs run as if alone; opportunistic ones take what they leave.
#include <algorithm>
#include <utility>

#include "engine.h"

namespace waterflow {
namespace {

constexpr size_t kMostStepTimes = 1 << 16;

// Opportunistic steps under way sleep no longer where somebody waits for the lane or the memory that they hold.
void hurry(const std::vector<std::unique_ptr<Lane>>& lanes) {
  for (const auto& lane : lanes) {
    if (lane->job != nullptr && lane->job->opportunistic) lane->job->pace->hurry = true;
  }
}

}  // namespace

void Engine::set_opportunistic(Id id, bool opportunistic) {
  std::lock_guard<std::mutex> guard(lock_);
  Job& job = find(id);
  if (job.opportunistic == opportunistic) return;
  job.opportunistic = opportunistic;
  opportunistic_ += opportunistic ? 1 : -1;
  job.served_ns = 0;
  if (opportunistic && !job.pace) job.pace = std::make_unique<Pace>(rates_);
  job.pace->hurry = !opportunistic;
  const auto waits = std::find(ready_.begin(), ready_.end(), &job);
  if (waits != ready_.end()) {
    ready_.erase(waits);
    line_up(job);
  }
  offer_room(nullptr);
}

void Engine::set_rates(double beside, double between) {
  for (const double rate : {beside, between}) {
    if (!(rate >= 0.0 && rate <= 1.0)) {
      throw std::invalid_argument("a rate is a share of time, 0 to 1; got " + std::to_string(rate));
    }
  }
  rates_.beside = beside;
  rates_.between = between;
}

std::vector<StepTime> Engine::take_step_times() {
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<StepTime> taken(step_times_.begin(), step_times_.end());
  step_times_.clear();
  return taken;
}

int64_t Engine::opportunistic_ns() const {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t now = now_ns();
  int64_t total = opportunistic_ns_;
  for (const auto& [id, job] : jobs_) {
    if (job->pace && job->pace->step_began_ns > 0) total += now - job->pace->step_began_ns;
  }
  return total;
}

// Whether a guaranteed job is to find a lane and room when its next step comes.
bool Engine::present(const Job& job) const {
  return !job.opportunistic && !job.leaving && job.steps > 0 &&
         (job.running || !job.queue.empty() || now_ns() - job.ended_ns < Rates::kAwayNs);
}

// An opportunistic step cannot be taken back: it starts on a lane only where one is left for each guaranteed job, and
// where its largest height fits beside theirs.
bool Engine::leaves_enough(const Lane& lane, const Job& job, int64_t height) const {
  if (!job.opportunistic) return true;
  int64_t largest = 0;
  int32_t to_come = 0;
  for (const auto& [id, other] : jobs_) {
    if (!present(*other)) continue;
    largest = std::max(largest, other->largest);
    if (!other->running) ++to_come;
  }
  const auto takes = [&](const Ground& ground) { return ground.admission.capacity() >= largest; };
  if (largest > 0 && takes(*lane.ground) && height + largest > lane.ground->admission.capacity()) return false;
  const auto left = std::count_if(lanes_.begin(), lanes_.end(), [&](const auto& each) {
    return each.get() != &lane && each->job == nullptr && each->index < active_ && takes(*each->ground);
  });
  return left >= std::min(to_come, active_);
}

// Nobody tells when a guaranteed job has been idle for long: while an opportunistic step waits, a free lane looks.
void Engine::watch_for_absence() {
  const bool guaranteed_waits = !ready_.empty() && !ready_.front()->opportunistic;
  if (guaranteed_waits || std::any_of(grounds_.begin(), grounds_.end(), [&](const auto& ground) {
        const auto waiting = ground->admission.waiting();
        return ground->admission.pending_capacity() ||
               std::any_of(waiting.begin(), waiting.end(), [&](Id id) { return !find(id).opportunistic; });
      })) {
    hurry(lanes_);
  }
  if (ready_.empty() || !ready_.back()->opportunistic) return;
  const auto free = [](const auto& lane) { return lane->job == nullptr; };
  const auto found = std::find_if(lanes_.begin(), lanes_.end(), free);
  if (found == lanes_.end() || (*found)->watched) return;
  (*found)->watched = true;
  (*found)->wake.notify_all();
}

// The lock is held.
void Engine::pace_starts(Job& job, StepRun& run) {
  if (job.opportunistic) {
    run.pace = job.pace.get();
    run.pace->step_began_ns = now_ns();
  } else {
    ++rates_.guaranteed;
  }
}

void Engine::pace_ends(Job& job, StepRun& run) {
  job.ended_ns = now_ns();
  if (run.pace != nullptr) {
    opportunistic_ns_ += job.ended_ns - std::exchange(run.pace->step_began_ns, 0);
    run.pace->hurry = false;
    run.pace = nullptr;
    return;
  }
  rates_.ended_ns = job.ended_ns;
  --rates_.guaranteed;
  if (opportunistic_ == 0 || run.error) return;
  if (step_times_.size() == kMostStepTimes) step_times_.pop_front();
  step_times_.push_back({job.id, job.ready_ns, job.ended_ns, run.busy_ns});
}

}  // namespace waterflow
