#include "lane_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "allocator_chain.h"
#include "cpu_pool.h"
#include "planned_ranges.h"

namespace waterflow {
namespace {

thread_local Placer* t_placer = nullptr;  // of the host's memory
thread_local Placer* t_device_placer = nullptr;
thread_local bool t_lane = false;
std::atomic<bool> forked{false};  // nothing of ours is left but addresses

void set_placer(Placer* placer) {
  const bool on_device = placer != nullptr && placer->memory() == PlacedIn::device;
  t_placer = on_device ? nullptr : placer;
  t_device_placer = on_device ? placer : nullptr;
}

void release(void* address);

struct LaneAllocator final : ChainedAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (t_lane && bytes != 0) {
      void* memory = t_placer != nullptr ? t_placer->request(bytes) : nullptr;
      if (memory == nullptr) {
        memory = CpuPool::request(bytes);
        if (memory != nullptr) c10::profiledCPUMemoryReporter().New(memory, bytes);
      }
      if (memory != nullptr) return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
    }
    return inner()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};

LaneAllocator& allocator() {
  static auto* made = new LaneAllocator;
  return *made;
}

std::mutex installed_lock;
std::atomic<int> installed{0};

// What is still held may come back by its address alone, which torch's own allocator would not know.
void take_out_when_unused_locked() {
  if (installed == 0 && CpuPool::held() == 0 && stranded_bytes() == 0) AllocatorChain::take_out(AllocatorChain::kLanes);
}

void take_out_when_unused() {
  std::lock_guard<std::mutex> guard(installed_lock);
  take_out_when_unused_locked();
}

void release(void* address) {
  if (address == nullptr) return;
  // Memory of a parent's lanes stays as it is; a lock of its allocator may be held by a thread that is not here.
  if (forked.load(std::memory_order_relaxed) && (CpuPool::of_parents(address) || PlannedRanges::of_parents(address))) {
    return;
  }
  if (t_placer != nullptr && t_placer->contains(address)) {
    t_placer->release(address);
  } else if (CpuPool::owns(address)) {
    c10::profiledCPUMemoryReporter().Delete(address);
    CpuPool::release(address);
    if (installed.load(std::memory_order_relaxed) == 0) take_out_when_unused();
  } else if (release_planned(address)) {
    if (installed.load(std::memory_order_relaxed) == 0) take_out_when_unused();
  } else {
    allocator().inner()->raw_deleter()(address);
  }
}

}  // namespace

LaneAllocatorInstalled::LaneAllocatorInstalled() {
  std::lock_guard<std::mutex> guard(installed_lock);
  static const int once = pthread_atfork(nullptr, nullptr, [] {
    set_placer(nullptr);
    t_lane = false;
    forked = true;
    new (&installed_lock) std::mutex;
    installed = 0;
    CpuPool::begin_anew();
    PlannedRanges::begin_anew();
  });
  (void)once;
  CpuPool::open();
  if (installed++ == 0) AllocatorChain::put_in(AllocatorChain::kLanes, &allocator());
}

LaneAllocatorInstalled::~LaneAllocatorInstalled() {
  std::lock_guard<std::mutex> guard(installed_lock);
  CpuPool::close();
  --installed;
  take_out_when_unused_locked();
}

LaneScope::LaneScope(Placer* placer, bool lane)
    : placer_before_(placer_here()), lane_before_(std::exchange(t_lane, lane)) {
  set_placer(placer);
}

LaneScope::~LaneScope() {
  set_placer(placer_before_);
  t_lane = lane_before_;
}

bool on_lane_here() { return t_lane; }
Placer* placer_here() { return t_placer != nullptr ? t_placer : t_device_placer; }
Placer* device_placer_here() { return t_device_placer; }

}  // namespace waterflow
