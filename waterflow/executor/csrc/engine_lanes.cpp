// How steps run: on the threads of lanes, or on that of a caller who has nothing else to do.
#include <algorithm>

#include "../../allocator/csrc/planned_ranges.h"
#include "engine.h"
#include "graph_cache.h"

namespace waterflow {

void Engine::lane_main(Lane& lane) {
  std::unique_lock<std::mutex> lock(lock_);
  while (true) {
    const auto has_to_do = [&] { return (lane.job != nullptr && !lane.taken) || (stop_ && lane.job == nullptr); };
    if (lane.watched) {
      if (!lane.wake.wait_for(lock, lane.kept_for >= 0 || lane.job != nullptr ? kLook : kLookForAbsence, has_to_do)) {
        look_after(lane);
        continue;
      }
    } else {
      lane.wake.wait(lock, [&] { return has_to_do() || lane.watched; });
      if (!has_to_do()) continue;
    }
    if (lane.job == nullptr) return;
    Dropped dropped;
    run_step(lock, lane, dropped);
    lock.unlock();
    dropped.let_go();
    lock.lock();
  }
}

// One group of a captured step on a device that runs behind the host: it is told what to run, and what to wait for
// before. At most a few groups of a lane are ahead of what the device has done.
void Engine::issue(Lane& lane, const std::shared_ptr<StepRun>& run, int32_t group) {
  Ground& ground = *lane.ground;
  const int64_t peak = run->plan->heights.peak[group];
  const bool planned = run->placer != nullptr;
  if (run->issued.size() >= kGroupsAhead) device_->synchronize(run->issued[run->issued.size() - kGroupsAhead]);
  if (planned) {
    std::lock_guard<std::mutex> guard(lock_);
    if (const auto event = ground.order.before(lane.end, peak, ground.size())) device_->wait(lane.stream, *event);
  }
  device_->enqueue(lane.stream, [this, run, group] {
    const Inside inside(this);
    if (run->failure) return;
    const int64_t start = now_ns();
    try {
      run->run_group(group);
    } catch (const NodeError& failure) {
      run->failed_node = failure.node;
      run->failure = std::current_exception();
    } catch (...) {
      run->failure = std::current_exception();
    }
    run->busy_ns += now_ns() - start;
  });
  const EventId event = device_->record(lane.stream);
  run->issued.push_back(event);
  if (planned) {
    std::lock_guard<std::mutex> guard(lock_);
    ground.order.after(lane.end, peak, event, run->plan->heights.after[group]);
  }
}

// What is not captured has issued work on its lane's stream and is done when the device is.
void Engine::finish_stream(Lane& lane) {
  const EventId event = device_->record(lane.stream);
  device_->synchronize(event);
  device_->forget(event);
}

// Waits until all that was issued of a step is done.
void Engine::drain(Lane& lane, StepRun& run, std::exception_ptr& error) {
  try {
    if (!run.issued.empty()) {
      device_->synchronize(run.issued.back());
      std::lock_guard<std::mutex> guard(lock_);
      lane.ground->order.reached(lane.end, run.issued.back());
    }
    for (EventId event : run.issued) device_->forget(event);
  } catch (...) {
    if (!error) error = std::current_exception();  // a device that is lost
  }
  if (!error) error = run.failure;
  if (error) return;
  try {
    run.finish();
  } catch (...) {
    error = std::current_exception();
  }
}

void Engine::strand(Lane& lane, StepRun& run) {
  ++stranded_;
  run.stranded = true;
  lane.ground->strand(lane.end);
}

void Engine::run_step(std::unique_lock<std::mutex>& lock, Lane& lane, Dropped& dropped) {
  const Inside inside(this);
  Job& job = *lane.job;
  const auto held_job = job.shared_from_this();  // the end of its step may forget it
  const std::shared_ptr<StepRun> held_run = job.queue.front();
  dropped.runs.push_back(held_run);
  StepRun& run = *held_run;
  Admission& admission = lane.ground->admission;
  ArenaEnd& end = lane.ground->end(lane.end);
  const int32_t groups = run.plan->heights.groups();
  while (static_cast<int32_t>(job.barriers.size()) < groups) job.barriers.emplace_back(CounterBarrier::kLaterGroup);
  std::exception_ptr error;
  run.in_arenas = arenas_;
  const bool behind = device_ != nullptr && run.frame != nullptr;
  bool filled = false;
  pace_starts(job, run);
  for (int32_t group = 0; group < groups; ++group) {
    CounterBarrier& barrier = job.barriers[group];
    lane.wake.wait(lock, [&] { return barrier.open() || !job.cancelled.empty(); });
    if (!job.cancelled.empty()) {
      error = std::make_exception_ptr(Cancelled(job.cancelled));
      break;
    }
    barrier.pass();
    if (group == 0) {
      job.batch_arrived = false;
      if (job.queue.size() > 1) batch_arrives(job);
    }
    const int64_t start = now_ns();
    const int64_t held = held_by_all(), own = admission.held_by(job.id);
    lock.unlock();
    try {
      if (!filled) run.on_stream(lane.current);
      if (!filled && end.planned) {
        run.placer = &lane.ground->placer(lane.end);
        if (graphs_) run.graphs = graphs_->find(lane.index, run, *run.placer);
      }
      if (!filled && run.frame) run.fill();
      if (!filled && end.planned) {
        run.placer->begin(run.plan->requests);
      }
      filled = true;
      if (run.pace != nullptr) {
        if (!run.issued.empty()) device_->synchronize(run.issued.back());  // what it does there is its work, too
        if (group > 0 && behind) run.pace->end();
        run.pace->begin(!behind && !on_cuda_ && run.frame != nullptr && !run.profile);
        run.pace->before_operation();
      }
      if (behind) {
        issue(lane, held_run, group);
      } else {
        run.run_group(group);
        if (on_cuda_) finish_stream(lane);
        if (group + 1 == groups && run.frame) run.finish();
      }
    } catch (const NodeError& failure) {
      run.failed_node = failure.node;
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    const bool last = error || group + 1 == groups;
    if (run.frame && !behind && last) run.let_go();
    // Before the ground is given back: does anybody hold what was planned to be gone? Behind the host that is not
    // known.
    bool kept = false;
    if (run.placer != nullptr && !behind && !run.stranded) {
      kept = last ? run.placer->any_live() : run.placer->overdue(run.plan->ends[group] - 1);
    }
    run.opaque = nullptr;  // may hold Python objects: not to be let go under the lock
    const int64_t slept = run.pace != nullptr ? (run.pace->end(), run.pace->take_slept()) : 0;
    const int64_t ended = now_ns();
    lock.lock();
    if (kept) strand(lane, run);
    ++groups_done_;
    if (!behind) run.busy_ns += ended - start - slept;
    lane.busy_ns += ended - start - slept;
    if (recording_ && spans_.size() < most_spans_) {
      spans_.push_back({job.id, job.steps, group, lane.index, start, ended, held, own});
    }
    if (error) break;
    if (admission.complete(job.id)) break;
    job.barriers[group + 1].arrive();  // the group before
    job.waiting_since = ended;
    if (!admission.anyone_waiting()) {
      grant(job, &lane);
    } else {
      admission.wait(job.id, job.opportunistic);  // the others may be nearer the end of theirs
      offer_room(&lane);
    }
    scheduling_ns_ += now_ns() - ended;
  }
  if (error || behind || run.placer != nullptr) {
    lock.unlock();
    if (behind) drain(lane, run, error);
    if (graphs_ && !error && run.placer != nullptr && !run.graphs && run.placer->counts().missed == 0) {
      graphs_->ran_as_planned(lane.index, run, *run.placer);
    }
    if ((error || behind) && run.frame && filled) run.let_go();
    const bool kept = run.placer != nullptr && !run.stranded && run.placer->any_live();
    lock.lock();
    run.error = error;
    if (run.placer != nullptr) {
      run.placed = run.placer->counts();
      placed_.add(run.placed);
      if (kept) strand(lane, run);
      run.placer->finish();  // one that was left behind may be gone from here on
      run.placer = nullptr;
      if (run.stranded) PlannedRanges::sweep();
    }
  }
  lane.job = nullptr;
  lane.taken = false;
  pace_ends(job, run);
  end_step(job, run, dropped);
  const int64_t before = now_ns();
  keep_for(lane, job, run);
  offer_room(&lane);
  scheduling_ns_ += now_ns() - before;
}

void Engine::end_step(Job& job, StepRun& run, Dropped& dropped) {
  leave_ground(job);
  ++steps_done_;
  if (arenas_) keep_pages_within();
  progress_ns_ += run.plan->expected_ns > 0 ? run.plan->expected_ns : run.busy_ns;
  ++job.steps;
  job.served_ns += run.busy_ns;
  const bool stopped = run.error != nullptr || !job.cancelled.empty();
  job.queue.pop_front();
  // The first look at an opaque step was given all there is.
  job.largest = run.plan->heights.largest() < capacity_ ? run.plan->heights.largest() : 0;
  for (const auto& waiting : job.queue) job.largest = std::max(job.largest, waiting->plan->heights.largest());
  job.running = false;
  job.lane = -1;
  run.done = true;
  run.finished.notify_all();
  if (stopped) {
    const auto why = job.cancelled.empty() ? kEarlierFailed : job.cancelled;
    fail_queue(job, std::make_exception_ptr(Cancelled(why)), dropped);
    for (auto& barrier : job.barriers) barrier.rearm();
    ready_.erase(std::remove(ready_.begin(), ready_.end(), &job), ready_.end());
    job.batch_arrived = false;
  }
  job.barriers[0].arrive();  // the step before
  if (job.barriers[0].waiting_for() == 1) {
    line_up(job);
  }
  idle_.notify_all();
  if (!job.stopped_inside) return;
  job.stopped_inside = false;
  job.cancelled.clear();
  if (job.leaving) forget(job.id, dropped);
}

bool Engine::wait(const std::shared_ptr<StepRun>& run, int64_t milliseconds) {
  Dropped dropped;
  std::unique_lock<std::mutex> lock(lock_);
  if (!run->done && on_a_lane()) {
    throw std::logic_error("a step of job " + std::to_string(run->job) +
                           " is waited for inside of a step that the same engine runs, which may hold the lane and the "
                           "memory that it needs: wait for it before or after that step");
  }
  auto found = jobs_.find(run->job);
  if (!run->done && found != jobs_.end()) {
    const auto& queue = found->second->queue;
    leave_to_lanes(*found->second, std::find(queue.begin(), queue.end(), run) - queue.begin());
  }
  run->finished.wait_for(lock, std::chrono::milliseconds(milliseconds),
                         [&] { return run->done || run->lane != nullptr; });
  if (Lane* lane = run->lane) {
    run->lane = nullptr;
    run_step(lock, *lane, dropped);
    if (stop_ || (lane->job != nullptr && !lane->taken)) lane->wake.notify_all();
  }
  return run->done;
}

void Engine::leave(Id job) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = jobs_.find(job);
  if (found != jobs_.end()) leave_to_lanes(*found->second, found->second->queue.size());
}

// The first steps of a job's queue, of which callers wanted to run one, are for the lanes' own threads.
void Engine::leave_to_lanes(Job& job, size_t count) {
  for (size_t i = 0; i < std::min(count, job.queue.size()); ++i) {
    StepRun& run = *job.queue[i];
    run.by_caller = false;
    if (run.lane == nullptr) continue;
    run.lane->taken = false;
    run.lane->wake.notify_all();
    run.lane = nullptr;
  }
}

}  // namespace waterflow
