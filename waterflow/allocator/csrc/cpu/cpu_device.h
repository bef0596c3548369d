// The CPU as a device: real memory, and streams whose work is done later, by threads of their own, as a GPU would. It
// is there in builds for tests alone (test_hooks.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "waterflow/allocator/csrc/device.h"

namespace waterflow {

// Random stalls of its streams, so that an order which nobody asked for does not come about by itself.
struct Stalls {
  uint64_t seed = 0;
  double share = 0;  // of the pieces of work that a stall goes before
  int64_t longest_us = 0;
};

// Thread-safe. Work runs in the order of its stream and after what the stream was told to wait for; in no other order.
class CpuDevice : public LaneDevice {
 public:
  explicit CpuDevice(int64_t capacity, Stalls stalls = {});
  // Waits for all work.
  ~CpuDevice() override;

  int64_t granularity() const override { return granularity_; }
  uintptr_t reserve(int64_t bytes) override;
  void unreserve(uintptr_t base, int64_t bytes) override;
  bool grow(uintptr_t at, int64_t bytes) override;
  void shrink(uintptr_t at, int64_t bytes) override;

  StreamId add_stream() override;
  void remove_stream(StreamId stream) override;
  EventId record(StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool complete(EventId event) override;
  void synchronize(EventId event) override;
  void forget(EventId event) override;

  // Work for a stream, done later. Blocks while more than a few thousand pieces wait before it.
  void enqueue(StreamId stream, std::function<void()> work) override;
  // The stream stands still for so long when it comes to this.
  void stall(StreamId stream, int64_t microseconds);
  void finish(StreamId stream);  // blocks the host until its work is done
  void finish_all();

  int64_t capacity() const { return capacity_; }
  int64_t grown() const;

 private:
  struct Event {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;
  };
  struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    std::mt19937_64 random;
    bool closing = false;
    std::atomic<bool> over{false};  // the thread may be joined without waiting
    std::thread thread;
  };

  std::shared_ptr<Stream> live(StreamId stream) const;
  std::shared_ptr<Event> known(EventId event) const;
  static void put(Stream& stream, std::function<void()> work);
  void run(Stream& stream) const;
  void within_reserved(uintptr_t at, int64_t bytes) const;

  mutable std::mutex lock_;
  const int64_t capacity_, granularity_;
  const Stalls stalls_;
  int64_t grown_ = 0;
  std::map<uintptr_t, uintptr_t> reserved_;  // begin to end
  std::unordered_map<StreamId, std::shared_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Stream>> removed_;  // their threads end when their work is done
  std::unordered_map<EventId, std::shared_ptr<Event>> events_;
  StreamId next_stream_ = 0;
  EventId next_event_ = 1;
};

}  // namespace waterflow
