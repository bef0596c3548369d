// Graphs of a GPU: what is issued once, and launched again as a whole.
#include <string>

#include "cuda_device.h"

namespace waterflow {

using Guard = std::lock_guard<std::mutex>;

void CudaDevice::begin_capture(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  if (const auto result = driver_.begin_capture(handle_of(stream), cu::CAPTURE_THREAD_LOCAL)) {
    driver_.fail(result, "cuStreamBeginCapture(stream " + std::to_string(stream) + ")");
  }
}

cu::Executable CudaDevice::end_capture(StreamId stream) {
  Current current(*this);
  cu::Graph graph = nullptr;
  cu::Executable made = nullptr;
  {
    Guard guard(lock_);
    if (const auto result = driver_.end_capture(handle_of(stream), &graph)) {
      if (graph != nullptr) driver_.destroy_graph(graph);
      driver_.fail(result, "cuStreamEndCapture(stream " + std::to_string(stream) + ")");
    }
  }
  const auto result = driver_.instantiate(&made, graph, 0);
  driver_.destroy_graph(graph);
  if (result) driver_.fail(result, "cuGraphInstantiate()");
  return made;
}

void CudaDevice::abandon_capture(StreamId stream) noexcept {
  try {
    Current current(*this);
    Guard guard(lock_);
    cu::Graph graph = nullptr;
    driver_.end_capture(handle_of(stream), &graph);
    if (graph != nullptr) driver_.destroy_graph(graph);
  } catch (const std::exception&) {
    // The context is lost or gone, and the capture with it.
  }
}

void CudaDevice::launch(cu::Executable graph, StreamId stream) {
  Current current(*this);
  cu::Stream on = nullptr;
  {
    Guard guard(lock_);
    on = handle_of(stream);
  }
  if (const auto result = driver_.launch_graph(graph, on)) {
    driver_.fail(result, "cuGraphLaunch(stream " + std::to_string(stream) + ")");
  }
}

void CudaDevice::destroy(cu::Executable graph) noexcept {
  try {
    Current current(*this);
    driver_.destroy_executable(graph);
  } catch (const std::exception&) {
    // The context is lost or gone, and the graph with it.
  }
}

void CudaDevice::launch_host(StreamId stream, cu::HostFunction function, void* data) {
  Current current(*this);
  cu::Stream on = nullptr;
  {
    Guard guard(lock_);
    on = handle_of(stream);
  }
  if (const auto result = driver_.launch_host(on, function, data)) {
    driver_.fail(result, "cuLaunchHostFunc(stream " + std::to_string(stream) + ")");
  }
}

}  // namespace waterflow
