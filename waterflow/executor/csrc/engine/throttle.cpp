#include <Python.h>

#include "waterflow/executor/csrc/engine/throttle.h"

#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace waterflow {
namespace {

constexpr int64_t kSliceNs = 100'000;       // of work, before it sleeps
constexpr int64_t kShortestNs = 50'000;     // below it a sleep would take longer than was asked for
constexpr int64_t kNapNs = 200'000;         // then it looks whether rates have changed
constexpr int64_t kMostInside = 2'000'000;  // of sleep inside an operation, which may hold a lock of the C library
constexpr int64_t kMostOwedNs = 2'000'000'000;
constexpr double kLeastRate = 1e-3;  // less is none

timespec as_timespec(int64_t ns) { return {ns / 1'000'000'000, ns % 1'000'000'000}; }

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A timer of the calling thread, whose signal interrupts what it does.
class Slices {
 public:
  static Slices& here() {
    thread_local Slices slices;
    return slices;
  }

  void start(Pace* pace) {
    if (process_ != getpid()) make();
    if (!arrives()) return;  // then it pays between operations alone
    std::atomic_signal_fence(std::memory_order_seq_cst);
    pace_.store(pace, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    armed_ = true;
    if (!arm()) stop();
  }

  void stop() {
    pace_.store(nullptr, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    armed_ = false;
  }

  bool armed() const { return armed_; }

 private:
  Slices() { make(); }

  ~Slices() {
    stop();
    if (usable_ && process_ == getpid()) timer_delete(timer_);
  }

  // For this thread of this process: a forked child has no timers.
  void make() {
    process_ = getpid();
    usable_ = signal_number() > 0;
    if (!usable_) return;
    sigset_t mine;
    sigemptyset(&mine);
    sigaddset(&mine, signal_number());
    pthread_sigmask(SIG_UNBLOCK, &mine, nullptr);  // threads have the mask of those that start them
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = signal_number();
    event.sigev_value.sival_ptr = this;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    usable_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
  }

  // Whether signals would reach the handler: others may have blocked them, or taken their number for themselves.
  bool arrives() const {
    struct sigaction now{};
    sigset_t blocked;
    return usable_ && sigaction(signal_number(), nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
           now.sa_sigaction == &Slices::handle && pthread_sigmask(SIG_BLOCK, nullptr, &blocked) == 0 &&
           sigismember(&blocked, signal_number()) == 0;
  }

  // One that nobody uses, found once for the process; 0 where there is none.
  static int signal_number() {
    static const int found = [] {
      for (int number = SIGRTMAX - 1; number > SIGRTMAX - 8; --number) {
        struct sigaction before{};
        if (sigaction(number, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) continue;
        struct sigaction action{};
        action.sa_sigaction = &Slices::handle;
        action.sa_flags = SA_SIGINFO | SA_RESTART;
        sigemptyset(&action.sa_mask);
        if (sigaction(number, &action, nullptr) == 0) return number;
      }
      return 0;
    }();
    return found;
  }

  static void handle(int, siginfo_t* info, void*) {
    if (info->si_code != SI_TIMER) return;
    const int before = errno;
    auto* slices = static_cast<Slices*>(info->si_value.sival_ptr);
    Pace* pace = slices->pace_.load(std::memory_order_relaxed);
    if (pace != nullptr) {
      slices->armed_ = pace->slice();
      if (slices->armed_ && !slices->arm()) slices->armed_ = false;
    }
    errno = before;
  }

  bool arm() {
    itimerspec when{{0, 0}, as_timespec(kSliceNs)};
    return timer_settime(timer_, 0, &when, nullptr) == 0;
  }

  std::atomic<Pace*> pace_{nullptr};
  volatile bool armed_ = false;
  pid_t process_ = 0;
  bool usable_ = false;
  timer_t timer_{};
};

void Pace::begin(bool sliced) {
  since_ = now_ns();
  sliced_ = sliced;
}

void Pace::end() {
  if (sliced_) Slices::here().stop();
  note();
}

void Pace::note() {
  const int64_t now = now_ns();
  const double rate = rate_ = rates_.at(now);
  if (rate >= 1.0) {
    owed_ = 0;
  } else if (rate >= kLeastRate) {
    const auto more = static_cast<double>(now - since_) * (1.0 / rate - 1.0);
    owed_ = std::min(owed_ + static_cast<int64_t>(more), kMostOwedNs);
  }
  since_ = now;
}

void Pace::before_operation() {
  if (sliced_) {
    Slices& slices = Slices::here();
    if (slices.armed() && rate_ >= kLeastRate) return;  // its signals do the rest
    slices.stop();
  }
  note();
  if (owed_ >= kShortestNs || rate_ < kLeastRate) pay(INT64_MAX);
  if (sliced_ && rate_ < 1.0 && !hurry.load(std::memory_order_relaxed)) Slices::here().start(this);
}

bool Pace::slice() {
  note();
  if (PyGILState_Check()) return false;  // others would wait for the interpreter: it pays before the next operation
  pay(kMostInside);
  return rate_ < 1.0 && !hurry.load(std::memory_order_relaxed);
}

void Pace::pay(int64_t most) {
  while (!hurry.load(std::memory_order_relaxed) && most > 0) {
    const double rate = rate_ = rates_.at(since_);
    if (rate >= 1.0 || (rate >= kLeastRate && owed_ <= 0)) break;
    const timespec nap = as_timespec(rate < kLeastRate ? kNapNs : std::min(owed_, kNapNs));
    clock_nanosleep(CLOCK_MONOTONIC, 0, &nap, nullptr);
    const int64_t now = now_ns();
    owed_ -= now - since_;
    slept_ += now - since_;
    most -= now - since_;
    since_ = now;
  }
  owed_ = std::max(owed_, -kShortestNs);  // who slept too long has that much in hand, and no more
}

int64_t Pace::take_slept() { return std::exchange(slept_, 0); }

}  // namespace waterflow
