// A GPU as a device: addresses reserved once, physical memory behind them on demand, the driver's streams and events.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "waterflow/allocator/csrc/cuda/cuda_driver.h"
#include "waterflow/allocator/csrc/device.h"

namespace waterflow {

// Thread-safe. It holds the device's primary context, the one that torch uses, and makes it current where a thread has
// none. Work is issued by whoever calls `enqueue`, at once; the device does it later.
class CudaDevice : public LaneDevice {
 public:
  // `capacity`: bytes of device memory that it takes at most; 0: as many as the device has.
  explicit CudaDevice(const CudaDriver& driver, int index = 0, int64_t capacity = 0);
  // Waits for its streams, and gives everything back.
  ~CudaDevice() override;

  int64_t granularity() const override { return granularity_; }
  uintptr_t reserve(int64_t bytes) override;
  void unreserve(uintptr_t base, int64_t bytes) override;
  bool grow(uintptr_t at, int64_t bytes) override;
  // By the pieces in which it was grown: granules up to PIECE, and pieces of that size beyond.
  void shrink(uintptr_t at, int64_t bytes) override;

  StreamId add_stream() override;
  // One that somebody else made and keeps, as torch does. The same stream has the same number for as long as it lives.
  StreamId adopt_stream(cu::Stream stream);
  void remove_stream(StreamId stream) override;
  // Streams of the device's own, nobody else's for as long as what is returned is held. They are never destroyed, and
  // lent again: libraries keep what they have made for a stream.
  using Lent = std::shared_ptr<const std::vector<cu::Stream>>;
  static Lent lend_streams(const std::shared_ptr<CudaDevice>& device, size_t count);
  EventId record(StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool complete(EventId event) override;
  void synchronize(EventId event) override;
  void forget(EventId event) override;
  void enqueue(StreamId, std::function<void()> work) override { work(); }
  // Waits for all that is issued on the streams that it knows; but not on one that is captured.
  void finish();
  void synchronize_all();  // with those that it does not know; fails beside a capture in any thread, and spoils it

  // -- graphs. What the calling thread issues on a stream between `begin_capture` and `end_capture` is not run but
  // kept; nobody may record or wait on that stream meanwhile. A call that a capture cannot stand fails on the calling
  // thread alone, and the capture with it; what fails on others, too, is for Capturing to keep away.
  void begin_capture(StreamId stream);
  cu::Executable end_capture(StreamId stream);
  bool abandon_capture(StreamId stream) noexcept;  // whether it was spoiled
  void launch(cu::Executable graph, StreamId stream);
  void destroy(cu::Executable graph) noexcept;
  // A call of the host in a stream's order.
  void launch_host(StreamId stream, cu::HostFunction function, void* data);

  // -- physical memory without an address, for arenas. It counts as grown.
  bool make_page(int64_t bytes, cu::Handle* page);  // false where there is none left
  void drop_page(cu::Handle page, int64_t bytes);
  void map_page(uintptr_t at, int64_t bytes, cu::Handle page);
  // The device may use these addresses, all of which have pages.
  void allow(uintptr_t at, int64_t bytes);
  void unmap(uintptr_t at, int64_t bytes);

  // -- memory for which nobody has a plan or a pool; 0 where there is none. Giving it back waits for the device: during
  // a capture it is left for the next time.
  uintptr_t allocate_plain(int64_t bytes);
  bool free_plain(uintptr_t at);  // false where it is not ours

  int index() const { return index_; }
  int64_t capacity() const { return capacity_; }
  int64_t grown() const;
  // All that it has grown, with plain memory, grows no further than `most(plain bytes)`, which must not ask the device.
  // Set before anything grows.
  void bound(std::function<int64_t(int64_t plain)> most) { most_ = std::move(most); }
  int64_t room() const;              // bytes that it may grow by; below 0 where the bound has come down
  int64_t peak(bool reset = false);  // the most bytes at once, plain ones included, since the last reset
  int64_t plain() const;
  int64_t free_memory() const;  // of the whole device, as the driver says
  const CudaDriver& driver() const { return driver_; }

  static constexpr int64_t PIECE = int64_t{32} << 20;

 private:
  struct Stream {
    cu::Stream handle = nullptr;
    bool own = false;
    unsigned long long identity = 0;
  };
  struct Current;

  cu::Stream handle_of(StreamId stream) const;
  cu::Event handle_of_event(EventId event) const;
  cu::Stream make_stream() const;
  EventId record_locked(StreamId stream);
  void free_what_may();
  cu::AllocationProp prop() const;
  bool create(int64_t bytes, cu::Handle* page);
  int64_t room_locked() const;
  void count(int64_t& kind, int64_t bytes);
  void undo(uintptr_t from, uintptr_t to);
  void aligned(uintptr_t at, int64_t bytes) const;
  void within_reserved(uintptr_t at, int64_t bytes) const;

  const CudaDriver& driver_;
  const int index_;
  cu::Ordinal ordinal_ = 0;
  cu::Context context_ = nullptr;
  int64_t capacity_, granularity_ = 0;
  mutable std::mutex lock_;
  int64_t grown_ = 0, plain_total_ = 0, peak_ = 0;
  std::function<int64_t(int64_t)> most_;
  std::map<uintptr_t, uintptr_t> reserved_;                     // begin to end
  std::map<uintptr_t, std::pair<int64_t, cu::Handle>> pieces_;  // what `grow` put behind addresses: bytes, handle
  std::unordered_map<uintptr_t, int64_t> plain_;
  std::vector<uintptr_t> to_free_;  // of these
  std::unordered_map<StreamId, Stream> streams_;
  std::unordered_map<unsigned long long, StreamId> adopted_;  // by what identifies a stream
  std::unordered_map<EventId, cu::Event> events_;
  std::vector<cu::Event> spare_;  // a wait that was issued for an event stands when the event is recorded anew
  std::vector<cu::Stream> to_lend_;
  StreamId next_stream_ = 0;
  EventId next_event_ = 1;
};

// While it lives, the calling thread has the device's context, and a capture forbids none of its calls for safety's
// sake: ours touch no captured work.
struct CudaDevice::Current {
  explicit Current(const CudaDevice& device) : driver(device.driver_) {
    driver.get_context(&before);
    changed = before != device.context_;
    const auto result = changed ? driver.set_context(device.context_) : cu::SUCCESS;
    if (result) driver.fail(result, "cuCtxSetCurrent()");
    driver.exchange_capture_mode(&mode);
  }
  ~Current() {
    if (changed && before != nullptr) driver.set_context(before);
    driver.exchange_capture_mode(&mode);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  const CudaDriver& driver;
  cu::Context before = nullptr;
  int mode = cu::CAPTURE_RELAXED;
  bool changed = false;
};

}  // namespace waterflow
