#include "planned_ranges.h"

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
};

struct Ranges {
  static constexpr int32_t kMost = 256;
  std::mutex lock;
  std::atomic<Placer*> entries[kMost] = {};
  std::atomic<int32_t> used{0};  // entries behind are empty
  std::vector<Stranded> stranded;

  void remove_locked(const Placer* placer) {
    for (auto& entry : entries) {
      if (entry.load() == placer) entry.store(nullptr);
    }
  }
  void sweep_locked() {
    std::erase_if(stranded, [this](const Stranded& one) {
      if (one.placer->any_live()) return false;
      remove_locked(one.placer.get());
      one.give_back();
      return true;
    });
  }
};

Ranges& ranges() {
  static auto* made = new Ranges;  // what is held may outlive every engine
  return *made;
}

}  // namespace

void PlannedRanges::add(Placer* placer) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  for (int32_t i = 0; i < Ranges::kMost; ++i) {
    if (all.entries[i].load() != nullptr) continue;
    all.entries[i].store(placer);
    all.used.store(std::max(all.used.load(), i + 1));
    return;
  }
  throw std::runtime_error("there are " + std::to_string(Ranges::kMost) + " ends of arenas in this process already");
}

void PlannedRanges::remove(const Placer* placer) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.remove_locked(placer);
}

void PlannedRanges::keep(std::unique_ptr<Placer> placer, std::function<void()> give_back) {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.stranded.push_back({std::move(placer), std::move(give_back)});
  all.sweep_locked();
}

bool release_planned(void* address) {
  auto& all = ranges();
  for (int32_t i = 0, used = all.used.load(std::memory_order_acquire); i < used; ++i) {
    Placer* const placer = all.entries[i].load(std::memory_order_acquire);
    if (placer != nullptr && placer->contains(address)) return placer->release(address);
  }
  return false;
}

int64_t stranded_bytes() {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.sweep_locked();
  int64_t total = 0;
  for (const auto& one : all.stranded) {
    one.placer->each_live([&](char*, int64_t bytes) { total += bytes; });
  }
  return total;
}

}  // namespace waterflow
