// The streams of an engine's device graphs.
#include "engine.h"
#include "graph_cache.h"

namespace waterflow {

void OnCuda::take_captures(int32_t lanes, int64_t bytes) {
  graph_bytes = bytes;
  const auto count = static_cast<size_t>(lanes);
  if (!for_torch() || handles.size() != 2 * count || streams.size() != 2 * count) return;
  capture_handles.assign(handles.begin() + lanes, handles.end());
  capture_streams.assign(streams.begin() + lanes, streams.end());
  handles.resize(count);
  streams.erase(streams.begin() + lanes, streams.end());
}

void Engine::make_graph_lanes(const OnCuda& cuda) {
  if (cuda.for_torch() && cuda.capture_handles.size() != lanes_.size()) return;
  std::vector<GraphLane> made;
  for (const auto& lane : lanes_) {
    GraphLane one{cuda.device, lane->stream};
    one.current = lane->current;
    if (cuda.for_torch()) {
      const auto index = static_cast<size_t>(lane->index);
      one.capture_handle = cuda.capture_handles[index];
      one.capture = cuda.device->adopt_stream(one.capture_handle);
      one.capturing = cuda.capture_streams[index];
      one.pool = {~0ull, reinterpret_cast<uintptr_t>(lane.get())};
    } else {
      one.capture = cuda.device->add_stream();
    }
    made.push_back(std::move(one));
  }
  graphs_ = std::make_shared<GraphCache>(std::move(made), cuda.graph_bytes);
}

}  // namespace waterflow
