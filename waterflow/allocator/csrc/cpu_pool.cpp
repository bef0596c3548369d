#include "cpu_pool.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <memory>
#include <mutex>

#include "cpu_arena.h"
#include "stream_allocator.h"

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

struct Pool {
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();
  StreamAllocator allocator{memory};
  StreamId stream = memory->add_stream();
  std::atomic<int> users{0};
  const Pool* const parent;  // that of the process that this one was forked from
  explicit Pool(const Pool* parent) : parent(parent) { allocator.add_stream(stream); }
};

std::atomic<Pool*> now{nullptr};
const Pool* of_parent = nullptr;
std::mutex making;

Pool& pool() {
  if (Pool* made = now.load(std::memory_order_acquire)) return *made;
  std::lock_guard<std::mutex> guard(making);
  if (now.load() == nullptr) now = new Pool(of_parent);  // never destroyed: blocks outlive everything
  return *now.load();
}

}  // namespace

void* CpuPool::request(size_t bytes) {
  auto& self = pool();
  try {
    return reinterpret_cast<void*>(self.allocator.allocate(static_cast<int64_t>(bytes), self.stream));
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}

bool CpuPool::owns(const void* address) { return pool().memory->owns(address); }

void CpuPool::release(void* address) {
  auto& self = pool();
  self.allocator.release(reinterpret_cast<uintptr_t>(address));
  if (self.users.load(std::memory_order_relaxed) == 0) self.allocator.trim();
}

void CpuPool::begin_anew() {
  if (const Pool* const made = now.exchange(nullptr)) of_parent = made;
  new (&making) std::mutex;  // a thread that is not here may hold it
}

bool CpuPool::of_parents(const void* address) {
  for (const Pool* pool = of_parent; pool != nullptr; pool = pool->parent) {
    if (pool->memory->owns(address)) return true;
  }
  return false;
}

int64_t CpuPool::idle() { return pool().allocator.idle(); }
int64_t CpuPool::held() { return pool().allocator.held(); }
void CpuPool::trim() { pool().allocator.trim(); }
void CpuPool::open() { ++pool().users; }
void CpuPool::close() {
  if (--pool().users == 0) trim();
}

}  // namespace waterflow
