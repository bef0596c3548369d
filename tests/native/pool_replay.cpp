#include "pool_replay.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "waterflow/allocator/csrc/errors.h"
#include "waterflow/allocator/csrc/stream/stream_allocator.h"

namespace waterflow {

PoolStep::PoolStep(std::vector<Work> work_, const std::vector<int32_t>& births, const std::vector<int32_t>& deaths,
                   std::vector<int64_t> bytes_, int64_t copy_ns)
    : bytes(std::move(bytes_)), born(work_.size()), dying(work_.size()), work(std::move(work_)), copy_ns(copy_ns) {
  if (births.size() != bytes.size() || deaths.size() != bytes.size()) {
    throw std::invalid_argument("every piece of a step has a birth, a death and a size");
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (births[i] < 0 || deaths[i] < births[i] || deaths[i] >= operations()) {
      throw std::invalid_argument("a piece lives within the " + std::to_string(operations()) +
                                  " operations of its step; one from " + std::to_string(births[i]) + " to " +
                                  std::to_string(deaths[i]) + " was given");
    }
    born[static_cast<size_t>(births[i])].push_back(static_cast<int32_t>(i));
    dying[static_cast<size_t>(deaths[i])].push_back(static_cast<int32_t>(i));
  }
}

namespace {

constexpr int32_t kStreams = 2;

// Two streams and the copies of batches in virtual time: what was issued on a stream runs behind all that it waited
// for.
class TimedDevice : public SimulatedDevice {
 public:
  using SimulatedDevice::SimulatedDevice;

  EventId record(StreamId stream) override {
    const EventId event = SimulatedDevice::record(stream);
    behind_[event] = last_[stream];
    return event;
  }
  void wait(StreamId stream, EventId event) override {
    SimulatedDevice::wait(stream, event);
    after_[stream].push_back(behind_.at(event));
  }
  void forget(EventId event) override {
    SimulatedDevice::forget(event);
    behind_.erase(event);
  }

  // Work on a stream, behind one more item.
  ItemId issue(StreamId stream, const Work& work, ItemId before) {
    auto& after = after_[stream];
    after.push_back(before);
    std::erase(after, -1);
    last_[stream] = clock_.add(static_cast<int32_t>(stream), work, after);
    after.clear();
    issued_[stream].push_back(last_[stream]);
    return last_[stream];
  }
  // The next batch of a job, behind its step.
  ItemId copy(int64_t nanoseconds, ItemId before) {
    const Work work{.nanoseconds = nanoseconds};
    return before < 0 ? clock_.add(kStreams, work) : clock_.add(kStreams, work, {{before}});
  }

  void measure(PoolResult& result) {
    while (clock_.next()) {
    }
    for (const auto& issued : issued_) {
      if (!issued.empty()) result.makespan = std::max(result.makespan, clock_.end_of(issued.back()));
    }
    for (auto one = issued_[0].begin(), other = issued_[1].begin();
         one != issued_[0].end() && other != issued_[1].end();) {
      const int64_t begin = std::max(clock_.start_of(*one), clock_.start_of(*other));
      const int64_t end = std::min(clock_.end_of(*one), clock_.end_of(*other));
      result.overlapped += std::max<int64_t>(end - begin, 0);
      ++(clock_.end_of(*one) < clock_.end_of(*other) ? one : other);
    }
  }

 private:
  DeviceClock clock_{kStreams + 1};
  std::array<ItemId, kStreams> last_{-1, -1};
  std::array<std::vector<ItemId>, kStreams> after_, issued_;
  std::unordered_map<EventId, ItemId> behind_;
};

// Jobs whose steps ask one allocator for memory.
class Pool {
 public:
  Pool(const PoolSteps& steps, int64_t limit, int32_t streams, bool check)
      : limit_(std::max<int64_t>(limit, 0) / kPoolAlignment * kPoolAlignment),
        check_(check),
        device_(std::make_shared<TimedDevice>(limit_, kPoolAlignment)),
        allocator_(device_,
                   {.alignment = kPoolAlignment, .limit = limit_, .looks = SizeBins::ALL, .merge_at_once = true}) {
    for (const auto& step : steps) jobs_.push_back({step.get(), std::vector<uintptr_t>(step->bytes.size())});
    for (int32_t i = 0; i < streams; ++i) {
      streams_.push_back(device_->add_stream());
      allocator_.add_stream(streams_.back());
    }
    if (limit_ == 0) return;
    base_ = allocator_.allocate(limit_, streams_[0]);  // the one segment
    allocator_.release(base_);
    order_all();
  }

  // Streams wait for each other; then jobs go on where the pair has them. What they hold was used on the other stream
  // until then.
  void begin(const PoolPair& pair) {
    std::vector<Job*> moved;
    for (size_t side = 0; side < pair.size(); ++side) {
      if (pair[side].operations() == 0) continue;
      Job& job = jobs_.at(pair[side].job);
      if (std::exchange(job.stream, side) != side) moved.push_back(&job);
    }
    for (const Job* job : moved) {
      for (uintptr_t at : job->addresses) {
        if (at != 0) allocator_.end_use(at, streams_[1 - job->stream]);
      }
    }
    order_all();
    for (const Job* job : moved) {
      for (uintptr_t at : job->addresses) {
        if (at != 0) allocator_.use(at, streams_[job->stream]);
      }
    }
  }

  // The next operation of a job's step. Throws OutOfMemory.
  void issue(int32_t number, int32_t operation) {
    Job& job = jobs_.at(number);
    const PoolStep& step = *job.step;
    if (operation != job.next) {
      throw std::invalid_argument("operations of job " + std::to_string(number) + " must be issued in order: " +
                                  std::to_string(operation) + " came, " + std::to_string(job.next) + " is next");
    }
    const StreamId stream = streams_[job.stream];
    for (int32_t piece : step.born[operation]) {
      const uintptr_t at = job.addresses[piece] = allocator_.allocate(step.bytes[piece], stream);
      if (check_) device_->access(stream, at, step.bytes[piece]);
      result_.reach = std::max(result_.reach, static_cast<int64_t>(at - base_) + step.bytes[piece]);
      result_.peak = std::max(result_.peak, allocator_.held());
      ++result_.requests;
    }
    for (int32_t piece : step.dying[operation]) {
      const uintptr_t at = std::exchange(job.addresses[piece], 0);
      if (check_) device_->access(stream, at, step.bytes[piece]);
      allocator_.release(at);
    }
    if (operation == 0) job.copied = device_->copy(step.copy_ns, job.item);
    job.item = device_->issue(stream, step.work[operation], std::exchange(job.copied, -1));
    result_.alone += step.work[operation].nanoseconds;
    job.next = operation + 1 < step.operations() ? operation + 1 : 0;
  }

  // All steps are over, on the device, too.
  void finish() {
    for (const Job& job : jobs_) {
      if (job.next != 0) throw std::invalid_argument("a step must run to its end, which releases what it holds");
    }
    order_all();
    device_->finish_all();
    if (check_) allocator_.check();
  }

  PoolResult result() {
    result_.waits = device_->waits() - ordering_;
    return result_;
  }
  PoolResult timed() {
    device_->measure(result_);
    return result();
  }
  PoolResult refused(const OutOfMemory& error) {
    const std::string text = error.what();
    result_.refused = text.substr(0, text.find('\n'));  // without the map
    return result();
  }

 private:
  struct Job {
    const PoolStep* step;
    std::vector<uintptr_t> addresses;  // by piece; 0 for what is not held
    size_t stream = 0;
    int32_t next = 0;               // operation
    ItemId item = -1, copied = -1;  // its last operation; the batch of its next one
  };

  // Whatever is issued from now on runs after all that was: for the device, not for the host.
  void order_all() {
    const int64_t before = device_->waits();
    std::vector<Mark> marks;
    for (StreamId stream : streams_) marks.push_back(allocator_.mark(stream));
    for (StreamId stream : streams_) {
      for (Mark mark : marks) allocator_.wait(stream, mark);
    }
    ordering_ += device_->waits() - before;
  }

  const int64_t limit_;
  const bool check_;
  const std::shared_ptr<TimedDevice> device_;
  StreamAllocator allocator_;
  std::vector<StreamId> streams_;
  std::vector<Job> jobs_;
  uintptr_t base_ = 0;
  int64_t ordering_ = 0;  // waits that the pool was told to make
  PoolResult result_;
};

}  // namespace

PoolResult replay_pairs(const PoolSteps& jobs, const std::vector<PoolPair>& pairs, int64_t limit, int32_t iterations,
                        bool check) {
  Pool pool(jobs, limit, 2, check);
  try {
    for (int32_t i = 0; i < iterations; ++i) {
      for (const PoolPair& pair : pairs) {
        pool.begin(pair);
        const auto& [one, other] = pair;
        const int64_t n = one.operations(), m = other.operations();
        // Of both, the one whose middle of the next operation comes first; of equals, the first stream's.
        for (int64_t a = 0, b = 0; a < n || b < m;) {
          if (b == m || (a < n && (2 * a + 1) * m <= (2 * b + 1) * n)) {
            pool.issue(one.job, static_cast<int32_t>(one.begin + a++));
          } else {
            pool.issue(other.job, static_cast<int32_t>(other.begin + b++));
          }
        }
      }
      pool.finish();
    }
  } catch (const OutOfMemory& error) {
    return pool.refused(error);
  }
  return pool.timed();
}

PoolResult replay_operations(const PoolSteps& jobs, const std::vector<std::pair<int32_t, int32_t>>& operations,
                             int64_t limit, bool check) {
  Pool pool(jobs, limit, 1, check);
  try {
    for (const auto& [job, operation] : operations) pool.issue(job, operation);
    pool.finish();
  } catch (const OutOfMemory& error) {
    return pool.refused(error);
  }
  return pool.result();
}

}  // namespace waterflow
