#include "waterflow/allocator/csrc/cpu/lane_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "waterflow/allocator/csrc/cpu/cpu_arena.h"
#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/allocator/csrc/stream/stream_allocator.h"

namespace waterflow {
namespace {

struct Chain {
  std::mutex lock;
  ChainedAllocator* links[AllocatorChain::kLinks] = {};
  ChainedAllocator* ever[AllocatorChain::kLinks] = {};  // put in at some time
  std::atomic<c10::Allocator*> original{nullptr};
  c10::Allocator* top = nullptr;
};

Chain& chain() {
  static auto* made = new Chain;
  return *made;
}

void set(c10::Allocator* allocator) { c10::SetCPUAllocator(allocator, std::numeric_limits<uint8_t>::max()); }

void in_child() {
  auto& self = chain();
  if (auto* original = self.original.load()) set(original);
  new (&self.lock) std::mutex;  // it may have been held by a thread that is not here
  self.top = nullptr;
  for (auto*& link : self.links) link = nullptr;
}

}  // namespace

void AllocatorChain::put_in(Link link, ChainedAllocator* allocator) {
  auto& self = chain();
  std::lock_guard<std::mutex> guard(self.lock);
  static const int once = pthread_atfork(nullptr, nullptr, &in_child);
  (void)once;
  c10::Allocator* const now = c10::GetCPUAllocator();
  bool known = now == self.top && self.top != nullptr;
  for (auto* mine : self.ever) known = known || (mine != nullptr && mine == now);
  if (self.top != nullptr && !known) {
    // Somebody else stands before us and hands on to us: a link that is there already goes on, a new one is left out.
    if (allocator->inner() == nullptr) allocator->inner_ = self.original.load();
    return;
  }
  if (!known) self.original = now;
  self.links[link] = self.ever[link] = allocator;
  connect();
}

void AllocatorChain::take_out(Link link) {
  auto& self = chain();
  std::lock_guard<std::mutex> guard(self.lock);
  if (self.links[link] == nullptr || c10::GetCPUAllocator() != self.top) return;
  self.links[link] = nullptr;
  connect();
}

void AllocatorChain::connect() {
  auto& self = chain();
  c10::Allocator* top = self.original;
  for (auto* one : self.links) {
    if (one == nullptr) continue;
    one->inner_ = top;
    top = one;
  }
  self.top = top == self.original.load() ? nullptr : top;
  set(top);
}

bool AllocatorChain::in_place(Link link) {
  auto& self = chain();
  std::lock_guard<std::mutex> guard(self.lock);
  return self.links[link] != nullptr && c10::GetCPUAllocator() == self.top;
}

}  // namespace waterflow

void waterflow_witness(waterflow::ChainedAllocator* witness) {
  using waterflow::AllocatorChain;
  witness ? AllocatorChain::put_in(AllocatorChain::kWitness, witness)
          : AllocatorChain::take_out(AllocatorChain::kWitness);
}

namespace waterflow {
namespace {

// Memory of the machine as a device on which everything is done as soon as it is issued. All its addresses lie in one
// range, so that a glance at an address tells whose it is.
class HostMemory final : public Device {
 public:
  HostMemory() {
    range_ = int64_t{1} << 44;
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      range_ = std::min<int64_t>(range_, std::bit_floor(limit.rlim_cur / 8));
    }
    for (; range_ >= int64_t{1} << 30; range_ /= 2) {
      void* made = mmap(nullptr, range_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (made == MAP_FAILED) continue;
      base_ = reinterpret_cast<uintptr_t>(made);
      free_[base_] = range_;
      return;
    }
    range_ = 0;  // no addresses: it serves nothing
  }

  bool owns(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - base_ < static_cast<uintptr_t>(range_);
  }
  int64_t granularity() const override { return CpuArena::page(); }

  uintptr_t reserve(int64_t bytes) override {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->second < bytes) continue;
      const auto [base, size] = *at;
      free_.erase(at);
      if (size > bytes) free_[base + bytes] = size - bytes;
      return base;
    }
    return 0;
  }
  void unreserve(uintptr_t base, int64_t bytes) override {
    std::lock_guard<std::mutex> guard(lock_);
    auto at = free_.emplace(base, bytes).first;
    if (const auto next = std::next(at); next != free_.end() && base + bytes == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at == free_.begin()) return;
    const auto before = std::prev(at);
    if (before->first + before->second != base) return;
    before->second += at->second;
    free_.erase(at);
  }
  bool grow(uintptr_t at, int64_t bytes) override {
    // Mapped anew and counted, so that a request for more than there is fails here and not where it is touched.
    return mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                0) != MAP_FAILED;
  }
  void shrink(uintptr_t at, int64_t bytes) override {
    // Mapped anew, as advice alone would leave the range counted as committed.
    mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }

  StreamId add_stream() override { return 0; }
  void remove_stream(StreamId) override {}
  EventId record(StreamId) override { return ++events_; }
  void wait(StreamId, EventId) override {}
  bool complete(EventId) override { return true; }
  void synchronize(EventId) override {}
  void forget(EventId) override {}

 private:
  std::mutex lock_;
  uintptr_t base_ = 0;
  int64_t range_ = 0;
  std::map<uintptr_t, int64_t> free_;
  std::atomic<EventId> events_{0};
};

// Requests have a pool by their size; each serves up to so many bytes. What lasts is mostly small: in the free segment
// of a large block it would keep the whole of it from the system.
constexpr int64_t kClasses[] = {int64_t{1} << 20, int64_t{10} << 20, NO_LIMIT};

struct PoolClass {
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  StreamAllocator allocator{memory};
  StreamId stream = memory->add_stream();
  PoolClass() { allocator.add_stream(stream); }
  void trim() {
    allocator.mark(stream);  // behind it all that was released is complete
    allocator.trim();
  }
};

struct Pool {
  std::array<PoolClass, std::size(kClasses)> classes;
  std::atomic<int> users{0};
  Pool* const parent;  // that of the process that this one was forked from
  explicit Pool(Pool* parent) : parent(parent) {}

  PoolClass& serving(int64_t bytes) {
    return classes[std::lower_bound(std::begin(kClasses), std::end(kClasses), bytes) - std::begin(kClasses)];
  }
  // The one that has this address; null for an address of nobody here.
  PoolClass* owner(const void* address) {
    for (auto& one : classes) {
      if (one.memory->owns(address)) return &one;
    }
    return nullptr;
  }
  int64_t sum(int64_t (StreamAllocator::*bytes)() const) const {
    int64_t all = 0;
    for (const auto& one : classes) all += (one.allocator.*bytes)();
    return all;
  }
};

std::atomic<Pool*> now{nullptr};
Pool* of_parent = nullptr;
std::mutex making;

Pool& pool() {
  if (Pool* made = now.load(std::memory_order_acquire)) return *made;
  std::lock_guard<std::mutex> guard(making);
  if (now.load() == nullptr) now = new Pool(of_parent);  // never destroyed: blocks outlive everything
  return *now.load();
}

}  // namespace

void* CpuPool::request(size_t bytes) {
  auto& serving = pool().serving(static_cast<int64_t>(bytes));
  try {
    return reinterpret_cast<void*>(serving.allocator.allocate(static_cast<int64_t>(bytes), serving.stream));
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}

bool CpuPool::owns(const void* address) { return pool().owner(address) != nullptr; }

void CpuPool::release(void* address) {
  auto& self = pool();
  auto& owner = *self.owner(address);
  owner.allocator.release(reinterpret_cast<uintptr_t>(address));
  if (self.users.load(std::memory_order_relaxed) == 0) owner.trim();
}

void CpuPool::begin_anew() {
  if (Pool* const made = now.exchange(nullptr)) of_parent = made;
  new (&making) std::mutex;  // a thread that is not here may hold it
}

bool CpuPool::of_parents(const void* address) {
  for (Pool* pool = of_parent; pool != nullptr; pool = pool->parent) {
    if (pool->owner(address) != nullptr) return true;
  }
  return false;
}

int64_t CpuPool::idle() { return pool().sum(&StreamAllocator::idle); }
int64_t CpuPool::held() { return pool().sum(&StreamAllocator::held); }
void CpuPool::trim() {
  for (auto& one : pool().classes) one.trim();
}
void CpuPool::open() { ++pool().users; }
void CpuPool::close() {
  if (--pool().users == 0) trim();
}

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
  if (installed == 0 && CpuPool::held() == 0 && detached_bytes() == 0) AllocatorChain::take_out(AllocatorChain::kLanes);
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
