// Lanes that run the steps of many jobs, group by group, as admission and barriers allow.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "waterflow/allocator/csrc/cpu/cpu_device.h"
#include "waterflow/allocator/csrc/cuda/cuda_device.h"
#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/executor/csrc/engine/admission.h"
#include "waterflow/executor/csrc/engine/shared_arena.h"
#include "waterflow/executor/csrc/engine/throttle.h"
#include "waterflow/executor/csrc/engine/step_run.h"

namespace waterflow {

struct Span {
  int64_t job, step, group, lane, start_ns, end_ns, held, held_by_job;
};

// One step of a guaranteed job: when it could have begun, when it ended.
struct StepTime {
  int64_t job, ready_ns, ended_ns, busy_ns;
};

struct EngineJob;
class GraphCache;  // step_graphs.h
class CudaLimit;   // cuda_memory.h

// A place for one step at a time, with a thread of its own for steps that no caller runs.
struct Lane {
  int32_t index;
  SharedArena* shared_arena = nullptr;
  int32_t end = 0;                     // of the arena, 0 or 1
  StreamId stream = -1;                // of the device, where that runs behind the host
  std::optional<c10::Stream> current;  // the same as torch knows it, on a GPU
  EngineJob* job = nullptr;
  bool taken = false;                                     // a caller runs the step, or is about to
  int64_t kept_for = -1, kept_since = 0, kept_until = 0;  // the job whose next step it waits for
  bool watched = false;                                   // its thread looks whether that job comes back
  std::condition_variable wake;
  int64_t busy_ns = 0;
  std::thread thread;
};

struct EngineJob : std::enable_shared_from_this<EngineJob> {
  int64_t id;
  std::deque<std::shared_ptr<StepRun>> queue;  // the front one may be running
  std::vector<CounterBarrier> barriers;        // one a group; the first counts previous step, batch and room
  int64_t steps = 0;
  int64_t largest = 0;  // what its steps have reached so far
  int64_t waiting_since = 0;
  int64_t served_ns = 0;       // by lanes, or what it has forgone
  int64_t pause_ns = 0;        // that its lane was kept for it until its next step came, on average
  int32_t not_kept = 0;        // steps since that took too long
  bool opportunistic = false;  // it takes what guaranteed jobs leave
  std::unique_ptr<Pace> pace;  // of one that is, or was
  int64_t ready_ns = 0;        // its step in front could have begun
  int64_t ended_ns = 0;        // its last step
  int32_t lane = -1;
  bool batch_arrived = false;
  bool running = false;
  bool leaving = false;
  bool stopped_inside = false;  // by a thread that cannot wait for it: the end of its step does the rest
  std::string cancelled;        // the reason; empty when not
};

// How a CPU runs behind its host, for tests: random stalls, and mistakes that they must find.
struct AsyncHost {
  Stalls stalls;
  OrderFault fault = OrderFault::none;
};

// Lanes on a GPU, on streams that the device lends. In tests, which give the streams, host memory is planned there.
struct OnCuda {
  std::shared_ptr<CudaDevice> device;
  std::vector<cu::Stream> given;
  int64_t graph_bytes = 0;  // that copies of inputs of device graphs may take, 0 for none
  bool for_torch() const { return given.empty(); }
};

class Engine {
  static constexpr size_t kGroupsAhead = 2;  // of the device, on each lane
  static constexpr std::chrono::milliseconds kLook{1}, kLookForAbsence{20};
  static constexpr const char* kEarlierFailed = "an earlier step of this job failed";

 public:
  using Id = int64_t;

  // `threads_per_lane`: threads of each lane inside one operation, fixed for the engine's life (another number changes
  // bits). With `arenas` the memory of steps lies at planned addresses; two lanes share an arena, and all the capacity.
  // With `behind` groups of captured steps are only booked when they are issued, and run later, as on a device that has
  // its own order; `cuda` is such a device.
  Engine(int32_t lanes, int32_t threads_per_lane, int64_t capacity, bool arenas,
         std::optional<AsyncHost> async_host = {}, std::optional<OnCuda> cuda = {});
  ~Engine();

  // Ends the lanes: steps under way stop at their next group boundary, queued ones fail. Twice is no error.
  void close();
  bool inherited() const { return getpid() != process_; }  // by a forked child, in which its threads are not
  // Whether the calling thread is one of its lanes, or runs one of its steps: it cannot wait for lanes and memory.
  bool on_a_lane() const;

  // On torch's streams, before the first job: all that it takes of the device is at most `bytes`. See CudaLimit.
  void limit_memory(int64_t bytes);

  Id add_job();
  // Cancels what is queued, waits for a group in flight to end, and forgets the job. On a lane, where a garbage
  // collection may remove any job, it does not wait: the job is forgotten when its step ends.
  void remove_job(Id job);
  // Steps of a job run in order. Where the one it was made `after` has failed, this one fails, too.
  void submit(Id job, std::shared_ptr<StepRun> run, const std::shared_ptr<StepRun>& after = nullptr);
  // Waits at most `milliseconds`; returns whether the step is done. Does not rethrow. A step that is `by_caller` runs
  // on the calling thread, as soon as it may: that saves handing it to another and being woken by that. On a lane only
  // a step that is done may be waited for.
  bool wait(const std::shared_ptr<StepRun>& run, int64_t milliseconds);
  // Its callers wait no longer: the job's steps are for the lanes' own threads.
  void leave(Id job);
  // Cancels queued steps, and the one that runs at its next group boundary. `reason` is in their error. Waits for that
  // as `remove_job` does.
  void cancel(Id job, const std::string& reason);

  bool set_capacity(int64_t bytes);
  int64_t capacity() const {
    return under_lock([&] { return std::max(admission_.capacity(), needed_behind(nullptr, nullptr)); });
  }
  int64_t held() const {
    return under_lock([&] { return admission_.held(); });
  }
  size_t waiting_for_room() const {  // jobs
    return under_lock([&] { return admission_.waiting().size(); });
  }
  // How many lanes take new steps, the first ones; all at the beginning.
  void set_active_lanes(int32_t count);
  // Lanes go to the jobs that came first, and what those leave to the next, instead of being shared evenly.
  void set_fifo_lanes(bool fifo_lanes);
  // From its next step on. An opportunistic job starts a step only where a lane and room are left for each guaranteed
  // one, and goes at the rates below.
  void set_opportunistic(Id job, bool opportunistic);
  // Shares of time, 0 to 1: while guaranteed steps are under way, and in between.
  void set_rates(double beside, double between);
  // Steps of guaranteed jobs that have ended since the last call, the last ones where they are very many.
  std::vector<StepTime> take_step_times();
  // For how long opportunistic steps have been under way so far, their sleep included.
  int64_t opportunistic_ns() const;
  int32_t active_lanes() const { return locked(active_); }
  int64_t pages_in_use() const {  // bytes of arenas that may have pages
    return under_lock([&] { return pages(); });
  }
  int64_t peak_held() const { return locked(peak_held_); }
  size_t queued(Id job) const {
    return under_lock([&] { return find(job).queue.size(); });
  }
  int32_t lanes() const { return static_cast<int32_t>(lanes_.size()); }
  std::vector<int64_t> lane_busy_ns() const {
    return under_lock([&] {
      std::vector<int64_t> busy;
      for (const auto& lane : lanes_) busy.push_back(lane->busy_ns);
      return busy;
    });
  }
  int64_t steps_done() const { return locked(steps_done_); }
  int64_t groups_done() const { return locked(groups_done_); }
  int64_t progress_ns() const { return locked(progress_ns_); }  // done steps in the time that each takes alone
  PlacedCounts placed() const { return locked(placed_); }
  // Null where no device graphs are captured.
  const std::shared_ptr<GraphCache>& graphs() const { return graphs_; }
  int64_t detached() const { return locked(detached_); }            // steps that left something behind
  int64_t scheduling_ns() const { return locked(scheduling_ns_); }  // spent inside admission and barriers, all lanes

  void record_spans(bool on, size_t most);
  std::vector<Span> take_spans();
  void check() const;

 private:
  using Job = EngineJob;
  // Steps that have left their queue. What they hold may be Python's last hold on a job, which then calls the engine:
  // it is let go without the lock.
  struct Dropped {
    ~Dropped() { let_go(); }
    void let_go();
    std::vector<std::shared_ptr<StepRun>> runs;
    std::vector<std::shared_ptr<void>> graphs;
  };

  // The engines whose steps the calling thread runs, innermost first: a step may call one of another engine.
  struct Inside {
    explicit Inside(const Engine* engine) : engine(engine), outer(innermost) { innermost = this; }
    ~Inside() { innermost = outer; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    const Engine* engine;
    const Inside* outer;
    static thread_local const Inside* innermost;
  };

  template <class Read>
  std::invoke_result_t<Read> under_lock(const Read& read) const {
    std::lock_guard<std::mutex> guard(lock_);
    return read();
  }
  template <class Value>
  Value locked(const Value& value) const {
    return under_lock([&] { return value; });
  }

  void lane_main(Lane& lane);
  void run_step(std::unique_lock<std::mutex>& lock, Lane& lane, Dropped& dropped);
  void end_step(Job& job, StepRun& run, Dropped& dropped);
  void fail_queue(Job& job, const std::exception_ptr& error, Dropped& dropped, size_t first = 0);
  void settle(Job& job);
  void leave_to_lanes(Job& job, size_t count);
  bool stop_job(std::unique_lock<std::mutex>& lock, Job& job, const std::string& reason, Dropped& dropped);
  void forget(Id job, Dropped& dropped);
  void batch_arrives(Job& job);
  void offer_room(Lane* here);
  bool grant(Job& job, Lane* here);
  Lane* start(Job& job, Lane* here);
  Lane* lane_for(const Job& job, const Lane* here) const;
  bool before(const Job& one, const Job& other) const;
  bool open_to(const Lane& lane, const Job& job) const;
  void line_up(Job& job);
  bool leaves_enough(const Job& job) const;
  bool present(const Job& job) const;
  void watch_for_absence();
  void pace_starts(Job& job, StepRun& run);
  void pace_ends(Job& job, StepRun& run);
  void arrive(Job& job);
  void keep_for(Lane& lane, Job& job, const StepRun& run);
  bool returns_within(Job& job, int64_t patience);
  void note_pause(Job& job, const Lane& lane);
  void end_waits();
  void end_waits_for(Id job);
  int64_t kept_lanes() const;
  void look_after(Lane& lane);
  void grow_capacity();
  bool has_pages(const Lane& lane, const StepRun& run) const;
  int64_t needed_behind(const Lane* lane, const StepRun* run) const;
  int64_t pages() const;
  int64_t beyond_capacity() const;
  bool holds_elsewhere(const Lane& lane) const;
  void leave_ground(Job& job);
  void keep_pages_within();
  void discard_pages(int64_t bytes);
  void make_graph_lanes(const OnCuda& cuda);
  void issue(Lane& lane, const std::shared_ptr<StepRun>& run, int32_t group);
  void detach(Lane& lane, StepRun& run);
  void finish_stream(Lane& lane);
  void drain(Lane& lane, StepRun& run, std::exception_ptr& error);
  Job& find(Id job);
  const Job& find(Id job) const;

  mutable std::mutex lock_;
  std::mutex closing_;
  const pid_t process_;
  const int64_t room_;  // the capacity that is left while no job has claimed anything
  int64_t capacity_;    // that admission is to have
  Admission admission_;
  std::vector<std::unique_ptr<SharedArena>> shared_arenas_;
  std::unique_ptr<LaneAllocatorInstalled> installed_;
  std::unique_ptr<CudaLimit> limit_;    // null where torch's requests are not served from a GPU
  std::shared_ptr<LaneDevice> device_;  // where groups run behind the host
  std::shared_ptr<GraphCache> graphs_;
  CudaDevice::Lent streams_;  // of lanes, and then of their captures
  bool arenas_;
  bool on_cuda_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unordered_map<Id, std::shared_ptr<Job>> jobs_;
  std::deque<Job*> ready_;  // a step is there and only room and a lane are missing; who has had least comes first
  std::condition_variable idle_;
  Id next_id_ = 0;
  int64_t peak_held_ = 0;
  PlacedCounts placed_;
  int64_t detached_ = 0;
  int64_t steps_done_ = 0;
  int64_t groups_done_ = 0;
  int64_t progress_ns_ = 0;
  int64_t scheduling_ns_ = 0;
  int64_t reached_ns_[2] = {0, 0};  // the most that a job of each class had been served when a step of it started
  Rates rates_;
  int32_t opportunistic_ = 0;     // jobs
  int64_t opportunistic_ns_ = 0;  // of their steps that are over
  std::deque<StepTime> step_times_;
  int32_t active_ = 0;
  bool fifo_lanes_ = false;
  bool stop_ = false;
  bool recording_ = false;
  size_t most_spans_ = 0;
  std::vector<Span> spans_;
};

}  // namespace waterflow
