// Captures of device graphs, and what the driver bears beside none of them, in whatever thread of the process: a wait
// for the whole device, and first calls, for which kernels are loaded and libraries make their handles. Such a call
// fails then, or spoils the capture.
#pragma once

#include <chrono>
#include <mutex>
#include <set>

namespace waterflow {

// While it lives, and is true, a capture of the calling thread is the only one, and nothing happens beside it. It waits
// for that, and what comes meanwhile waits behind it; but not for what has gone on for longer than a step: then it is
// false.
class Capturing {
 public:
  Capturing();
  ~Capturing();
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  explicit operator bool() const { return alone_; }

 private:
  bool alone_ = false;
};

// While it lives, no capture begins.
class BesideCaptures {
 public:
  // Waits until a capture is over that is under way on another thread: hold no lock that it may need, nor the
  // interpreter's. Calls may be nested. Nothing where it is not `wanted`.
  explicit BesideCaptures(bool wanted = true);
  // False where a capture is under way, on this thread or another.
  explicit BesideCaptures(std::try_to_lock_t);
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  explicit operator bool() const { return counted_; }

 private:
  void count();
  bool counted_ = false;
  std::multiset<std::chrono::steady_clock::time_point>::iterator began_;
};

}  // namespace waterflow
