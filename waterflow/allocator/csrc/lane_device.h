// What the engine's lanes ask of a device that runs behind its host, beside memory and order: to run things.
#pragma once

#include <functional>

#include "device.h"

namespace waterflow {

class LaneDevice : public Device {
 public:
  // Work for a stream, in its order and behind what the stream was told to wait for. It runs later, or is issued at
  // once by the calling thread; it must not throw.
  virtual void enqueue(StreamId stream, std::function<void()> work) = 0;
};

}  // namespace waterflow
