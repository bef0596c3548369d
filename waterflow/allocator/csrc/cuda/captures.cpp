#include "waterflow/allocator/csrc/cuda/captures.h"

#include <condition_variable>

namespace waterflow {
namespace {

using clock = std::chrono::steady_clock;

constexpr auto A_STEP = std::chrono::seconds(1);  // at most; an evaluation takes longer

struct State {
  std::mutex lock;
  std::condition_variable changed;
  std::multiset<clock::time_point> beside;  // since when
  bool capturing = false;
  int waiting = 0;
};

State& state() {
  static auto* made = new State;  // threads may outlive what is destroyed at the end of the process
  return *made;
}

thread_local int beside_here = 0;
thread_local bool capturing_here = false;

}  // namespace

Capturing::Capturing() {
  if (beside_here > 0) return;  // it would wait for itself
  auto& all = state();
  std::unique_lock<std::mutex> guard(all.lock);
  ++all.waiting;
  while (all.capturing || !all.beside.empty()) {
    if (all.capturing) {
      all.changed.wait(guard);
      continue;
    }
    const auto until = *all.beside.begin() + A_STEP;
    if (until <= clock::now()) break;
    all.changed.wait_until(guard, until);
  }
  --all.waiting;
  alone_ = !all.capturing && all.beside.empty();
  if (alone_) all.capturing = capturing_here = true;
  all.changed.notify_all();
}

Capturing::~Capturing() {
  if (!alone_) return;
  auto& all = state();
  std::lock_guard<std::mutex> guard(all.lock);
  all.capturing = capturing_here = false;
  all.changed.notify_all();
}

BesideCaptures::BesideCaptures(bool wanted) {
  if (!wanted || capturing_here) return;
  auto& all = state();
  std::unique_lock<std::mutex> guard(all.lock);
  if (beside_here == 0) {
    all.changed.wait(guard, [&] { return !all.capturing && all.waiting == 0; });
  }
  count();
}

BesideCaptures::BesideCaptures(std::try_to_lock_t) {
  std::lock_guard<std::mutex> guard(state().lock);
  if (!state().capturing) count();
}

void BesideCaptures::count() {
  began_ = state().beside.insert(clock::now());
  ++beside_here;
  counted_ = true;
}

BesideCaptures::~BesideCaptures() {
  if (!counted_) return;
  auto& all = state();
  std::lock_guard<std::mutex> guard(all.lock);
  all.beside.erase(began_);
  --beside_here;
  if (all.beside.empty()) all.changed.notify_all();
}

}  // namespace waterflow
