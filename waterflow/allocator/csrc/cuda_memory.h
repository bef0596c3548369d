// Who serves torch's requests for a GPU's memory: the step on the calling thread, a graph that is captured, or the
// multi-stream allocator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "graph_pools.h"
#include "stream_allocator.h"

namespace waterflow {

constexpr int MOST_CUDA_DEVICES = 64;

struct CudaFigures {
  int64_t allocated = 0, peak_allocated = 0;    // bytes asked for and not given back
  int64_t reserved = 0, peak_reserved = 0;      // bytes of the device, arenas and graphs included
  int64_t planned = 0, pooled = 0, others = 0;  // requests by who served them
};

// One per device and process, made when it is first asked for and never destroyed: blocks outlive everything.
// Thread-safe. Until it is told to pool memory every request is one of the driver's, which is slow and always right.
class CudaMemory {
 public:
  // Throws CudaError where there is no such device.
  static CudaMemory& of(int device);
  static CudaMemory* existing(int device);  // null where nothing has asked for it yet

  // From now on the multi-stream allocator serves what is not planned, out of at most `limit` bytes (0: the device's).
  // A second call changes only the limit.
  void pool(int64_t limit);
  bool pools() const { return heap_.load() != nullptr; }

  // Null where there is no memory left; throws OutOfMemory with a map where there is a pool.
  void* allocate(size_t bytes, cu::Stream stream);
  // Throws UsageError for what none of ours handed out.
  void release(void* address, size_t bytes);
  // `stream` uses it, too, until it is released.
  void record_stream(void* address, cu::Stream stream);
  int64_t trim();  // gives back what is free; bytes

  GraphPools& graphs() { return graphs_; }
  const std::shared_ptr<CudaDevice>& device() const { return device_; }
  CudaFigures figures();
  void reset_peaks();
  std::string map() const;  // of what the multi-stream allocator holds

 private:
  explicit CudaMemory(int device);
  StreamId stream_of(StreamAllocator& heap, cu::Stream stream);
  void count(std::atomic<int64_t>& kind, size_t bytes);

  const std::shared_ptr<CudaDevice> device_;
  GraphPools graphs_;
  std::mutex lock_;
  std::atomic<StreamAllocator*> heap_{nullptr};
  std::vector<char> told_;  // by stream: the multi-stream allocator knows it
  std::atomic<int64_t> plain_blocks_{0};
  std::atomic<int64_t> allocated_{0}, peak_{0}, peak_reserved_{0}, planned_{0}, pooled_{0}, others_{0};
};

}  // namespace waterflow
