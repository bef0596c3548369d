// What the engine asks of a device: memory behind addresses, and order between streams. Nothing here knows torch.
#pragma once

#include <cstdint>
#include <functional>

namespace waterflow {

using StreamId = int64_t;  // given out once and never again: drivers reuse handles
using EventId = int64_t;   // a point of a stream, behind all that had been issued on it; never reused

// Three implementations: simulated (no memory, logical clocks), CPU, CUDA. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  // -- memory. Sizes and addresses are multiples of the granularity.
  virtual int64_t granularity() const = 0;
  // A range of addresses with nothing behind it; 0 where none is left.
  virtual uintptr_t reserve(int64_t bytes) = 0;
  virtual void unreserve(uintptr_t base, int64_t bytes) = 0;
  // Memory behind a part of a reserved range; false, and nothing changed, where the device has none left.
  virtual bool grow(uintptr_t at, int64_t bytes) = 0;
  virtual void shrink(uintptr_t at, int64_t bytes) = 0;

  // -- order. None but `synchronize` blocks the host.
  virtual StreamId add_stream() = 0;
  // What was issued still runs, and the stream's events stay valid.
  virtual void remove_stream(StreamId stream) = 0;
  virtual EventId record(StreamId stream) = 0;
  // What is issued on `stream` from now on runs after `event`.
  virtual void wait(StreamId stream, EventId event) = 0;
  virtual bool complete(EventId event) = 0;
  virtual void synchronize(EventId event) = 0;
  // Nobody will name the event again; waits that were issued for it stand.
  virtual void forget(EventId event) = 0;
};

// What the engine's lanes ask of a device that runs behind its host, beside memory and order: to run things.

class LaneDevice : public Device {
 public:
  // Work for a stream, in its order and behind what the stream was told to wait for. It runs later, or is issued at
  // once by the calling thread; it must not throw.
  virtual void enqueue(StreamId stream, std::function<void()> work) = 0;
};

}  // namespace waterflow
