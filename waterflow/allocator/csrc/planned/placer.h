// Planned memory of a step: its requests, each with its place (RequestPlan), and the Placer that serves them there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace waterflow {

constexpr int64_t kUnplanned = -1;

// One request for memory. Ticks count the requests of a step, and the ends of its instructions.
struct PlannedRequest {
  int64_t bytes;   // as it is asked for
  int64_t offset;  // bytes from the lane's end to its nearer side; kUnplanned for what outlives the step
  int32_t birth;   // its tick
  int32_t death;   // the last tick before it is given back
};

// From a distance to the end's origin to a number below `slots`: where blocks begin in memory.
class StartTable {
 public:
  explicit StartTable(const std::vector<int64_t>& distances, int64_t alignment);
  int32_t slots() const { return static_cast<int32_t>(keys_.size()); }
  // -1 where nothing begins.
  int32_t find(int64_t distance) const {
    for (size_t at = hash(distance);; at = (at + 1) & mask_) {
      if (keys_[at] == distance) return static_cast<int32_t>(at);
      if (keys_[at] < 0) return -1;
    }
  }

 private:
  size_t hash(int64_t distance) const {
    return static_cast<size_t>((static_cast<uint64_t>(distance / alignment_) * 0x9E3779B97F4A7C15ull) >> shift_);
  }
  std::vector<int64_t> keys_;
  int64_t alignment_;
  size_t mask_;
  int shift_;
};

// The requests of one step, as a profile saw them, each with its place: what a lane replays. Immutable once built;
// shared by all jobs whose steps make the same requests.
class RequestPlan {
 public:
  // `requests` in the order in which they are made; `first[i]` is the first one of instruction i, and one more entry
  // ends the last. Throws std::invalid_argument where two that live at once share a byte.
  // `ends[i]` is the tick of the end of instruction i.
  RequestPlan(std::vector<PlannedRequest> requests, std::vector<int32_t> first, std::vector<int32_t> ends,
              int64_t alignment);

  int32_t size() const { return static_cast<int32_t>(requests_.size()); }
  int32_t instructions() const { return static_cast<int32_t>(first_.size()) - 1; }
  const PlannedRequest& request(int32_t index) const { return requests_[index]; }
  int32_t first(int32_t instruction) const { return first_[instruction]; }
  // What a request takes of its lane's end: its bytes, rounded up to the alignment.
  int64_t rounded(int64_t bytes) const { return (bytes + alignment_ - 1) / alignment_ * alignment_; }
  int32_t end(int32_t instruction) const { return ends_[instruction]; }
  // Planned requests in the order in which they are given back.
  const std::vector<int32_t>& by_death() const { return by_death_; }
  int64_t height() const { return height_; }
  int32_t planned() const { return planned_; }

  // How far a block begins, in memory, from the origin of an end that grows up (or down); and the slots of that.
  int64_t distance(int32_t index, bool down) const {
    const auto& request = requests_[index];
    return down ? request.offset + rounded(request.bytes) : request.offset;
  }
  const StartTable& starts(bool down) const { return starts_[down]; }
  int32_t start_slot(int32_t index, bool down) const { return start_slots_[down][index]; }

  // The requests that had bytes of the place of `index` last before it.
  const int32_t* before_begin(int32_t index) const { return before_.data() + before_first_[index]; }
  const int32_t* before_end(int32_t index) const { return before_.data() + before_first_[index + 1]; }

 private:
  void find_predecessors();
  void find_starts();

  std::vector<PlannedRequest> requests_;
  std::vector<int32_t> first_;
  std::vector<int32_t> ends_;
  std::vector<int32_t> by_death_;
  std::vector<int32_t> before_;
  std::vector<int32_t> before_first_;
  int64_t alignment_;
  int64_t height_ = 0;
  int32_t planned_ = 0;
  std::vector<StartTable> starts_;
  std::vector<int32_t> start_slots_[2];
};

// Serves the requests of one lane's step at their planned addresses.

// What became of a step's requests.
struct PlacedCounts {
  int64_t planned = 0;  // served at their planned addresses
  int64_t missed = 0;   // asked for otherwise than planned, or before their place was free
  int64_t outside = 0;  // bytes of those that were missed

  void add(const PlacedCounts& other) {
    planned += other.planned;
    missed += other.missed;
    outside += other.outside;
  }
};

// Whose requests it serves: torch's for memory of the host, or for that of a device. A step on a device makes both.
enum class PlacedIn : uint8_t { host, device };

// One range of addresses that begins at an arena's end, and the step whose memory lies there. The thread that runs the
// step asks; releases come from anywhere. A request is served at its place only when all that had bytes of it
// before in this step have given them back: a step that does otherwise than its profile loses speed, and never a byte.
class Placer {
 public:
  // The range [base, base + bytes); its origin is the first byte where it grows up, one behind its last where it grows
  // `down`.
  Placer(char* base, int64_t bytes, bool down, PlacedIn memory = PlacedIn::host)
      : base_(base), bytes_(bytes), down_(down), memory_(memory) {}
  Placer(const Placer&) = delete;
  Placer& operator=(const Placer&) = delete;

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  PlacedIn memory() const { return memory_; }
  bool contains(const void* address) const {
    return static_cast<uint64_t>(static_cast<const char*>(address) - base_) < static_cast<uint64_t>(bytes_);
  }

  void begin(std::shared_ptr<const RequestPlan> plan);
  // Whether something is still held that was planned to be given back before the end of this instruction. To be asked
  // for later instructions each time, by the thread that runs the step.
  bool overdue(int32_t instruction);
  void instruction(int32_t index) {
    next_ = plan_->first(index);
    end_ = plan_->first(index + 1);
  }
  // The memory of a request; null where it is not planned.
  void* request(size_t bytes);
  // Any thread. False where no live request of the step begins at this address.
  bool release(void* address);
  // The step is over. A placer that was left behind may be gone after it.
  void finish() { active_ = false; }
  // Any thread: no request is served from now on, until the next `begin`.
  void close() { closed_ = true; }
  bool active() const { return active_; }
  bool any_live() const;

  // Calls `visit(address, bytes)` for each request that is still held.
  template <typename Visit>
  void each_live(Visit visit) const {
    for (int32_t i = 0; i < plan_->size(); ++i) {
      if (states_[i].load(std::memory_order_acquire) == kLive) visit(address_of(i), plan_->request(i).bytes);
    }
  }
  const PlacedCounts& counts() const { return counts_; }

 private:
  enum : uint8_t { kNever, kLive, kReleased };

  char* address_of(int32_t index) const {
    const int64_t distance = plan_->distance(index, down_);
    return down_ ? base_ + bytes_ - distance : base_ + distance;
  }
  bool ground_is_free(int32_t index) const;
  bool ground_is_free_slowly(int32_t index) const;

  char* const base_;
  const int64_t bytes_;
  const bool down_;
  const PlacedIn memory_;
  std::shared_ptr<const RequestPlan> plan_;
  std::atomic<bool> active_{false};  // between `begin` and `finish`
  std::atomic<bool> closed_{false};
  int32_t next_ = 0;
  int32_t end_ = 0;
  size_t looked_ = 0;                               // how many of the plan's requests by death have been looked at
  std::unique_ptr<std::atomic<uint8_t>[]> states_;  // of each request
  int32_t states_size_ = 0;
  std::vector<int32_t> begins_;  // by slot of the plan's starts: the request that last began there
  PlacedCounts counts_;
};

}  // namespace waterflow
