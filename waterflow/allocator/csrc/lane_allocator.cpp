#include "lane_allocator.h"

#include <pthread.h>

#include <mutex>

#include "allocator_chain.h"
#include "planned_ranges.h"

namespace waterflow {
namespace {

thread_local Placer* t_placer = nullptr;  // of the host's memory
thread_local Placer* t_device_placer = nullptr;

void set_placer(Placer* placer) {
  const bool on_device = placer != nullptr && placer->memory() == PlacedIn::device;
  t_placer = on_device ? nullptr : placer;
  t_device_placer = on_device ? placer : nullptr;
}

void release(void* address);

struct LaneAllocator final : ChainedAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (t_placer != nullptr && bytes != 0) {
      if (void* memory = t_placer->request(bytes)) {
        return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return inner()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};

LaneAllocator& allocator() {
  static auto* made = new LaneAllocator;
  return *made;
}

void release(void* address) {
  if (address == nullptr) return;
  if (t_placer != nullptr && t_placer->contains(address)) {
    t_placer->release(address);
  } else if (!release_planned(address)) {
    allocator().inner()->raw_deleter()(address);
  }
}

std::mutex installed_lock;
int installed = 0;

}  // namespace

LaneAllocatorInstalled::LaneAllocatorInstalled() {
  std::lock_guard<std::mutex> guard(installed_lock);
  static const int once = pthread_atfork(nullptr, nullptr, [] { set_placer(nullptr); });
  (void)once;
  if (installed++ == 0) AllocatorChain::put_in(AllocatorChain::kLanes, &allocator());
}

LaneAllocatorInstalled::~LaneAllocatorInstalled() {
  std::lock_guard<std::mutex> guard(installed_lock);
  // What is still held may come back by its address alone, which torch's own allocator would not know.
  if (--installed == 0 && stranded_bytes() == 0) AllocatorChain::take_out(AllocatorChain::kLanes);
}

PlacerScope::PlacerScope(Placer* placer) : before_(placer_here()) { set_placer(placer); }
PlacerScope::~PlacerScope() { set_placer(before_); }
Placer* placer_here() { return t_placer != nullptr ? t_placer : t_device_placer; }
Placer* device_placer_here() { return t_device_placer; }

}  // namespace waterflow
