#include "cuda_memory.h"

#include <algorithm>
#include <string>

#include "lane_allocator.h"
#include "planned_ranges.h"

namespace waterflow {
namespace {

constexpr int64_t ALIGNMENT = 512;  // what torch's own allocator gives, and kernels may count on

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
    : device_(std::make_shared<CudaDevice>(CudaDriver::load(), device)), graphs_(device_) {}

void CudaMemory::pool(int64_t limit) {
  std::lock_guard<std::mutex> guard(lock_);
  if (limit < 0) throw std::invalid_argument("a limit is at least 0 bytes; got " + std::to_string(limit));
  if (limit == 0) limit = device_->capacity();
  if (StreamAllocator* heap = heap_.load()) {
    trim();  // a limit may not lie below what is in use
    heap->set_limit(limit);
    return;
  }
  AllocatorOptions options;
  options.alignment = ALIGNMENT;
  options.limit = limit;
  heap_.store(new StreamAllocator(device_, options));
}

StreamId CudaMemory::stream_of(StreamAllocator& heap, cu::Stream stream) {
  const StreamId id = device_->adopt_stream(stream);
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
  uintptr_t at = graphs_.allocate(size, stream, &captured);
  if (!captured) {
    StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
    if (heap != nullptr) {
      at = heap->allocate(size, stream_of(*heap, stream));
    } else if ((at = device_->allocate_plain(size)) != 0) {
      ++plain_blocks_;
    }
  }
  if (at == 0) return nullptr;
  count(captured ? pooled_ : others_, bytes);
  raise(peak_reserved_, device_->grown() + device_->plain());
  return reinterpret_cast<void*>(at);
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
  const StreamId id = stream_of(*heap, stream);
  try {
    heap->use(reinterpret_cast<uintptr_t>(address), id);
  } catch (const UsageError&) {
    // Planned memory is for its lane alone, and a graph's for the graph: neither goes to another stream.
  }
}

int64_t CudaMemory::trim() {
  StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  if (heap == nullptr) return 0;
  const int64_t bytes = heap->trim();
  device_->synchronize_all();  // what was in use still is free now
  return bytes + heap->trim();
}

CudaFigures CudaMemory::figures() {
  CudaFigures now;
  now.allocated = allocated_;
  now.peak_allocated = peak_;
  now.reserved = device_->grown() + device_->plain();
  raise(peak_reserved_, now.reserved);
  now.peak_reserved = peak_reserved_;
  now.planned = planned_;
  now.pooled = pooled_;
  now.others = others_;
  return now;
}

void CudaMemory::reset_peaks() {
  peak_ = allocated_.load();
  peak_reserved_ = device_->grown() + device_->plain();
}

std::string CudaMemory::map() const {
  StreamAllocator* const heap = heap_.load(std::memory_order_acquire);
  return heap != nullptr ? heap->map() : "";
}

}  // namespace waterflow
