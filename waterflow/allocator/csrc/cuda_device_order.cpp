// Streams and events of a GPU.
#include <string>

#include "cuda_device.h"

namespace waterflow {

using Guard = std::lock_guard<std::mutex>;

cu::Stream CudaDevice::handle_of(StreamId stream) const {
  auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second.handle;
  throw std::invalid_argument("stream " + std::to_string(stream) +
                              (stream >= 0 && stream < next_stream_ ? " was removed" : " does not exist"));
}

cu::Event CudaDevice::handle_of_event(EventId event) const {
  auto found = events_.find(event);
  if (found != events_.end()) return found->second;
  throw std::invalid_argument("there is no event " + std::to_string(event) + ", or it was forgotten");
}

StreamId CudaDevice::add_stream() {
  Current current(*this);
  cu::Stream handle = nullptr;
  if (const auto result = driver_.create_stream(&handle, cu::NON_BLOCKING)) driver_.fail(result, "cuStreamCreate()");
  Guard guard(lock_);
  streams_.emplace(next_stream_, Stream{handle, true});
  return next_stream_++;
}

StreamId CudaDevice::adopt_stream(cu::Stream handle) {
  Current current(*this);
  auto identity = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(handle));
  if (driver_.stream_id != nullptr) {
    CaptureAllowed capture(driver_);
    if (const auto result = driver_.stream_id(handle, &identity)) driver_.fail(result, "cuStreamGetId()");
  }
  Guard guard(lock_);
  auto found = adopted_.find(identity);
  if (found != adopted_.end()) return found->second;
  streams_.emplace(next_stream_, Stream{handle, false, identity});
  adopted_.emplace(identity, next_stream_);
  return next_stream_++;
}

void CudaDevice::remove_stream(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  const auto handle = handle_of(stream);
  auto found = streams_.find(stream);
  if (found->second.own) {
    if (const auto result = driver_.destroy_stream(handle)) driver_.fail(result, "cuStreamDestroy()");
  } else {
    adopted_.erase(found->second.identity);
  }
  streams_.erase(found);
}

EventId CudaDevice::record(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  const auto on = handle_of(stream);
  cu::Event event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (const auto result = driver_.create_event(&event, cu::WITHOUT_TIMING)) {
    driver_.fail(result, "cuEventCreate()");
  }
  if (const auto result = driver_.record_event(event, on)) {
    spare_.push_back(event);
    driver_.fail(result, "cuEventRecord(stream " + std::to_string(stream) + ")");
  }
  events_.emplace(next_event_, event);
  return next_event_++;
}

void CudaDevice::wait(StreamId stream, EventId event) {
  Current current(*this);
  Guard guard(lock_);
  const auto on = handle_of(stream);
  if (const auto result = driver_.wait_event(on, handle_of_event(event), 0)) {
    driver_.fail(result,
                 "cuStreamWaitEvent(stream " + std::to_string(stream) + ", event " + std::to_string(event) + ")");
  }
}

bool CudaDevice::complete(EventId event) {
  Current current(*this);
  CaptureAllowed capture(driver_);
  Guard guard(lock_);
  const auto result = driver_.query_event(handle_of_event(event));
  if (result == cu::NOT_READY) return false;
  if (result) driver_.fail(result, "cuEventQuery(event " + std::to_string(event) + ")");
  return true;
}

void CudaDevice::synchronize(EventId event) {
  Current current(*this);
  CaptureAllowed capture(driver_);
  cu::Event handle = nullptr;
  {
    Guard guard(lock_);
    handle = handle_of_event(event);
  }
  if (const auto result = driver_.synchronize_event(handle)) {
    driver_.fail(result, "cuEventSynchronize(event " + std::to_string(event) + ")");
  }
}

void CudaDevice::forget(EventId event) {
  Guard guard(lock_);
  spare_.push_back(handle_of_event(event));
  events_.erase(event);
}

void CudaDevice::synchronize_all() {
  Current current(*this);
  if (const auto result = driver_.synchronize_context()) driver_.fail(result, "cuCtxSynchronize()");
}

}  // namespace waterflow
