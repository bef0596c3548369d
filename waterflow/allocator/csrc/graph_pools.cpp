#include "graph_pools.h"

#include <algorithm>

namespace waterflow {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr int64_t ALIGNMENT = 512;

int64_t up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

GraphPools::~GraphPools() {
  try {
    for (auto& [id, pool] : pools_) {
      for (const auto& segment : pool.segments) {
        device_->shrink(segment.base, segment.bytes);
        device_->unreserve(segment.base, segment.bytes);
      }
    }
  } catch (const std::exception&) {
    // The context is lost or gone, and its memory with it.
  }
}

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
}

void GraphPools::release(GraphPoolId pool) {
  Guard guard(lock_);
  auto found = pools_.find(pool);
  if (found == pools_.end()) return;
  --found->second.graphs;
  drop_if_over(pool);
}

void GraphPools::drop_if_over(GraphPoolId id) {
  auto found = pools_.find(id);
  if (found->second.graphs > 0 || found->second.live > 0) return;
  if (!found->second.segments.empty()) device_->synchronize_all();
  for (const auto& segment : found->second.segments) {
    device_->shrink(segment.base, segment.bytes);
    device_->unreserve(segment.base, segment.bytes);
  }
  pools_.erase(found);
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
      if (!device_->grow(base, whole)) {
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
  drop_if_over(block.pool);
  return true;
}

}  // namespace waterflow
