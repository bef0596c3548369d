// The requests of one step, as a profile saw them, each with its place: what a lane replays.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Immutable once built; shared by all jobs whose steps make the same requests.
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

  // Those that had the ground of `index` last before it.
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

}  // namespace waterflow
