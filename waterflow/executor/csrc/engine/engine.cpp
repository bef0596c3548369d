#include "waterflow/executor/csrc/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <latch>
#include <utility>

#include "waterflow/allocator/csrc/cpu/cpu_arena.h"
#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/allocator/csrc/cuda/cuda_arena.h"
#include "waterflow/allocator/csrc/cuda/cuda_memory.h"
#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/executor/csrc/graphs/step_graphs.h"

namespace waterflow {
namespace {

// A stream that torch has not made, as it knows it (torch.cuda.ExternalStream): by the driver's handle.
c10::Stream as_torchs(const CudaDevice& device, cu::Stream handle) {
  const c10::Device where(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device.index()));
  return c10::Stream(c10::Stream::UNSAFE, where, reinterpret_cast<c10::StreamId>(handle));
}

}  // namespace

Engine::Engine(int32_t lanes, int32_t threads_per_lane, int64_t capacity, bool arenas,
               std::optional<AsyncHost> async_host, std::optional<OnCuda> cuda)
    : process_(getpid()),
      room_(capacity),
      capacity_(capacity),
      admission_(capacity, lanes > 2 ? 2 * lanes : 1),  // room for a large step is lost on the others while it gathers
      arenas_(arenas),
      on_cuda_(cuda.has_value()) {
  if (lanes < 1) throw std::invalid_argument("an engine needs at least one lane; got " + std::to_string(lanes));
  if (threads_per_lane < 1)
    throw std::invalid_argument("intra-op threads must be at least 1; got " + std::to_string(threads_per_lane));
  SharedArena::MakeArena make_arena;
  if (arenas && cuda) {
    const auto memory = cuda->for_torch() ? PlacedIn::device : PlacedIn::host;
    make_arena = [device = cuda->device, memory](int64_t most) {
      return std::make_unique<CudaArena>(device, most + CudaArena::LARGEST_PAGE, 0, memory);
    };
  } else if (arenas) {
    make_arena = [](int64_t most) { return std::make_unique<CpuArena>(most); };
  }
  if (cuda && !cuda->for_torch() && cuda->given.size() != static_cast<size_t>(lanes)) {
    throw std::invalid_argument("an engine of " + std::to_string(lanes) + " lanes needs as many streams");
  }
  for (int32_t i = 0; i < lanes; i += 2) {
    shared_arenas_.push_back(std::make_unique<SharedArena>(
        capacity, make_arena,
        [this](bool all) {
          if (!all) return keep_pages_within();
          if (limit_) limit_->memory().give_back();
          discard_pages(INT64_MAX);
        },
        async_host || cuda, async_host ? async_host->fault : OrderFault::none));
  }
#ifdef WATERFLOW_TEST_HOOKS
  if (async_host) device_ = std::make_unique<CpuDevice>(0, async_host->stalls);
#else
  if (async_host)
    throw std::invalid_argument("asynchronous= is for tests: build waterflow with WATERFLOW_TEST_HOOKS=1");
#endif
  if (cuda) device_ = cuda->device;
  if (cuda && cuda->for_torch()) streams_ = CudaDevice::lend_streams(cuda->device, 2 * static_cast<size_t>(lanes));
  if (arenas && !(cuda && cuda->for_torch())) installed_ = std::make_unique<LaneAllocatorInstalled>();
  for (int32_t i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->index = i;
    lane->shared_arena = shared_arenas_[i / 2].get();
    lane->end = i % 2;
    if (cuda) {
      cu::Stream const handle = streams_ ? streams_->at(i) : cuda->given[i];
      lane->stream = cuda->device->adopt_stream(handle);
      if (streams_) lane->current = as_torchs(*cuda->device, handle);
    } else if (device_) {
      lane->stream = device_->add_stream();
      device_->enqueue(lane->stream, [threads_per_lane] { set_threads_here(threads_per_lane); });
    }
    lanes_.push_back(std::move(lane));
  }
  active_ = lanes;
  if (cuda && arenas && cuda->graph_bytes > 0) make_graph_lanes(*cuda);
  const auto started = std::make_shared<std::latch>(lanes);
  for (auto& lane : lanes_) {
    lane->thread = std::thread([this, threads_per_lane, lane = lane.get(), started] {
      set_threads_here(threads_per_lane);
      started->count_down();
      lane_main(*lane);
    });
  }
  started->wait();
}

Engine::~Engine() { close(); }

void Engine::Dropped::let_go() {
  graphs.clear();
  for (auto& run : runs) {
    run->inputs.clear();
    run->work.clear();
  }
  runs.clear();
}

void Engine::close() {
  if (inherited()) return;
  if (on_a_lane()) throw std::logic_error("an engine cannot be closed by a step that it runs");
  std::unique_ptr<CudaLimit> ended;  // without the lock
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
  streams_.reset();
  std::lock_guard<std::mutex> guard(lock_);
  const auto error = std::make_exception_ptr(Cancelled("the engine is shutting down"));
  for (auto& [id, job] : jobs_) fail_queue(*job, error, dropped);
  for (auto& shared_arena : shared_arenas_) shared_arena->give_back();
  installed_.reset();
  ended = std::move(limit_);
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
  job.largest = std::max(job.largest, largest);
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

// A step begins where a lane is free and there is room.
Lane* Engine::start(Job& job, Lane* here) {
  const StepRun& run = *job.queue.front();
  const Heights& heights = run.plan->heights;
  const bool enough = leaves_enough(job);
  Lane* lane = enough ? lane_for(job, here) : nullptr;
  if (lane == nullptr || !admission_.try_issue(job.id, &heights, job.opportunistic)) {
    enough ? admission_.wait(job.id, job.opportunistic) : admission_.stop_waiting(job.id);  // it holds up nobody
    lane = nullptr;
  }
  end_waits_for(job.id);
  if (lane == nullptr) return nullptr;
  if (run.may_be_planned() && lane->shared_arena->begin(lane->end, heights.largest(), admission_.capacity())) {
    lane->shared_arena->grow(lane->end, admission_.held_by(job.id));
  }
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
    group = run.plan->heights.groups() - admission_.groups_left(job.id);
    if (!admission_.try_issue(job.id, &run.plan->heights)) {
      admission_.wait(job.id, job.opportunistic);
      return false;
    }
    if (lane->shared_arena->planned(lane->end)) lane->shared_arena->grow(lane->end, admission_.held_by(job.id));
  }
  peak_held_ = std::max(peak_held_, admission_.held());
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
  bool refused = false, again = false;
  const auto granted = [&](Job& job) {
    const bool done = grant(job, here);
    again |= done && refused;  // that may be what those before it lacked: its next group is nearer its end
    refused |= !done;
    return done;
  };
  if (admission_.anyone_waiting()) {
    for (Id id : admission_.waiting()) granted(find(id));
  }
  end_waits();
  const auto kept = kept_lanes();
  for (size_t i = 0; i < ready_.size();) {
    Job* job = ready_[i];
    const bool open = std::any_of(lanes_.begin(), lanes_.end(), [&](auto& lane) { return open_to(*lane, *job); });
    if (!open || !granted(*job)) ++i;
  }
  if (again || (kept_lanes() < kept && !ready_.empty())) return offer_room(here);  // to those before it
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
}

bool Engine::set_capacity(int64_t bytes) {
  Dropped dropped;
  std::lock_guard<std::mutex> guard(lock_);
  if (bytes < 0) throw std::invalid_argument("capacity cannot be negative: " + std::to_string(bytes));
  capacity_ = bytes;
  if (limit_) limit_->claim(std::max<int64_t>(0, room_ - bytes));
  grow_capacity();
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
  return !admission_.pending_capacity();
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
  admission_.check();
  for (const auto& shared_arena : shared_arenas_) shared_arena->check();
  if (arenas_ && !device_ && beyond_capacity() > 0)
    throw std::logic_error("pages exceed the capacity by " + std::to_string(beyond_capacity()));
  const auto ending = [this](const auto& lane) { return lane->job != nullptr && !admission_.in_step(lane->job->id); };
  if (stop_ || (!device_ && std::any_of(lanes_.begin(), lanes_.end(), ending))) return;  // it offers its room at once
  const auto refused = [this](const Job& job) {
    Admission after = admission_;
    if (after.try_issue(job.id, &job.queue.front()->plan->heights))
      throw std::logic_error("job " + std::to_string(job.id) + " waits, although there is room");
  };
  for (const Job* job : ready_) {
    if (!job->opportunistic && lane_for(*job, nullptr) != nullptr) refused(*job);
  }
  for (Id id : admission_.waiting()) {
    if (find(id).running) refused(find(id));
  }
}

// Whose turn it is on a lane: a job that comes back at once goes on for a while before the next one has its turn.
//
// Going from job to job at each step would find the caches full of another's weights, and hand a thread over each time.

namespace {

constexpr int64_t kTurnNs = 40'000'000;     // that a job may be ahead of those that wait
constexpr int64_t kShortPauseNs = 300'000;  // of a job between steps, for which its lane waits; or an eighth of a step
constexpr int32_t kStepsNotKept = 4;        // before one that took longer is waited for again

}  // namespace

// Whether a step of this job may start there.
bool Engine::open_to(const Lane& lane, const Job& job) const {
  return lane.job == nullptr && lane.index < active_ && (lane.kept_for < 0 || lane.kept_for == job.id);
}

// The lane where a step of this job may begin: the one that is kept for it, the one asked for, or any.
Lane* Engine::lane_for(const Job& job, const Lane* here) const {
  Lane* found = nullptr;
  for (auto& lane : lanes_) {
    if (!open_to(*lane, job) || !has_pages(*lane, *job.queue.front())) continue;
    if (lane->kept_for == job.id) return lane.get();
    if (found == nullptr || lane.get() == here) found = lane.get();
  }
  return found;
}

// Whose step comes first where both wait.
bool Engine::before(const Job& one, const Job& other) const {
  if (one.opportunistic != other.opportunistic) return other.opportunistic;
  return fifo_lanes_ ? one.id < other.id : one.served_ns < other.served_ns;
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
  if (fifo_lanes_ ? before(**other, job) : job.served_ns >= (*other)->served_ns + kTurnNs) return;
  const int64_t patience = std::max(kShortPauseNs, run.busy_ns / 8);
  const bool queued = !job.queue.empty();
  if (!queued && !returns_within(job, patience)) return;
  if (admission_.anyone_waiting()) return;  // for room, which comes first
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

int64_t Engine::kept_lanes() const {
  return std::count_if(lanes_.begin(), lanes_.end(), [](const auto& each) { return each->kept_for >= 0; });
}

// On the lane's own thread, now and then while it is watched.
void Engine::look_after(Lane& lane) {
  const auto before = kept_lanes();
  end_waits();
  lane.watched = lane.kept_for >= 0 || (lane.job != nullptr && lane.taken);
  // Another lane's wait may have ended here, or a guaranteed job be gone.
  if (kept_lanes() < before || opportunistic_ > 0) offer_room(nullptr);
}

void Engine::set_fifo_lanes(bool fifo_lanes) {
  std::lock_guard<std::mutex> guard(lock_);
  fifo_lanes_ = fifo_lanes;
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

// How steps run: on the threads of lanes, or on that of a caller who has nothing else to do.

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
  SharedArena& shared_arena = *lane.shared_arena;
  const bool planned = run->placer != nullptr;
  const int64_t peak = planned ? shared_arena.reach(run->plan->heights.peak[group]) : 0;
  if (run->issued.size() >= kGroupsAhead) device_->synchronize(run->issued[run->issued.size() - kGroupsAhead]);
  if (planned) {
    std::lock_guard<std::mutex> guard(lock_);
    if (const auto event = shared_arena.order.before(lane.end, peak, shared_arena.pages().size()))
      device_->wait(lane.stream, *event);
  }
  device_->enqueue(lane.stream, [this, run, group] {
    const Inside inside(this);
    if (run->failure) return;
    const int64_t start = now_ns();
    try {
      run->run_group(group);
      if (group + 1 == run->plan->heights.groups()) run->finish();
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
    shared_arena.order.after(lane.end, peak, event, run->plan->heights.after[group]);
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
      lane.shared_arena->order.reached(lane.end, run.issued.back());
    }
    for (EventId event : run.issued) device_->forget(event);
  } catch (...) {
    if (!error) error = std::current_exception();  // a device that is lost
  }
  if (!error) error = run.failure;
}

void Engine::detach(Lane& lane, StepRun& run) {
  ++detached_;
  run.detached = true;
  lane.shared_arena->detach(lane.end);
}

void Engine::run_step(std::unique_lock<std::mutex>& lock, Lane& lane, Dropped& dropped) {
  const Inside inside(this);
  Job& job = *lane.job;
  const auto held_job = job.shared_from_this();  // the end of its step may forget it
  const std::shared_ptr<StepRun> held_run = job.queue.front();
  dropped.runs.push_back(held_run);
  StepRun& run = *held_run;
  const bool planned = lane.shared_arena->planned(lane.end);
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
    const int64_t held = admission_.held(), own = admission_.held_by(job.id);
    lock.unlock();
    try {
      if (!filled) run.on_stream(lane.current);
      if (!filled && planned) {
        run.placer = &lane.shared_arena->placer(lane.end);
        if (graphs_) run.graphs = graphs_->find(lane.index, run, *run.placer);
        if (graphs_ && !run.graphs && run.placer->any_live()) {  // a library keeps what a capture has asked for
          const std::lock_guard<std::mutex> guard(lock_);
          detach(lane, run);
          run.placer = nullptr;
        }
      }
      if (!filled && run.frame) run.fill();
      if (!filled && run.placer != nullptr) {
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
    // Before its memory is given back: does anybody hold what was planned to be gone? Behind the host that is not
    // known.
    bool kept = false;
    if (run.placer != nullptr && !behind && !run.detached) {
      kept = last ? run.placer->any_live() : run.placer->overdue(run.plan->ends[group] - 1);
    }
    const int64_t slept = run.pace != nullptr ? (run.pace->end(), run.pace->take_slept()) : 0;
    const int64_t ended = now_ns();
    lock.lock();
    if (kept) detach(lane, run);
    ++groups_done_;
    if (!behind) run.busy_ns += ended - start - slept;
    lane.busy_ns += ended - start - slept;
    if (recording_ && spans_.size() < most_spans_) {
      spans_.push_back({job.id, job.steps, group, lane.index, start, ended, held, own});
    }
    if (error) break;
    const bool lowered = admission_.pending_capacity().has_value();
    const bool step_ended = admission_.complete(job.id);
    if (lane.shared_arena->planned(lane.end)) lane.shared_arena->grow(lane.end, admission_.held_by(job.id));
    if ((lowered || kept) && arenas_) keep_pages_within();
    if (step_ended && behind && admission_.anyone_waiting()) offer_room(nullptr);  // the device may take a while yet
    if (step_ended) break;
    job.barriers[group + 1].arrive();  // the group before
    job.waiting_since = ended;
    if (!admission_.anyone_waiting()) {
      grant(job, &lane);
    } else {
      admission_.wait(job.id, job.opportunistic);  // the others may be nearer the end of theirs
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
    const bool kept = run.placer != nullptr && !run.detached && run.placer->any_live();
    lock.lock();
    run.error = error;
    if (run.placer != nullptr) {
      run.placed = run.placer->counts();
      placed_.add(run.placed);
      if (kept) detach(lane, run);
      run.placer->finish();  // one that was left behind may be gone from here on
      run.placer = nullptr;
      if (run.detached) PlannedRanges::sweep();
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

// Guaranteed jobs run as if alone; opportunistic ones take what they leave.

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
bool Engine::leaves_enough(const Job& job) const {
  if (!job.opportunistic) return true;
  const int64_t height = job.queue.front()->plan->heights.largest();
  int64_t largest = 0;
  int32_t to_come = 0;
  for (const auto& [id, other] : jobs_) {
    if (!present(*other)) continue;
    largest = std::max(largest, other->largest);
    if (!other->running) ++to_come;
  }
  if (largest > 0 && height + largest > admission_.capacity()) return false;
  const auto free = std::count_if(lanes_.begin(), lanes_.end(),
                                  [&](const auto& each) { return each->job == nullptr && each->index < active_; });
  return free > std::min(to_come, active_);
}

// Nobody tells when a guaranteed job has been idle for long: while an opportunistic step waits, a free lane looks.
void Engine::watch_for_absence() {
  const bool guaranteed_waits = !ready_.empty() && !ready_.front()->opportunistic;
  const auto waiting = admission_.waiting();
  if (guaranteed_waits || admission_.pending_capacity() ||
      std::any_of(waiting.begin(), waiting.end(), [&](Id id) { return !find(id).opportunistic; })) {
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

// How all lanes share one memory.

// A larger capacity comes when of two steps that could then meet in an arena one is over.
void Engine::grow_capacity() {
  int64_t bytes = capacity_;
  for (const auto& shared_arena : shared_arenas_) bytes = shared_arena->pages().capacity_up_to(bytes);
  admission_.set_capacity(bytes);
}

// Whether there is memory for a step that begins on this lane. What the host knows to be given back goes to others at
// once; on a device that runs behind it a step keeps what it has reached to its end, so all of it must fit.
bool Engine::has_pages(const Lane& lane, const StepRun& run) const {
  return needed_behind(&lane, &run) <= admission_.capacity();
}

// What steps on a device that runs behind its host may reach, with one more on that lane, if any, beyond what whole
// pages may take.
int64_t Engine::needed_behind(const Lane* lane, const StepRun* run) const {
  if (!device_ || !arenas_) return 0;
  const bool planned = run != nullptr && run->may_be_planned();
  const int64_t height = run != nullptr ? run->plan->heights.largest() : 0;
  int64_t bytes = planned ? 0 : height;
  for (const auto& shared_arena : shared_arenas_) {
    const PageLedger& pages = shared_arena->pages();
    const bool there = planned && shared_arena.get() == lane->shared_arena;
    bytes += there ? pages.needed_with(lane->end, height, admission_.capacity()) : pages.needed();
    if (there || shared_arena->stands()) bytes -= shared_arena->rounding();
  }
  for (const auto& other : lanes_) {
    if (holds_elsewhere(*other)) bytes += other->job->queue.front()->plan->heights.largest();
  }
  return bytes;
}

bool Engine::holds_elsewhere(const Lane& lane) const {
  return lane.job != nullptr && !lane.shared_arena->planned(lane.end);
}

// A step of this job is over, or will not be.
void Engine::leave_ground(Job& job) {
  admission_.release(job.id);
  if (job.lane >= 0) lanes_[job.lane]->shared_arena->finish(lanes_[job.lane]->end);
  if (admission_.capacity() < capacity_) grow_capacity();
  if (arenas_) keep_pages_within();
}

// Pages stay behind a step, for the next one; what would be too much beside what is held elsewhere goes.
void Engine::keep_pages_within() {
  const int64_t beyond = beyond_capacity();
  if (!limit_) {
    // The pool serves what is held elsewhere; what it keeps beside that is on top.
    const int64_t idle = CpuPool::idle();
    if (beyond + idle <= 0) return;
    if (idle > 0) CpuPool::trim();
    return discard_pages(beyond + CpuPool::idle());
  }
  if (limit_->memory().room() < 0) limit_->memory().give_back();  // which it does when asked
  discard_pages(limit_->memory().room() < 0 ? INT64_MAX : beyond);
}

int64_t Engine::pages() const {
  int64_t bytes = 0;
  for (const auto& shared_arena : shared_arenas_) bytes += shared_arena->pages().pages();
  return bytes;
}

// Bytes of pages and of what is held elsewhere, less the capacity.
int64_t Engine::beyond_capacity() const {
  int64_t bytes = pages() - admission_.capacity();
  for (const auto& shared_arena : shared_arenas_) bytes -= shared_arena->stands() ? shared_arena->rounding() : 0;
  for (const auto& lane : lanes_) {
    if (holds_elsewhere(*lane)) bytes += admission_.held_by(lane->job->id);
  }
  return bytes;
}

// Gives back so many bytes of pages, where nobody needs them, first those of arenas in which no step stands.
void Engine::discard_pages(int64_t bytes) {
  for (const bool idle : {true, false}) {
    for (auto shared_arena = shared_arenas_.rbegin(); bytes > 0 && shared_arena != shared_arenas_.rend();
         ++shared_arena) {
      if (idle != (*shared_arena)->stands()) bytes -= (*shared_arena)->discard(bytes);
    }
  }
}

void Engine::limit_memory(int64_t bytes) {
  std::vector<StreamId> streams;
  for (const auto& lane : lanes_) streams.push_back(lane->stream);
  auto limit = std::make_unique<CudaLimit>(lanes_[0]->current.value().device_index(), bytes, streams, [this] {
    std::lock_guard<std::mutex> guard(lock_);
    discard_pages(INT64_MAX);
  });
  std::lock_guard<std::mutex> guard(lock_);
  limit_ = std::move(limit);
}

// The streams of an engine's device graphs.

void Engine::make_graph_lanes(const OnCuda& cuda) {
  std::vector<GraphLane> made;
  for (const auto& lane : lanes_) {
    GraphLane one{cuda.device, lane->stream};
    one.current = lane->current;
    if (streams_) {
      one.capture_handle = streams_->at(lanes_.size() + static_cast<size_t>(lane->index));
      one.capture = cuda.device->adopt_stream(one.capture_handle);
      one.capturing = as_torchs(*cuda.device, one.capture_handle);
      one.pool = {kEnginesGraphs, reinterpret_cast<uintptr_t>(lane.get())};
    } else {
      one.capture = cuda.device->add_stream();
    }
    made.push_back(std::move(one));
  }
  graphs_ = std::make_shared<GraphCache>(std::move(made), cuda.graph_bytes);
}

}  // namespace waterflow
