#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "../../allocator/csrc/cpu_arena.h"
#include "../../allocator/csrc/cuda_arena.h"
#include "graph_cache.h"

namespace waterflow {
Engine::Engine(int32_t lanes, int32_t intra_op, int64_t capacity, bool arenas, std::optional<Behind> behind,
               std::optional<OnCuda> cuda)
    : process_(getpid()), capacity_(capacity), arenas_(arenas), on_cuda_(cuda.has_value()) {
  if (lanes < 1) throw std::invalid_argument("an engine needs at least one lane; got " + std::to_string(lanes));
  if (intra_op < 1) throw std::invalid_argument("intra-op threads must be at least 1; got " + std::to_string(intra_op));
  Ground::MakeArena make_arena;
  if (arenas && cuda) {
    const auto memory = cuda->for_torch() ? PlacedIn::device : PlacedIn::host;
    make_arena = [device = cuda->device, memory](int64_t most) {
      return std::make_unique<CudaArena>(device, most, 0, memory);
    };
  } else if (arenas) {
    make_arena = [](int64_t most) { return std::make_unique<CpuArena>(most); };
  }
  if (cuda && cuda->handles.size() != static_cast<size_t>(lanes)) {
    throw std::invalid_argument("an engine of " + std::to_string(lanes) + " lanes needs as many streams");
  }
  for (int32_t i = 0; i < lanes; i += 2) {
    grounds_.push_back(std::make_unique<Ground>(std::min(2, lanes - i), i == 0 ? capacity : 0, capacity, make_arena,
                                                behind || cuda, behind ? behind->fault : OrderFault::none));
  }
  share_out();
#ifdef WATERFLOW_TEST_HOOKS
  if (behind) device_ = std::make_unique<CpuDevice>(0, behind->stalls);
#else
  if (behind) throw std::invalid_argument("asynchronous= is for tests: build waterflow with WATERFLOW_TEST_HOOKS=1");
#endif
  if (cuda) device_ = cuda->device;
  if (arenas && !(cuda && cuda->for_torch())) installed_ = std::make_unique<LaneAllocatorInstalled>();
  for (int32_t i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->index = i;
    lane->ground = grounds_[i / 2].get();
    lane->end = i % 2;
    if (cuda) {
      lane->stream = cuda->device->adopt_stream(cuda->handles[i]);
      if (cuda->for_torch()) lane->current = cuda->streams[i];
    } else if (device_) {
      lane->stream = device_->add_stream();
      device_->enqueue(lane->stream, [intra_op] { set_threads_here(intra_op); });
    }
    lanes_.push_back(std::move(lane));
  }
  active_ = lanes;
  if (cuda && arenas && cuda->graph_bytes > 0) make_graph_lanes(*cuda);
  std::mutex started_lock;
  std::condition_variable started_one;
  int32_t started = 0;
  for (auto& lane : lanes_) {
    lane->thread = std::thread([this, intra_op, lane = lane.get(), &started_lock, &started_one, &started] {
      set_threads_here(intra_op);
      {
        std::lock_guard<std::mutex> guard(started_lock);
        ++started;
        started_one.notify_all();
      }
      lane_main(*lane);
    });
  }
  std::unique_lock<std::mutex> guard(started_lock);
  started_one.wait(guard, [&] { return started == lanes; });
}

Engine::~Engine() { close(); }

void Engine::Dropped::let_go() {
  graphs.clear();
  for (auto& run : runs) {
    run->inputs.clear();
    run->opaque = nullptr;
  }
  runs.clear();
}

void Engine::close() {
  if (inherited()) return;
  if (on_a_lane()) throw std::logic_error("an engine cannot be closed by a step that it runs");
  Dropped dropped;
  std::lock_guard<std::mutex> one_at_a_time(closing_);
  {
    std::lock_guard<std::mutex> guard(lock_);
    stop_ = true;
    for (auto& [id, job] : jobs_) {
      job->cancelled = "the engine is shutting down";
      if (job->pace) job->pace->hurry = true;
      leave_to_lanes(*job, job->queue.size());
    }
    for (auto& lane : lanes_) lane->wake.notify_all();
  }
  for (auto& lane : lanes_) {
    if (lane->thread.joinable()) lane->thread.join();
  }
  if (graphs_) graphs_->close();
  device_.reset();
  std::lock_guard<std::mutex> guard(lock_);
  const auto error = std::make_exception_ptr(Cancelled("the engine is shutting down"));
  for (auto& [id, job] : jobs_) fail_queue(*job, error, dropped);
  for (auto& ground : grounds_) ground->give_back();
  installed_.reset();
}

thread_local const Engine::Inside* Engine::Inside::innermost = nullptr;

bool Engine::on_a_lane() const {
  for (const Inside* step = Inside::innermost; step != nullptr; step = step->outer) {
    if (step->engine == this) return true;
  }
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->thread.get_id() == std::this_thread::get_id(); });
}

Engine::Job& Engine::find(Id job) {
  auto found = jobs_.find(job);
  if (found == jobs_.end()) throw std::invalid_argument("job " + std::to_string(job) + " is not in this engine");
  return *found->second;
}

const Engine::Job& Engine::find(Id job) const { return const_cast<Engine*>(this)->find(job); }

Engine::Id Engine::add_job() {
  std::lock_guard<std::mutex> guard(lock_);
  auto job = std::make_shared<Job>();
  job->id = next_id_++;
  job->barriers.emplace_back(CounterBarrier::kFirstGroup);
  job->barriers[0].arrive();  // there is no step before the first
  const Id id = job->id;
  jobs_.emplace(id, std::move(job));
  return id;
}

void Engine::submit(Id id, std::shared_ptr<StepRun> run, const std::shared_ptr<StepRun>& after) {
  Dropped dropped;
  std::lock_guard<std::mutex> guard(lock_);
  if (stop_) throw Cancelled("the engine has been closed");
  if (id < 0 || id >= next_id_) find(id);
  auto found = jobs_.find(id);
  if (found == jobs_.end() || found->second->leaving) throw Cancelled("its job has left the engine");
  Job& job = *found->second;
  const int64_t largest = run->plan->heights.largest();
  if (largest > capacity_) {
    throw std::invalid_argument("a step that reaches " + std::to_string(largest) + " bytes cannot run in " +
                                std::to_string(capacity_) + " bytes");
  }
  if (largest > job.largest) {
    job.largest = largest;
    if (grounds_.size() > 1) share_out();
  }
  leave_to_lanes(job, job.queue.size());  // their callers are not waiting for them
  run->job = id;
  if (lanes_[0]->current) run->behind_caller(lanes_[0]->current->device());
  if (job.queue.empty()) arrive(job);
  job.queue.push_back(std::move(run));
  if (after && after->done && after->error) {
    fail_queue(job, std::make_exception_ptr(Cancelled(kEarlierFailed)), dropped, job.queue.size() - 1);
    return;
  }
  if (!job.running || job.queue.size() == 2) batch_arrives(job);
  offer_room(nullptr);
}

void Engine::batch_arrives(Job& job) {
  if (job.batch_arrived) return;
  job.batch_arrived = true;
  job.barriers[0].arrive();
  if (job.barriers[0].waiting_for() == 1) {
    line_up(job);
  }
}

// A step begins where a lane is free and its arena has room.
Engine::Lane* Engine::start(Job& job, Lane* here) {
  StepRun& run = *job.queue.front();
  Ground* tried = nullptr;
  const auto let_in = [&](Lane& lane) {
    if (!open_to(lane, job) || lane.ground == tried) return false;
    if (!leaves_enough(lane, job, run.plan->heights.largest())) return false;
    tried = lane.ground;
    auto& admission = lane.ground->admission;
    if (run.plan->heights.largest() > admission.pending_capacity().value_or(admission.capacity())) return false;
    if (admission.try_issue(job.id, &run.plan->heights, job.opportunistic)) return true;
    admission.wait(job.id, job.opportunistic);
    return false;
  };
  Lane* lane = nullptr;
  here = free_lane(job, here);
  if (here != nullptr && let_in(*here)) lane = here;
  for (size_t i = 0; lane == nullptr && i < lanes_.size(); ++i) {
    if (let_in(*lanes_[i])) lane = lanes_[i].get();
  }
  if (lane == nullptr) {
    end_waits_for(job.id);
    return nullptr;
  }
  for (auto& ground : grounds_) {
    if (ground.get() != lane->ground) ground->admission.stop_waiting(job.id);
  }
  end_waits_for(job.id);
  lane->ground->begin(lane->end, job.id, *run.plan, run.plan->requests != nullptr && run.frame && !run.profile);
  return lane;
}

// Room is the last arrival at a group's barrier: whoever gets it may be issued.
bool Engine::grant(Job& job, Lane* here) {
  StepRun& run = *job.queue.front();
  const bool starts = !job.running;
  int32_t group = 0;
  Lane* lane = nullptr;
  if (starts) {
    lane = start(job, here);
    if (lane == nullptr) return false;
    ready_.erase(std::find(ready_.begin(), ready_.end(), &job));
    job.running = true;
    int64_t& reached = reached_ns_[job.opportunistic];
    reached = std::max(reached, job.served_ns);
    job.lane = lane->index;
    lane->job = &job;
  } else {
    lane = lanes_[job.lane].get();
    auto& admission = lane->ground->admission;
    group = run.plan->heights.groups() - admission.groups_left(job.id);
    if (!admission.try_issue(job.id, &run.plan->heights)) {
      admission.wait(job.id, job.opportunistic);
      return false;
    }
    lane->ground->grow(lane->end);
  }
  peak_held_ = std::max(peak_held_, held_by_all());
  if (arenas_) keep_pages_within();
  job.barriers[group].arrive();
  run.waited_ns += now_ns() - job.waiting_since;
  // An opportunistic one may take long, in which its caller could not be interrupted.
  if (starts && run.by_caller && !job.opportunistic) {
    lane->taken = true;
    run.lane = lane;
    run.finished.notify_all();
  } else if (lane != here) {
    lane->wake.notify_all();
  }
  return true;
}

void Engine::offer_room(Lane* here) {
  if (stop_) return;  // lanes are ending
  for (auto& ground : grounds_) {
    if (!ground->admission.anyone_waiting()) continue;
    for (Id id : ground->admission.waiting()) grant(find(id), here);
  }
  end_waits();
  for (size_t i = 0; i < ready_.size();) {
    Job* job = ready_[i];
    if (free_lane(*job, here) == nullptr || !grant(*job, here)) ++i;
  }
  if (opportunistic_ > 0) watch_for_absence();
}

// Fails the steps from position `first` on; those before it stay.
void Engine::fail_queue(Job& job, const std::exception_ptr& error, Dropped& dropped, size_t first) {
  for (size_t i = first; i < job.queue.size(); ++i) {
    StepRun& run = *job.queue[i];
    run.error = error;
    run.done = true;
    run.finished.notify_all();
    dropped.runs.push_back(std::move(job.queue[i]));
  }
  job.queue.resize(std::min(first, job.queue.size()));
}

// A job with nothing queued and nothing running: its barriers wait for the next step's parties.
void Engine::settle(Job& job) {
  leave_ground(job);
  end_waits_for(job.id);
  ready_.erase(std::remove(ready_.begin(), ready_.end(), &job), ready_.end());
  for (auto& barrier : job.barriers) barrier.rearm();
  job.barriers[0].arrive();  // the step before
  job.batch_arrived = false;
}

// Returns whether that is done already.
bool Engine::stop_job(std::unique_lock<std::mutex>& lock, Job& job, const std::string& reason, Dropped& dropped) {
  job.cancelled = reason;
  leave_to_lanes(job, job.queue.size());
  if (job.running) {
    if (job.pace) job.pace->hurry = true;
    lanes_[job.lane]->wake.notify_all();
    if (on_a_lane()) {
      job.stopped_inside = true;
      return false;
    }
    idle_.wait(lock, [&] { return !job.running || job.cancelled.empty(); });
    if (job.cancelled.empty()) return true;  // another thread stopped it, too, and was first
  }
  fail_queue(job, std::make_exception_ptr(Cancelled(reason)), dropped);
  settle(job);
  job.cancelled.clear();
  offer_room(nullptr);
  return true;
}

void Engine::cancel(Id id, const std::string& reason) {
  Dropped dropped;
  std::unique_lock<std::mutex> lock(lock_);
  const auto job = find(id).shared_from_this();  // it may be removed while this waits
  stop_job(lock, *job, reason.empty() ? "cancelled" : reason, dropped);
}

void Engine::remove_job(Id id) {
  Dropped dropped;
  std::unique_lock<std::mutex> lock(lock_);
  const auto job = find(id).shared_from_this();  // the end of its step may forget it while this waits
  if (job->leaving) throw std::invalid_argument("job " + std::to_string(id) + " is leaving this engine already");
  job->leaving = true;
  if (!stop_job(lock, *job, "its job was removed", dropped)) return;
  forget(id, dropped);
  offer_room(nullptr);
}

void Engine::forget(Id id, Dropped& dropped) {
  if (graphs_) dropped.graphs = graphs_->forget(id);
  if (find(id).opportunistic) --opportunistic_;
  jobs_.erase(id);
  if (grounds_.size() > 1) share_out();
}

bool Engine::set_capacity(int64_t bytes) {
  Dropped dropped;
  std::lock_guard<std::mutex> guard(lock_);
  if (bytes < 0) throw std::invalid_argument("capacity cannot be negative: " + std::to_string(bytes));
  capacity_ = bytes;
  share_out();
  for (auto& [id, job] : jobs_) {
    // A step that is larger than what is left would wait for ever, and those behind it with it.
    for (size_t i = job->running ? 1 : 0; i < job->queue.size(); ++i) {
      const int64_t needed = job->queue[i]->plan->heights.largest();
      if (needed <= bytes) continue;
      fail_queue(*job,
                 std::make_exception_ptr(std::runtime_error(
                     "the memory limit was lowered below what a step of this job needs: it reaches " +
                     std::to_string(needed) + " bytes, " + std::to_string(bytes) + " are left")),
                 dropped, i);
      if (job->running && i == 1 && job->batch_arrived && !job->barriers[0].open()) {
        job->batch_arrived = false;
        job->barriers[0].rearm();
      } else if (!job->running && i == 0) {
        settle(*job);
      }
    }
  }
  if (arenas_) keep_pages_within();
  offer_room(nullptr);
  return std::none_of(grounds_.begin(), grounds_.end(), [](auto& g) { return g->admission.pending_capacity(); });
}

size_t Engine::queued(Id job) const {
  std::lock_guard<std::mutex> guard(lock_);
  return find(job).queue.size();
}
std::vector<int64_t> Engine::lane_busy_ns() const {
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<int64_t> busy;
  for (const auto& lane : lanes_) busy.push_back(lane->busy_ns);
  return busy;
}

void Engine::record_spans(bool on, size_t most) {
  std::lock_guard<std::mutex> guard(lock_);
  recording_ = on;
  most_spans_ = most;
}

std::vector<Span> Engine::take_spans() {
  std::lock_guard<std::mutex> guard(lock_);
  return std::move(spans_);
}

void Engine::check() const {
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& ground : grounds_) ground->check();
}

}  // namespace waterflow
