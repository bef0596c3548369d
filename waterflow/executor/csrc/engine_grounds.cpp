// How the engine's memory is shared out among its arenas.
#include <algorithm>

#include "../../allocator/csrc/cpu_pool.h"
#include "engine.h"

namespace waterflow {

// Each arena has an equal share, unless a job needs more: then the first one has what the largest job reaches, and the
// others share what is left. A share that grows waits for those that shrink.
void Engine::share_out() {
  const auto count = static_cast<int64_t>(grounds_.size());
  int64_t largest = 0;
  for (const auto& [id, job] : jobs_) largest = std::max(largest, job->largest);
  const int64_t first = std::min(capacity_, std::max(largest, capacity_ - capacity_ / count * (count - 1)));
  const auto share = [&](size_t i) { return i == 0 || count == 1 ? first : (capacity_ - first) / (count - 1); };
  for (const bool shrinking : {true, false}) {
    for (size_t i = 0; i < grounds_.size(); ++i) {
      const int64_t now = grounds_[i]->admission.capacity();
      if (shrinking != (share(i) < now)) continue;
      int64_t others = 0;
      for (const auto& ground : grounds_) others += ground == grounds_[i] ? 0 : ground->admission.capacity();
      grounds_[i]->set_capacity(shrinking ? share(i) : std::max(now, std::min(share(i), capacity_ - others)));
    }
  }
}

int64_t Engine::held_by_all() const {
  int64_t bytes = 0;
  for (const auto& ground : grounds_) bytes += ground->admission.held();
  return bytes;
}

int64_t Engine::capacity() const {
  std::lock_guard<std::mutex> guard(lock_);
  int64_t bytes = 0;
  for (const auto& ground : grounds_) bytes += ground->admission.capacity();
  return grounds_.size() == 1 ? bytes : std::max(bytes, capacity_);
}

int64_t Engine::held() const {
  std::lock_guard<std::mutex> guard(lock_);
  return held_by_all();
}

int64_t Engine::pages_in_use() const {
  std::lock_guard<std::mutex> guard(lock_);
  int64_t bytes = 0;
  for (const auto& ground : grounds_) bytes += ground->pages_in_use();
  return bytes;
}

// A step of this job is over, or will not be.
void Engine::leave_ground(Job& job) {
  for (auto& ground : grounds_) {
    ground->admission.release(job.id);
    for (int32_t i = 0; i < ground->lanes(); ++i) {
      if (ground->end(i).job == job.id) ground->finish(i);
    }
  }
  if (grounds_.size() > 1) share_out();
}

// Pages stay behind a step, for the next one; where that would be too much beside what is held elsewhere they go.
void Engine::keep_pages_within() {
  int64_t bytes = 0, limit = 0;
  for (const auto& ground : grounds_) {
    bytes += ground->pages_in_use() + ground->held_elsewhere();
    limit += ground->admission.capacity() + ground->rounding();
  }
  // The pool serves what is held elsewhere; what it keeps beside that is on top.
  if (bytes + CpuPool::idle() <= limit) return;
  CpuPool::trim();
  if (bytes + CpuPool::idle() <= limit) return;
  for (auto& ground : grounds_) ground->discard();
}

}  // namespace waterflow
