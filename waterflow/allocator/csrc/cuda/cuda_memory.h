// Torch's requests for a GPU's memory: the pools of captured graphs, the choice of who serves a request, and the
// functions that torch calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "waterflow/allocator/csrc/cuda/cuda_device.h"
#include "waterflow/allocator/csrc/stream/stream_allocator.h"

struct CUstream_st;  // what a stream's handle points to, in torch's signatures

namespace waterflow {

using GraphPoolId = std::pair<unsigned long long, unsigned long long>;
using GraphFilter = std::function<bool(CUstream_st*)>;

// Memory of captured CUDA graphs: a graph finds the same bytes at the same addresses whenever it is run again.
// What is asked for between `begin` and `end` on a stream that the filter names lies in the pool, and nothing else ever
// does, until every graph that used it has been released and nothing in it is held. Inside a capture the device cannot
// be asked and nothing may wait: within a pool memory goes from hand to hand on one stream only. Thread-safe.
class GraphPools {
 public:
  static constexpr int64_t SEGMENT = int64_t{32} << 20;

  explicit GraphPools(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  // A fresh pool grows by `segment` bytes at least.
  void begin(GraphPoolId pool, GraphFilter filter, int64_t segment = SEGMENT);
  void end(GraphPoolId pool);
  void release(GraphPoolId pool);

  // False in `*mine`: not for a pool. 0 where the device has no memory left.
  uintptr_t allocate(int64_t bytes, cu::Stream stream, bool* mine);
  bool free(uintptr_t at);                        // false where it lies in no pool
  int64_t of_users() const { return of_users_; }  // bytes of the pools that are no engine's

 private:
  struct Segment {
    uintptr_t base;
    int64_t bytes, used = 0;
  };
  struct Pool {
    int64_t graphs = 0, segment = SEGMENT;
    std::vector<Segment> segments;
    std::map<std::pair<cu::Stream, int64_t>, std::vector<uintptr_t>> spare;
    int64_t live = 0;
  };
  struct Block {
    GraphPoolId pool;
    cu::Stream stream;
    int64_t bytes;
  };

  void leave_if_over(GraphPoolId id);
  void give_back();

  const std::shared_ptr<CudaDevice> device_;
  std::mutex lock_;
  std::map<GraphPoolId, Pool> pools_;
  std::vector<std::pair<GraphPoolId, GraphFilter>> active_;
  std::map<uintptr_t, Block> live_;
  std::atomic<int64_t> of_users_{0};
  std::vector<std::pair<GraphPoolId, Segment>> over_;  // nobody's, and not given back yet
  // So that whoever captures nothing takes no lock.
  std::atomic<int64_t> capturing_{0}, blocks_{0};
};

constexpr auto kEnginesGraphs = ~0ull;  // first number of the pools of engines' lanes

// Who serves torch's requests for a GPU's memory: the step on the calling thread, a graph that is captured, or the
// multi-stream allocator.

constexpr int MOST_CUDA_DEVICES = 64;

struct CudaStats {
  int64_t allocated = 0, peak_allocated = 0;    // bytes asked for and not given back
  int64_t reserved = 0, peak_reserved = 0;      // bytes of the device, arenas and graphs included
  int64_t planned = 0, pooled = 0, others = 0;  // requests by who served them
};

class CudaLimit;

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
  int64_t give_back();  // what is free in the pool, once that is done; bytes

  GraphPools& graphs() { return graphs_; }
  const std::shared_ptr<CudaDevice>& device() const { return device_; }
  // Bytes that it may take from the device; below 0 where limits have come down since.
  int64_t room() const { return device_->room(); }
  CudaStats stats();
  void reset_peaks();
  std::string map() const;  // of what the multi-stream allocator holds

 private:
  friend CudaLimit;
  explicit CudaMemory(int device);
  int64_t most(int64_t plain) const;
  bool make_room();
  uintptr_t serve(int64_t bytes, cu::Stream stream, bool* captured);
  StreamId told(StreamAllocator& heap, StreamId stream);
  void count(std::atomic<int64_t>& kind, size_t bytes);

  const std::shared_ptr<CudaDevice> device_;
  GraphPools graphs_;
  std::mutex lock_;
  std::atomic<StreamAllocator*> heap_{nullptr};
  std::vector<char> told_;  // by stream: the multi-stream allocator knows it
  std::mutex limits_lock_;
  std::vector<CudaLimit*> limits_;
  std::atomic<int64_t> limit_{0}, claimed_{0};  // of all limits; limits without a claim are none
  std::atomic<int64_t> plain_blocks_{0};
  std::atomic<int64_t> allocated_{0}, peak_{0}, planned_{0}, pooled_{0}, others_{0};
};

// The limit of an engine, while it lives. With all limits of a device together: what waterflow has of the device beside
// what is the user's own is at most their sum, at every moment. The user's own is what others than lanes hold, less
// what jobs have claimed. Memory that is free is given back before memory is refused. Thread-safe.
class CudaLimit {
 public:
  // `lanes`: streams on which none but its steps ask for memory. `give_back` gives back the pages of its arenas on
  // which nothing stands; called without locks of its memory, on any thread.
  CudaLimit(int device, int64_t bytes, const std::vector<StreamId>& lanes, std::function<void()> give_back);
  ~CudaLimit();
  CudaLimit(const CudaLimit&) = delete;
  CudaLimit& operator=(const CudaLimit&) = delete;

  void claim(int64_t bytes);  // jobs hold up to so many bytes between steps, from now on
  CudaMemory& memory() { return memory_; }

 private:
  friend CudaMemory;
  CudaMemory& memory_;
  const int64_t bytes_;
  const std::vector<StreamId> lanes_;
  const std::function<void()> give_back_;
  int64_t claimed_ = 0;
};

}  // namespace waterflow

// The functions that torch calls for memory of a GPU, with the signatures of torch's CUDAPluggableAllocator.

#define WATERFLOW_EXPORT __attribute__((visibility("default")))

// They may throw, as torch calls them from C++: memory that is not there becomes torch.OutOfMemoryError.
extern "C" {
WATERFLOW_EXPORT void* waterflow_malloc(size_t bytes, int device, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_free(void* address, size_t bytes, int device, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_record_stream(void* address, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_empty_cache();
WATERFLOW_EXPORT void waterflow_memory_fraction(double fraction, int device);
}
// Not C: these take C++ types by value, as torch passes them.
WATERFLOW_EXPORT void waterflow_begin_pool(int device, waterflow::GraphPoolId pool, waterflow::GraphFilter filter);
WATERFLOW_EXPORT void waterflow_end_pool(int device, waterflow::GraphPoolId pool);
WATERFLOW_EXPORT void waterflow_release_pool(int device, waterflow::GraphPoolId pool);
