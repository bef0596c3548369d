// Memory of captured CUDA graphs: a graph finds the same bytes at the same addresses whenever it is run again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_device.h"

struct CUstream_st;  // what a stream's handle points to, in torch's signatures

namespace waterflow {

using GraphPoolId = std::pair<unsigned long long, unsigned long long>;
using GraphFilter = std::function<bool(CUstream_st*)>;

// What is asked for between `begin` and `end` on a stream that the filter names lies in the pool, and nothing else ever
// does, until every graph that used it has been released and nothing in it is held. Inside a capture the device cannot
// be asked and nothing may wait: within a pool memory goes from hand to hand on one stream only. Thread-safe.
class GraphPools {
 public:
  static constexpr int64_t SEGMENT = int64_t{32} << 20;

  explicit GraphPools(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  ~GraphPools();

  // A fresh pool grows by `segment` bytes at least.
  void begin(GraphPoolId pool, GraphFilter filter, int64_t segment = SEGMENT);
  void end(GraphPoolId pool);
  void release(GraphPoolId pool);

  // False in `*mine`: not for a pool. 0 where the device has no memory left.
  uintptr_t allocate(int64_t bytes, cu::Stream stream, bool* mine);
  bool free(uintptr_t at);  // false where it lies in no pool

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

  void drop_if_over(GraphPoolId id);

  const std::shared_ptr<CudaDevice> device_;
  std::mutex lock_;
  std::map<GraphPoolId, Pool> pools_;
  std::vector<std::pair<GraphPoolId, GraphFilter>> active_;
  std::map<uintptr_t, Block> live_;
  // So that whoever captures nothing takes no lock.
  std::atomic<int64_t> capturing_{0}, blocks_{0};
};

}  // namespace waterflow
