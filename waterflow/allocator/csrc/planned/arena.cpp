#include "waterflow/allocator/csrc/planned/arena.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace waterflow {
namespace {

struct Stranded {
  std::unique_ptr<Placer> placer;
  std::function<void()> give_back;
  std::function<void(char*, char*)> discard;  // null once it is done

  void discard_between() const {
    std::vector<std::pair<char*, int64_t>> live;
    placer->each_live([&](char* at, int64_t bytes) { live.emplace_back(at, bytes); });
    std::sort(live.begin(), live.end());
    char* from = placer->base();
    for (const auto& [at, bytes] : live) {
      if (from < at) discard(from, at);
      from = std::max(from, at + bytes);
    }
    if (char* const end = placer->base() + placer->bytes(); from < end) discard(from, end);
  }
};

struct Ranges {
  static constexpr int32_t kMost = 256;
  // An end of an arena. Its placer is looked at only where one of its live blocks is given back: then it is there.
  struct Entry {
    std::atomic<uintptr_t> base{0};
    std::atomic<int64_t> bytes{0};
    std::atomic<Placer*> placer{nullptr};
  };
  std::mutex lock;
  Entry entries[kMost];
  std::atomic<int32_t> used{0};  // entries behind are empty
  std::vector<Stranded> detached;
  std::atomic<int32_t> detached_count{0};
  Ranges* parent = nullptr;  // those of the process that this one was forked from

  void replace_locked(const Placer* placer, Placer* instead) {
    for (auto& entry : entries) {
      if (entry.placer.load() != placer) continue;
      entry.bytes.store(0);
      if (instead != nullptr) entry.base.store(reinterpret_cast<uintptr_t>(instead->base()));
      entry.placer.store(instead);
      if (instead != nullptr) entry.bytes.store(instead->bytes(), std::memory_order_release);
    }
  }
  void sweep_locked() {
    std::erase_if(detached, [](Stranded& one) {
      if (one.placer->active()) return false;
      if (one.placer->any_live()) {
        if (one.discard) one.discard_between();
        one.discard = nullptr;
        return false;
      }
      one.give_back();
      return true;
    });
    detached_count = static_cast<int32_t>(detached.size());
  }
};

// What is held may outlive every engine. A forked child begins anew; what it has of its parent's is never given back.
Ranges* now = nullptr;

Ranges& ranges() {
  static const bool made = (now = new Ranges, true);
  (void)made;
  return *now;
}

bool has(const Ranges& all, const void* address) {
  for (int32_t i = 0, used = all.used.load(std::memory_order_acquire); i < used; ++i) {
    const auto& entry = all.entries[i];
    if (reinterpret_cast<uintptr_t>(address) - entry.base.load() < static_cast<uint64_t>(entry.bytes.load()))
      return true;
  }
  return std::any_of(all.detached.begin(), all.detached.end(),
                     [&](const Stranded& one) { return one.placer->contains(address); });
}

}  // namespace

void PlannedRanges::add(Placer* placer) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  for (int32_t i = 0; i < Ranges::kMost; ++i) {
    auto& entry = all.entries[i];
    if (entry.placer.load() != nullptr) continue;
    entry.placer.store(placer);
    entry.base.store(reinterpret_cast<uintptr_t>(placer->base()));
    entry.bytes.store(placer->bytes(), std::memory_order_release);
    all.used.store(std::max(all.used.load(), i + 1));
    return;
  }
  throw std::runtime_error("there are " + std::to_string(Ranges::kMost) + " ends of arenas in this process already");
}

void PlannedRanges::remove(const Placer* placer) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.replace_locked(placer, nullptr);
}

void PlannedRanges::keep(std::unique_ptr<Placer> placer, std::function<void()> give_back,
                         std::function<void(char*, char*)> discard, Placer* instead) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  const Placer* const mine = placer.get();
  all.detached.push_back({std::move(placer), std::move(give_back), std::move(discard)});
  ++all.detached_count;
  all.replace_locked(mine, instead);  // it can be found in one place or the other at any time
  all.sweep_locked();
}

void PlannedRanges::sweep() {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.sweep_locked();
}

void PlannedRanges::begin_anew() {
  if (now == nullptr) return;
  auto* const fresh = new Ranges;
  fresh->parent = now;
  now = fresh;
}

bool PlannedRanges::of_parents(const void* address) {
  for (const Ranges* all = now == nullptr ? nullptr : now->parent; all != nullptr; all = all->parent) {
    if (has(*all, address)) return true;
  }
  return false;
}

bool release_planned(void* address) {
  auto& all = ranges();
  for (int32_t i = 0, used = all.used.load(std::memory_order_acquire); i < used; ++i) {
    auto& entry = all.entries[i];
    const auto bytes = static_cast<uint64_t>(entry.bytes.load(std::memory_order_acquire));
    if (reinterpret_cast<uintptr_t>(address) - entry.base.load() >= bytes) continue;
    Placer* const placer = entry.placer.load();
    if (placer != nullptr && placer->contains(address) && placer->release(address)) return true;
  }
  if (all.detached_count.load() == 0) return false;
  std::lock_guard<std::mutex> guard(all.lock);
  for (const auto& one : all.detached) {
    if (!one.placer->contains(address) || !one.placer->release(address)) continue;
    all.sweep_locked();
    return true;
  }
  return false;
}

int64_t detached_bytes() {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.sweep_locked();
  int64_t total = 0;
  for (const auto& one : all.detached) {
    one.placer->each_live([&](char*, int64_t bytes) { total += bytes; });
  }
  return total;
}

}  // namespace waterflow
