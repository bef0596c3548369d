#include "waterflow/allocator/csrc/cpu/cpu_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef WATERFLOW_TEST_HOOKS
namespace waterflow {
namespace {

using Guard = std::lock_guard<std::mutex>;
using Lock = std::unique_lock<std::mutex>;

constexpr size_t MOST_WAITING = 4096;
constexpr int64_t HUGE_PAGE = int64_t{2} << 20;

void sleep_us(int64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

}  // namespace

CpuDevice::CpuDevice(int64_t capacity, Stalls stalls) : capacity_(capacity), granularity_(HUGE_PAGE), stalls_(stalls) {
  if (capacity < 0 || stalls.share < 0 || stalls.share > 1 || stalls.longest_us < 0) {
    throw std::invalid_argument("a device needs a capacity of at least 0, and a share of stalls between 0 and 1");
  }
}

CpuDevice::~CpuDevice() {
  std::vector<std::shared_ptr<Stream>> all = removed_;
  for (auto& [id, stream] : streams_) all.push_back(stream);
  for (auto& stream : all) {
    {
      Guard guard(stream->lock);
      stream->closing = true;
    }
    stream->changed.notify_all();
  }
  for (auto& stream : all) stream->thread.join();
  for (const auto& [begin, end] : reserved_) ::munmap(reinterpret_cast<void*>(begin), end - begin);
}

// -- memory

void CpuDevice::within_reserved(uintptr_t at, int64_t bytes) const {
  const auto unit = static_cast<uintptr_t>(granularity_);
  auto found = reserved_.upper_bound(at);
  const bool aligned = bytes > 0 && at % unit == 0 && static_cast<uintptr_t>(bytes) % unit == 0;
  if (aligned && found != reserved_.begin() && at + static_cast<uintptr_t>(bytes) <= (--found)->second) return;
  throw std::invalid_argument(std::to_string(bytes) + " bytes at " + std::to_string(at) +
                              " do not lie within a reserved range, by whole multiples of " +
                              std::to_string(granularity_));
}

uintptr_t CpuDevice::reserve(int64_t bytes) {
  if (bytes <= 0 || bytes % granularity_ != 0) {
    throw std::invalid_argument("a range is a whole multiple of " + std::to_string(granularity_) + " bytes; " +
                                std::to_string(bytes) + " were asked for");
  }
  // mmap aligns to small pages: reserve more, and give back what lies around the aligned part.
  const size_t more = static_cast<size_t>(bytes + granularity_);
  void* mapped = ::mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const auto unit = static_cast<uintptr_t>(granularity_);
  const uintptr_t base = (begin + unit - 1) / unit * unit;
  const uintptr_t end = base + static_cast<uintptr_t>(bytes);
  if (base > begin) ::munmap(mapped, base - begin);
  if (begin + more > end) ::munmap(reinterpret_cast<void*>(end), begin + more - end);
  Guard guard(lock_);
  reserved_.emplace(base, end);
  return base;
}

void CpuDevice::unreserve(uintptr_t base, int64_t bytes) {
  Guard guard(lock_);
  auto found = reserved_.find(base);
  if (found == reserved_.end() || found->second != base + static_cast<uintptr_t>(bytes)) {
    throw std::invalid_argument(std::to_string(bytes) + " bytes at " + std::to_string(base) + " are no reserved range");
  }
  reserved_.erase(found);
  ::munmap(reinterpret_cast<void*>(base), static_cast<size_t>(bytes));
}

bool CpuDevice::grow(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  if (bytes > capacity_ - grown_) return false;
  if (::mprotect(reinterpret_cast<void*>(at), static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) return false;
  grown_ += bytes;
  return true;
}

void CpuDevice::shrink(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  ::madvise(reinterpret_cast<void*>(at), static_cast<size_t>(bytes), MADV_DONTNEED);
  ::mprotect(reinterpret_cast<void*>(at), static_cast<size_t>(bytes), PROT_NONE);
  grown_ -= bytes;
}

int64_t CpuDevice::grown() const {
  Guard guard(lock_);
  return grown_;
}

// -- order

std::shared_ptr<CpuDevice::Stream> CpuDevice::live(StreamId stream) const {
  Guard guard(lock_);
  auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second;
  throw std::invalid_argument("stream " + std::to_string(stream) +
                              (stream >= 0 && stream < next_stream_ ? " was removed" : " does not exist"));
}

std::shared_ptr<CpuDevice::Event> CpuDevice::known(EventId event) const {
  Guard guard(lock_);
  auto found = events_.find(event);
  if (found != events_.end()) return found->second;
  throw std::invalid_argument("there is no event " + std::to_string(event) + ", or it was forgotten");
}

StreamId CpuDevice::add_stream() {
  auto made = std::make_shared<Stream>();
  Guard guard(lock_);
  for (size_t i = removed_.size(); i-- > 0;) {
    if (!removed_[i]->over) continue;
    removed_[i]->thread.join();
    removed_.erase(removed_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  made->random.seed(stalls_.seed + static_cast<uint64_t>(next_stream_));
  made->thread = std::thread([this, stream = made.get()] { run(*stream); });
  streams_.emplace(next_stream_, std::move(made));
  return next_stream_++;
}

void CpuDevice::remove_stream(StreamId stream) {
  auto removed = live(stream);
  {
    Guard guard(removed->lock);
    removed->closing = true;
  }
  removed->changed.notify_all();
  Guard guard(lock_);
  streams_.erase(stream);
  removed_.push_back(std::move(removed));
}

void CpuDevice::run(Stream& stream) const {
  std::uniform_real_distribution<double> chance;
  std::uniform_int_distribution<int64_t> length(0, stalls_.longest_us);
  std::deque<std::function<void()>> taken;
  for (;;) {
    {
      Lock lock(stream.lock);
      stream.changed.wait(lock, [&] { return stream.closing || !stream.work.empty(); });
      if (stream.work.empty()) break;
      taken.swap(stream.work);
    }
    stream.changed.notify_all();
    for (auto& work : taken) {
      if (stalls_.share > 0 && chance(stream.random) < stalls_.share) sleep_us(length(stream.random));
      work();
    }
    taken.clear();
  }
  stream.over = true;
}

void CpuDevice::put(Stream& stream, std::function<void()> work) {
  bool was_empty = false;
  {
    Guard guard(stream.lock);
    was_empty = stream.work.empty();
    stream.work.push_back(std::move(work));
  }
  if (was_empty) stream.changed.notify_all();
}

EventId CpuDevice::record(StreamId stream) {
  auto on = live(stream);
  auto event = std::make_shared<Event>();
  EventId id = 0;
  {
    Guard guard(lock_);
    id = next_event_++;
    events_.emplace(id, event);
  }
  put(*on, [event] {
    Guard guard(event->lock);
    event->done = true;
    event->changed.notify_all();
  });
  return id;
}

void CpuDevice::wait(StreamId stream, EventId event) {
  auto on = live(stream);
  put(*on, [awaited = known(event)] {
    Lock lock(awaited->lock);
    awaited->changed.wait(lock, [&] { return awaited->done; });
  });
}

bool CpuDevice::complete(EventId event) {
  auto asked = known(event);
  Guard guard(asked->lock);
  return asked->done;
}

void CpuDevice::synchronize(EventId event) {
  auto asked = known(event);
  Lock lock(asked->lock);
  asked->changed.wait(lock, [&] { return asked->done; });
}

void CpuDevice::forget(EventId event) {
  known(event);
  Guard guard(lock_);
  events_.erase(event);
}

// -- work

void CpuDevice::enqueue(StreamId stream, std::function<void()> work) {
  auto on = live(stream);
  {
    Lock lock(on->lock);
    on->changed.wait(lock, [&] { return on->work.size() < MOST_WAITING; });
  }
  put(*on, std::move(work));
}

void CpuDevice::stall(StreamId stream, int64_t microseconds) {
  enqueue(stream, [microseconds] { sleep_us(microseconds); });
}

void CpuDevice::finish_all() {
  std::vector<StreamId> all;
  {
    Guard guard(lock_);
    for (const auto& [id, stream] : streams_) all.push_back(id);
  }
  for (StreamId stream : all) finish(stream);
}

void CpuDevice::finish(StreamId stream) {
  const EventId event = record(stream);
  synchronize(event);
  forget(event);
}

}  // namespace waterflow
#endif
