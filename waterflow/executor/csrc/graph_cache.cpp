#include "graph_cache.h"

#include <algorithm>

#include "../../allocator/csrc/cuda_memory.h"

namespace waterflow {

using Guard = std::lock_guard<std::mutex>;

bool GraphCache::Terms::operator==(const Terms& other) const {
  if (plan != other.plan || base != other.base || numbers.size() != other.numbers.size()) return false;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto &mine = numbers[i], &theirs = other.numbers[i];
    if (mine.isDouble() != theirs.isDouble() || mine.isBool() != theirs.isBool()) return false;
    if (mine.isDouble() ? mine.toDouble() != theirs.toDouble() : mine.toBool() != theirs.toBool()) return false;
  }
  return true;
}

GraphCache::Terms GraphCache::terms_of(const StepRun& run, const Placer& placer) {
  Terms made{run.plan, placer.base(), {}};
  for (const auto& [slot, value] : run.inputs) {
    if (!value.isTensor()) made.numbers.push_back(value);
  }
  return made;
}

GraphCache::GraphCache(std::vector<GraphLane> lanes, int64_t most) : lanes_(std::move(lanes)), most_(most) {
  // Pools stay from one capture to the next, for they come and go with a wait for the whole device. All that lies there
  // is what steps hand out.
  for (const auto& lane : lanes_) {
    if (!lane.current) continue;
    auto& pools = CudaMemory::of(lane.device->index()).graphs();
    pools.begin(lane.pool, [](CUstream_st*) { return false; }, lane.device->granularity());
    pools.end(lane.pool);
  }
}

std::shared_ptr<GraphCache::Entry> GraphCache::entry(int32_t lane, const StepRun& run) const {
  for (const auto& one : entries_) {
    if (one->lane == lane && one->job == run.job && one->frame.lock() == run.frame) return one;
  }
  return nullptr;
}

std::shared_ptr<StepGraphs> GraphCache::drop(Entry& entry) {
  if (entry.graphs) {
    counts_.dropped += entry.graphs->graphs();
    counts_.bytes -= entry.graphs->bytes();
  }
  return std::exchange(entry.graphs, nullptr);
}

void GraphCache::refuse(Entry& entry, const std::string& why) {
  entry.refused = true;
  const std::pair<int64_t, std::string> told{entry.job, why};
  if (std::find(refusals_.begin(), refusals_.end(), told) == refusals_.end()) refusals_.push_back(told);
}

std::shared_ptr<StepGraphs> GraphCache::find(int32_t lane, StepRun& run, Placer& placer) {
  std::shared_ptr<Entry> mine;
  std::shared_ptr<StepGraphs> dropped;  // destroyed without the lock
  {
    Guard guard(lock_);
    mine = entry(lane, run);
    if (!mine || mine->refused || mine->terms.plan == nullptr) return nullptr;
    entries_.remove(mine);
    entries_.push_back(mine);
    if (!(mine->terms == terms_of(run, placer))) {
      dropped = drop(*mine);
      mine->terms = {};
      return nullptr;
    }
  }
  if (!mine->graphs && mine->thread != std::this_thread::get_id()) return nullptr;
  if (!mine->graphs && !capture(*mine, run, placer)) return nullptr;
  if (!mine->graphs->takes(run)) return nullptr;
  Guard guard(lock_);
  counts_.launched += mine->graphs->graphs();
  return mine->graphs;
}

std::shared_ptr<StepGraphs> GraphCache::capture(Entry& entry, StepRun& run, Placer& placer) {
  int64_t room = 0;
  {
    Guard guard(lock_);
    if (entry.captures == MOST_CAPTURES) {
      refuse(entry, "numbers or plans of its steps have changed " + std::to_string(MOST_CAPTURES) + " times");
      return nullptr;
    }
    room = most_ - counts_.bytes;
  }
  try {
    auto made = std::make_shared<StepGraphs>(lanes_.at(static_cast<size_t>(entry.lane)), run, placer, room);
    Guard guard(lock_);
    if (counts_.bytes + made->bytes() > most_) throw NotGraphed("another job has taken what the reserve has for them");
    entry.graphs = made;
    entry.tries = 0;
    ++entry.captures;
    counts_.captured += made->graphs();
    counts_.bytes += made->bytes();
    return made;
  } catch (const NotGraphed& why) {
    Guard guard(lock_);
    if (!why.for_now || ++entry.tries == MOST_TRIES) refuse(entry, why.what());
  } catch (const c10::Error& why) {
    Guard guard(lock_);
    refuse(entry, why.what_without_backtrace());
  } catch (const std::exception& why) {
    Guard guard(lock_);
    refuse(entry, why.what());
  }
  return nullptr;
}

void GraphCache::ran_as_planned(int32_t lane, const StepRun& run, const Placer& placer) {
  std::vector<std::shared_ptr<void>> dropped;  // destroyed without the lock
  Guard guard(lock_);
  auto mine = entry(lane, run);
  if (!mine) {
    mine = std::make_shared<Entry>(Entry{run.job, run.frame, lane});
    entries_.push_back(mine);
    std::vector<std::shared_ptr<Entry>> gone;
    size_t kept = 0;
    for (auto one = entries_.rbegin(); one != entries_.rend(); ++one) {
      if ((*one)->job == run.job && ((*one)->frame.expired() || ++kept > MOST_OF_A_JOB)) gone.push_back(*one);
    }
    for (const auto& one : gone) {
      dropped.push_back(drop(*one));
      entries_.remove(one);
    }
  }
  if (mine->graphs) return;
  mine->terms = terms_of(run, placer);
  mine->thread = std::this_thread::get_id();
}

std::vector<std::shared_ptr<void>> GraphCache::forget(int64_t job) {
  std::vector<std::shared_ptr<void>> gone;
  Guard guard(lock_);
  for (auto one = entries_.begin(); one != entries_.end();) {
    if ((*one)->job != job) {
      ++one;
      continue;
    }
    gone.push_back(drop(**one));
    gone.push_back(*one);
    one = entries_.erase(one);
  }
  return gone;
}

std::vector<std::shared_ptr<void>> GraphCache::close() {
  std::vector<std::shared_ptr<void>> gone;
  Guard guard(lock_);
  for (const auto& one : entries_) gone.push_back(drop(*one));
  entries_.clear();
  for (const auto& lane : lanes_) {
    if (lane.current) {
      CudaMemory::of(lane.device->index()).graphs().release(lane.pool);
    } else {
      lane.device->remove_stream(lane.capture);
    }
  }
  lanes_.clear();
  return gone;
}

GraphCounts GraphCache::counts() const {
  Guard guard(lock_);
  return counts_;
}

std::vector<std::pair<int64_t, std::string>> GraphCache::take_refusals() {
  Guard guard(lock_);
  return std::exchange(refusals_, {});
}

}  // namespace waterflow
