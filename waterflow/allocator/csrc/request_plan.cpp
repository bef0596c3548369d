#include "request_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {

StartTable::StartTable(const std::vector<int64_t>& distances, int64_t alignment) : alignment_(alignment) {
  const auto size = std::bit_ceil(std::max<size_t>(8, 2 * distances.size()));
  keys_.assign(size, -1);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (int64_t distance : distances) {
    size_t at = hash(distance);
    while (keys_[at] >= 0 && keys_[at] != distance) at = (at + 1) & mask_;
    keys_[at] = distance;
  }
}

RequestPlan::RequestPlan(std::vector<PlannedRequest> requests, std::vector<int32_t> first, std::vector<int32_t> ends,
                         int64_t alignment)
    : requests_(std::move(requests)), first_(std::move(first)), ends_(std::move(ends)), alignment_(alignment) {
  if (alignment_ < 1) throw std::invalid_argument("an alignment of " + std::to_string(alignment_) + " bytes");
  if (first_.empty() || first_.front() != 0 || first_.back() != size() ||
      !std::is_sorted(first_.begin(), first_.end())) {
    throw std::invalid_argument("the instructions of a request plan must share out its " + std::to_string(size()) +
                                " requests in order");
  }
  for (int32_t i = 0; i < size(); ++i) {
    const auto& request = requests_[i];
    if (request.bytes <= 0 || request.death < request.birth || (i > 0 && request.birth <= requests_[i - 1].birth) ||
        request.offset < kUnplanned || (request.offset >= 0 && request.offset % alignment_ != 0)) {
      throw std::invalid_argument("request " + std::to_string(i) + " of " + std::to_string(request.bytes) +
                                  " bytes at offset " + std::to_string(request.offset) + ", ticks " +
                                  std::to_string(request.birth) + " to " + std::to_string(request.death) +
                                  ", is no request that comes after the others");
    }
  }
  if (static_cast<int32_t>(ends_.size()) != instructions() || !std::is_sorted(ends_.begin(), ends_.end())) {
    throw std::invalid_argument("a request plan of " + std::to_string(instructions()) +
                                " instructions needs the tick of the end of each, in order");
  }
  find_predecessors();
  find_starts();
  for (int32_t i = 0; i < size(); ++i) {
    if (requests_[i].offset != kUnplanned) by_death_.push_back(i);
  }
  std::stable_sort(by_death_.begin(), by_death_.end(),
                   [&](int32_t a, int32_t b) { return requests_[a].death < requests_[b].death; });
}

void RequestPlan::find_starts() {
  for (const bool down : {false, true}) {
    std::vector<int64_t> distances;
    for (int32_t i = 0; i < size(); ++i) {
      if (requests_[i].offset != kUnplanned) distances.push_back(distance(i, down));
    }
    std::sort(distances.begin(), distances.end());
    distances.erase(std::unique(distances.begin(), distances.end()), distances.end());
    starts_.emplace_back(distances, alignment_);
    auto& slots = start_slots_[down];
    slots.assign(requests_.size(), -1);
    for (int32_t i = 0; i < size(); ++i) {
      if (requests_[i].offset != kUnplanned) slots[i] = starts_[down].find(distance(i, down));
    }
  }
}

// Walks through the step with a map of the ground: who had which stretch last.
void RequestPlan::find_predecessors() {
  struct Stretch {
    int64_t end;
    int32_t owner;
  };
  std::map<int64_t, Stretch> ground;  // by where a stretch begins
  before_first_.assign(requests_.size() + 1, 0);
  for (int32_t i = 0; i < size(); ++i) {
    before_first_[i] = static_cast<int32_t>(before_.size());
    const auto& request = requests_[i];
    if (request.offset == kUnplanned) continue;
    ++planned_;
    const int64_t begin = request.offset, end = begin + rounded(request.bytes);
    height_ = std::max(height_, end);
    auto at = ground.upper_bound(begin);
    if (at != ground.begin() && std::prev(at)->second.end > begin) --at;
    while (at != ground.end() && at->first < end) {
      const Stretch old = at->second;
      const int64_t old_begin = at->first;
      const auto& other = requests_[old.owner];
      if (other.death >= request.birth) {
        throw std::invalid_argument("requests " + std::to_string(old.owner) + " and " + std::to_string(i) +
                                    " of a plan live at once and share bytes " +
                                    std::to_string(std::max(begin, old_begin)) + " to " +
                                    std::to_string(std::min(end, old.end)));
      }
      before_.push_back(old.owner);
      at = ground.erase(at);
      if (old_begin < begin) ground[old_begin] = {begin, old.owner};
      if (old.end > end) ground[end] = {old.end, old.owner};
    }
    auto mine = before_.begin() + before_first_[i];
    std::sort(mine, before_.end());
    before_.erase(std::unique(mine, before_.end()), before_.end());
    ground[begin] = {end, i};
  }
  before_first_[requests_.size()] = static_cast<int32_t>(before_.size());
}

}  // namespace waterflow
