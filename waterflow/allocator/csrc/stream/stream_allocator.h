// Memory for many streams: what is not planned. Requests are served when the host makes them, long before the device
// comes to them, so a piece goes to another stream only behind the last uses that it had.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "waterflow/allocator/csrc/stream/chunk.h"
#include "waterflow/allocator/csrc/errors.h"
#include "waterflow/allocator/csrc/device.h"
#include "waterflow/allocator/csrc/stream/free_sets.h"
#include "waterflow/allocator/csrc/stream/spin_lock.h"
#include "waterflow/allocator/csrc/stream/stream_clocks.h"

namespace waterflow {

constexpr int64_t NO_LIMIT = std::numeric_limits<int64_t>::max();

// Where a request found its memory, in the order of the search.
enum class Tier : int32_t { own, synchronized, others, grow, coalesce, fail };
constexpr int32_t TIERS = 6;
const char* tier_name(Tier tier);

struct AllocatorOptions {
  int64_t alignment = 64;                      // bytes: 64 on a CPU, 512 on CUDA
  int64_t limit = NO_LIMIT;                    // bytes taken from the device
  int64_t small_segment = int64_t{2} << 20;    // taken at once for a request of up to half of it
  int64_t medium_segment = int64_t{20} << 20;  // the same; larger requests get a segment each
  int32_t looks = 8;                           // chunks of one bin that are compared
  Fault fault = Fault::none;
  bool merge_at_once = false;  // what is released is never put aside for the next request of its size
};

struct AllocatorReport {
  int64_t held = 0, peak = 0;  // bytes handed out, alignment included
  int64_t grown = 0;           // bytes taken from the device
  int64_t synchronized = 0, apart = 0;
  std::vector<std::pair<StreamId, int64_t>> unsynchronized;  // free bytes by stream
  int64_t largest_free = 0;
  int64_t waits = 0, events = 0;
  int64_t segments = 0, requests = 0;
  std::array<int64_t, TIERS> tiers{};
  int64_t free() const { return grown - held; }
  // 0: all that is free is one piece; near 1: it is dust.
  double fragmentation() const { return free() > 0 ? 1.0 - static_cast<double>(largest_free) / free() : 0.0; }
};

// Thread-safe. Every call names streams and addresses; what is wrong is refused with UsageError and changes nothing.
class StreamAllocator {
 public:
  explicit StreamAllocator(std::shared_ptr<Device> device, AllocatorOptions options = {});
  // Waits for the device, and gives everything back, what is still held included.
  ~StreamAllocator();
  StreamAllocator(const StreamAllocator&) = delete;

  // The device's streams belong to the caller. A removed stream's work may still run: its memory stays in order.
  void add_stream(StreamId stream);
  void remove_stream(StreamId stream);

  // Memory for work issued on `stream` from now on; throws OutOfMemory with a map where there is none.
  uintptr_t allocate(int64_t bytes, StreamId stream);
  // Behind all that its streams were issued until now.
  void release(uintptr_t address);
  // `stream` uses it, too: until it is released, or until `end_use`, which knows of no later work.
  void use(uintptr_t address, StreamId stream);
  void end_use(uintptr_t address, StreamId stream);

  // An event behind what was issued on `stream`; group ends make one.
  Mark mark(StreamId stream);
  // `stream` waits for it on the device; `waited` where the caller has issued that wait.
  void wait(StreamId stream, Mark mark);
  void waited(StreamId stream, Mark mark);

  // Requests of this stream are a lane's from now on, or are no more: what one left behind is then counted as others'.
  // Calls may be nested.
  void set_lane(StreamId stream, bool lane);

  // Gives segments that are free and complete back to the device; returns bytes.
  int64_t trim();
  int64_t give_back();  // all segments that are free: waits until they are complete; returns bytes
  void set_limit(int64_t bytes);

  AllocatorReport report() const;
  int64_t held() const;
  int64_t idle() const;  // taken from the device and not handed out
  // By others than lanes, with what is asked for at the moment. Takes no lock.
  int64_t held_by_others() const { return held_ - held_by_lanes_ + asked_; }
  int64_t limit() const;
  // A line per segment: # held, . free for all, a digit free for that stream, ? free and apart.
  std::string map(int32_t width = 64) const;
  // Walks everything; throws std::logic_error at what cannot be.
  void check() const;

 private:
  using Lock = std::unique_lock<SpinLock>;
  struct Request {
    int64_t bytes, size;  // asked for; rounded up
    Slot stream;
  };

  // The tiers, in order; each returns a chunk of the request's size that is in no set, or null.
  Chunk* from_own(const Request& request);
  Chunk* from_synchronized(const Request& request);
  Chunk* from_others(const Request& request);
  Chunk* grow(const Request& request);
  Chunk* sync_and_coalesce(const Request& request, Lock& lock);
  [[noreturn]] void fail(const Request& request);

  void must_still_be(const Request& request, StreamId stream) const;
  Chunk* search(const Request& request, Lock& lock);
  Chunk* counted(Tier tier, Chunk* chunk);
  Chunk* cut(Chunk* chunk, const Request& request, SetId rest);
  Chunk* new_segment(int64_t bytes);
  void wait_for_uses(const Request& request, const Uses& uses);
  Chunk* coalesce(const Request& request);
  bool reclaim(int64_t least, Lock& lock);
  uintptr_t hand_out(Chunk* chunk, const Request& request, bool put_aside);
  void find_owner(Chunk* chunk);

  Chunk* live_chunk(uintptr_t address) const;
  int64_t rounded(int64_t bytes) const;
  bool whole_free(const Segment& segment, bool complete) const;
  void drop_segment(size_t index);
  int64_t trim_locked();
  int64_t trimmable() const;
  void check_segment(const Segment& segment) const;
  std::string map_locked(int32_t width) const;

  mutable SpinLock lock_;
  const std::shared_ptr<Device> device_;
  const AllocatorOptions options_;
  const int64_t granularity_;
  StreamClocks clocks_;
  ChunkPool pool_;
  AddressTable live_;      // also of what is put aside
  mutable FreeSets sets_;  // questions may merge what releases have put off: that changes no answer but sizes of pieces
  std::vector<std::unique_ptr<Segment>> segments_;
  int64_t limit_;
  std::atomic<int64_t> held_{0}, held_by_lanes_{0}, asked_{0};  // written under the lock alone
  std::vector<int32_t> lanes_;                                  // by slot: how many say that it is one
  int64_t peak_ = 0, grown_ = 0, requests_ = 0;
  std::array<int64_t, TIERS> tiers_{};
};

}  // namespace waterflow
