// The rate limiter of opportunistic work: lanes sleep between slices of it, so that guaranteed steps run as if alone.
#pragma once

#include <atomic>
#include <cstdint>

namespace waterflow {

int64_t now_ns();  // of a clock that never goes back

// The share of time in which opportunistic work may run: while a guaranteed step is under way, and while none is.
struct Rates {
  std::atomic<double> beside{1.0};
  std::atomic<double> between{1.0};
  std::atomic<int32_t> guaranteed{0};  // steps under way
  std::atomic<int64_t> ended_ns{0};    // the last of them
  double at(int64_t now) const {
    if (guaranteed.load(std::memory_order_relaxed) > 0) return beside.load(std::memory_order_relaxed);
    if (now - ended_ns.load(std::memory_order_relaxed) > kAwayNs) return 1.0;
    return between.load(std::memory_order_relaxed);
  }
  static constexpr int64_t kAwayNs = 1'000'000'000;  // a guaranteed job without a step for longer is not there
};

// What one job owes for the time in which it ran. One thread at a time; `hurry` from any.
class Pace {
 public:
  explicit Pace(const Rates& rates) : rates_(rates) {}
  Pace(const Pace&) = delete;
  Pace& operator=(const Pace&) = delete;

  // From here to `end` the calling thread does the job's work. `sliced`: long operations are interrupted, too, by a
  // signal whose handler sleeps. They must not hold what others wait for.
  void begin(bool sliced);
  void end();
  void before_operation();
  int64_t take_slept();  // nanoseconds since the last call

  int64_t step_began_ns = 0;       // 0 where none is under way; the engine's
  std::atomic<bool> hurry{false};  // sleep no longer: it is to stop, or became guaranteed

 private:
  friend class Slices;
  void note();
  void pay(int64_t most);
  bool slice();  // in the handler; whether there is to be another
  const Rates& rates_;
  int64_t since_ = 0, owed_ = 0, slept_ = 0;
  bool sliced_ = false;
  double rate_ = 1.0;  // at `since_`
};

}  // namespace waterflow
