#include "waterflow/allocator/csrc/cuda/cuda_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "waterflow/allocator/csrc/cpu/lane_allocator.h"
#include "waterflow/allocator/csrc/cuda/captures.h"
#include "waterflow/allocator/csrc/planned/arena.h"

namespace waterflow {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr int64_t ALIGNMENT = 512;  // what torch's own allocator gives, and kernels may count on

int64_t up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void GraphPools::begin(GraphPoolId pool, GraphFilter filter, int64_t segment) {
  Guard guard(lock_);
  auto& mine = pools_[pool];
  if (mine.segments.empty()) mine.segment = segment;
  ++mine.graphs;
  active_.emplace_back(pool, std::move(filter));
  capturing_ = static_cast<int64_t>(active_.size());
}

void GraphPools::end(GraphPoolId pool) {
  Guard guard(lock_);
  std::erase_if(active_, [&](const auto& one) { return one.first == pool; });
  capturing_ = static_cast<int64_t>(active_.size());
  give_back();
}

void GraphPools::release(GraphPoolId pool) {
  Guard guard(lock_);
  auto found = pools_.find(pool);
  if (found == pools_.end()) return;
  --found->second.graphs;
  leave_if_over(pool);
}

void GraphPools::leave_if_over(GraphPoolId id) {
  auto found = pools_.find(id);
  if (found->second.graphs > 0 || found->second.live > 0) return;
  for (const auto& segment : found->second.segments) over_.emplace_back(id, segment);
  pools_.erase(found);
  give_back();
}

// A user may have launched a graph on a stream of which nobody here knows, so this waits for the whole device; not
// during a capture, which that would spoil. No user's begins meanwhile: `begin` takes the lock.
void GraphPools::give_back() {
  const BesideCaptures beside(std::try_to_lock);
  if (!beside || capturing_ > 0 || over_.empty()) return;
  device_->synchronize_all();
  while (!over_.empty()) {
    const auto& [id, segment] = over_.back();
    device_->shrink(segment.base, segment.bytes);
    device_->unreserve(segment.base, segment.bytes);
    if (id.first != kEnginesGraphs) of_users_ -= segment.bytes;
    over_.pop_back();
  }
}

uintptr_t GraphPools::allocate(int64_t bytes, cu::Stream stream, bool* mine) {
  *mine = false;
  if (capturing_ == 0) return 0;
  Guard guard(lock_);
  const auto active = std::find_if(active_.begin(), active_.end(), [&](const auto& one) {
    return !one.second || one.second(static_cast<CUstream_st*>(stream));
  });
  *mine = active != active_.end();
  if (!*mine) return 0;
  const GraphPoolId id = active->first;
  Pool& pool = pools_[id];
  const int64_t size = up(std::max<int64_t>(bytes, 1), ALIGNMENT);
  uintptr_t at = 0;
  if (auto& spare = pool.spare[{stream, size}]; !spare.empty()) {
    at = spare.back();
    spare.pop_back();
  } else {
    auto segment = std::find_if(pool.segments.begin(), pool.segments.end(),
                                [&](const Segment& one) { return one.bytes - one.used >= size; });
    if (segment == pool.segments.end()) {
      const int64_t whole = up(std::max(size, pool.segment), device_->granularity());
      const uintptr_t base = device_->reserve(whole);
      if (base == 0) return 0;
      const int64_t users = id.first == kEnginesGraphs ? 0 : whole;
      of_users_ += users;
      if (!device_->grow(base, whole)) {
        of_users_ -= users;
        device_->unreserve(base, whole);
        return 0;
      }
      segment = pool.segments.insert(pool.segments.end(), Segment{base, whole});
    }
    at = segment->base + static_cast<uintptr_t>(segment->used);
    segment->used += size;
  }
  ++pool.live;
  live_.emplace(at, Block{id, stream, size});
  ++blocks_;
  return at;
}

bool GraphPools::free(uintptr_t at) {
  if (blocks_ == 0) return false;
  Guard guard(lock_);
  auto found = live_.find(at);
  if (found == live_.end()) return false;
  const Block block = found->second;
  live_.erase(found);
  --blocks_;
  Pool& pool = pools_[block.pool];
  pool.spare[{block.stream, block.bytes}].push_back(at);
  --pool.live;
  leave_if_over(block.pool);
  return true;
}

namespace {

std::atomic<CudaMemory*> memories[MOST_CUDA_DEVICES];
std::mutex making;

void raise(std::atomic<int64_t>& peak, int64_t value) {
  for (int64_t before = peak.load(std::memory_order_relaxed); before < value;) {
    if (peak.compare_exchange_weak(before, value, std::memory_order_relaxed)) return;
  }
}

}  // namespace

CudaMemory* CudaMemory::existing(int device) {
  return device < 0 || device >= MOST_CUDA_DEVICES ? nullptr : memories[device].load(std::memory_order_acquire);
}

CudaMemory& CudaMemory::of(int device) {
  if (CudaMemory* made = existing(device)) return *made;
  if (device < 0 || device >= MOST_CUDA_DEVICES) {
    throw std::invalid_argument("there is no CUDA device " + std::to_string(device));
  }
  std::lock_guard<std::mutex> guard(making);
  CudaMemory* made = existing(device);
  if (made == nullptr) {
    made = new CudaMemory(device);
    memories[device].store(made, std::memory_order_release);
  }
  return *made;
}

CudaMemory::CudaMemory(int device)
    : device_(std::make_shared<CudaDevice>(CudaDriver::load(), device)), graphs_(device_) {
  device_->bound([this](int64_t plain) { return most(plain); });
}

int64_t CudaMemory::most(int64_t plain) const {
  const int64_t limit = limit_;
  if (limit == 0) return NO_LIMIT;
  const StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  const int64_t others = plain + graphs_.of_users() + (heap != nullptr ? heap->held_by_others() : 0);
  return limit + std::max<int64_t>(0, others - claimed_);
}

CudaLimit::CudaLimit(int device, int64_t bytes, const std::vector<StreamId>& lanes, std::function<void()> give_back)
    : memory_(CudaMemory::of(device)), bytes_(bytes), lanes_(lanes), give_back_(std::move(give_back)) {
  StreamAllocator* const heap = memory_.heap_.load();
  if (heap == nullptr || bytes < 1) throw std::invalid_argument("a limit is of a pool, and of at least 1 byte");
  for (const auto lane : lanes_) heap->set_lane(memory_.told(*heap, lane), true);
  Guard guard(memory_.limits_lock_);
  memory_.limits_.push_back(this);
  memory_.limit_ += bytes_;
}

CudaLimit::~CudaLimit() {
  Guard guard(memory_.limits_lock_);
  std::erase(memory_.limits_, this);
  for (const auto lane : lanes_) memory_.heap_.load()->set_lane(lane, false);
  memory_.limit_ -= bytes_;
  memory_.claimed_ -= claimed_;
}

void CudaLimit::claim(int64_t bytes) { memory_.claimed_ += bytes - std::exchange(claimed_, bytes); }

int64_t CudaMemory::give_back() {
  StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  return heap != nullptr ? heap->give_back() : 0;
}

// A request has found nothing, although the pool has given back what it had.
bool CudaMemory::make_room() {
  const int64_t before = room();
  give_back();
  Guard guard(limits_lock_);
  for (auto* limit : limits_) limit->give_back_();
  return room() > before;
}

void CudaMemory::pool(int64_t limit) {
  std::lock_guard<std::mutex> guard(lock_);
  if (limit < 0) throw std::invalid_argument("a limit is at least 0 bytes; got " + std::to_string(limit));
  if (limit == 0) limit = device_->capacity();
  if (StreamAllocator* heap = heap_.load()) {
    give_back();  // a limit may not lie below what is in use
    heap->set_limit(limit);
    return;
  }
  AllocatorOptions options;
  options.alignment = ALIGNMENT;
  options.limit = limit;
  heap_.store(new StreamAllocator(device_, options));
}

StreamId CudaMemory::told(StreamAllocator& heap, StreamId id) {
  std::lock_guard<std::mutex> guard(lock_);
  if (static_cast<size_t>(id) >= told_.size()) told_.resize(static_cast<size_t>(id) + 1);
  if (!told_[static_cast<size_t>(id)]) heap.add_stream(id);
  told_[static_cast<size_t>(id)] = 1;
  return id;
}

void CudaMemory::count(std::atomic<int64_t>& kind, size_t bytes) {
  kind.fetch_add(1, std::memory_order_relaxed);
  const auto size = static_cast<int64_t>(bytes);
  raise(peak_, allocated_.fetch_add(size, std::memory_order_relaxed) + size);
}

void* CudaMemory::allocate(size_t bytes, cu::Stream stream) {
  if (bytes == 0) return nullptr;
  if (Placer* const placer = device_placer_here()) {
    if (void* const memory = placer->request(bytes)) {
      count(planned_, bytes);
      return memory;
    }
  }
  const auto size = static_cast<int64_t>(bytes);
  bool captured = false;
  uintptr_t at = serve(size, stream, &captured);
  if (at == 0) return nullptr;
  count(captured ? pooled_ : others_, bytes);
  return reinterpret_cast<void*>(at);
}

uintptr_t CudaMemory::serve(int64_t bytes, cu::Stream stream, bool* captured) {
  for (bool again = false;; again = true) {
    try {
      const uintptr_t at = graphs_.allocate(bytes, stream, captured);
      StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
      if (!*captured && heap != nullptr) return heap->allocate(bytes, told(*heap, device_->adopt_stream(stream)));
      if (!*captured) {
        const uintptr_t plain = device_->allocate_plain(bytes);
        plain_blocks_ += plain != 0;
        return plain;
      }
      if (at != 0 || again || !make_room()) return at;
    } catch (const OutOfMemory& error) {
      if (!again && make_room()) continue;
      const int64_t limit = limit_;
      if (limit == 0 || room() >= bytes) throw;
      throw OutOfMemory("memory= of the engines on the device is " + bytes_text(limit) + " together: " + error.what(),
                        error.needed, limit);
    }
  }
}

void CudaMemory::release(void* address, size_t bytes) {
  if (address == nullptr) return;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (!release_planned(address) && !graphs_.free(at)) {
    StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
    if (plain_blocks_ > 0 && device_->free_plain(at)) {
      --plain_blocks_;
    } else if (heap != nullptr) {
      heap->release(at);
    } else {
      throw UsageError("address " + std::to_string(at) + " was not handed out here");
    }
  }
  allocated_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

void CudaMemory::record_stream(void* address, cu::Stream stream) {
  StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  if (address == nullptr || heap == nullptr) return;  // giving a plain block back waits for the device
  const StreamId id = told(*heap, device_->adopt_stream(stream));
  try {
    heap->use(reinterpret_cast<uintptr_t>(address), id);
  } catch (const UsageError&) {
    // Planned memory is for its lane alone, and a graph's for the graph: what a step hands out is neither.
  }
}

CudaStats CudaMemory::stats() {
  CudaStats now;
  now.allocated = allocated_;
  now.peak_allocated = peak_;
  now.reserved = device_->grown() + device_->plain();
  now.peak_reserved = device_->peak();
  now.planned = planned_;
  now.pooled = pooled_;
  now.others = others_;
  return now;
}

void CudaMemory::reset_peaks() {
  peak_ = allocated_.load();
  device_->peak(true);
}

std::string CudaMemory::map() const {
  StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  return heap != nullptr ? heap->map() : "";
}

}  // namespace waterflow

// The functions that torch calls for memory of a GPU: torch.cuda.memory.CUDAPluggableAllocator takes their addresses.
// They may throw, as torch calls them from C++: an out-of-memory error becomes torch.OutOfMemoryError.

namespace {

using waterflow::CudaMemory;

void tell_profiler(void* address, int64_t change, int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  c10::reportMemoryUsageToProfiler(address, change, 0, 0, c10::Device(c10::DeviceType::CUDA, index));
}

}  // namespace

void* waterflow_malloc(size_t bytes, int device, CUstream_st* stream) {
  if (bytes == 0) return nullptr;
  auto& memory = CudaMemory::of(device);
  void* at = nullptr;
  std::string why;
  try {
    at = memory.allocate(bytes, stream);
  } catch (const waterflow::OutOfMemory& error) {
    why = error.what();
  }
  if (at == nullptr) {
    if (why.empty()) {
      why = "device " + std::to_string(device) + " has no " + waterflow::bytes_text(static_cast<int64_t>(bytes)) +
            " left beside the " + waterflow::bytes_text(memory.stats().reserved) +
            " that waterflow holds. Lower the batch size, or close other programs on the GPU.";
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, why);
  }
  tell_profiler(at, static_cast<int64_t>(bytes), device);
  return at;
}

void waterflow_free(void* address, size_t bytes, int device, CUstream_st*) {
  if (address == nullptr) return;
  try {
    CudaMemory::of(device).release(address, bytes);
  } catch (const std::exception& error) {
    TORCH_WARN("a block of GPU memory could not be given back: ", error.what());  // torch frees in destructors
    return;
  }
  tell_profiler(address, -static_cast<int64_t>(bytes), device);
}

void waterflow_record_stream(void* address, CUstream_st* stream) {
  // Torch does not say which device: the one that knows the address is told, and the others do not mind.
  for (int device = 0; device < waterflow::MOST_CUDA_DEVICES; ++device) {
    if (auto* memory = CudaMemory::existing(device)) memory->record_stream(address, stream);
  }
}

void waterflow_empty_cache() {
  for (int device = 0; device < waterflow::MOST_CUDA_DEVICES; ++device) {
    if (auto* memory = CudaMemory::existing(device)) memory->give_back();
  }
}

void waterflow_memory_fraction(double fraction, int device) {
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "a fraction of a device's memory lies between 0 and 1; got ", fraction);
  auto& memory = CudaMemory::of(device);
  const auto bytes = static_cast<int64_t>(std::floor(fraction * static_cast<double>(memory.device()->capacity())));
  if (memory.pools()) memory.pool(std::max<int64_t>(bytes, 1));
}

void waterflow_begin_pool(int device, waterflow::GraphPoolId pool, waterflow::GraphFilter filter) {
  CudaMemory::of(device).graphs().begin(pool, std::move(filter));
}

void waterflow_end_pool(int device, waterflow::GraphPoolId pool) { CudaMemory::of(device).graphs().end(pool); }

void waterflow_release_pool(int device, waterflow::GraphPoolId pool) { CudaMemory::of(device).graphs().release(pool); }
