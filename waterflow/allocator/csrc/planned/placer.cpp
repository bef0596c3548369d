#include "waterflow/allocator/csrc/planned/placer.h"

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

// Walks through the step with a map of the arena: who had which stretch last.
void RequestPlan::find_predecessors() {
  struct Stretch {
    int64_t end;
    int32_t owner;
  };
  std::map<int64_t, Stretch> shared_arena;  // by where a stretch begins
  before_first_.assign(requests_.size() + 1, 0);
  for (int32_t i = 0; i < size(); ++i) {
    before_first_[i] = static_cast<int32_t>(before_.size());
    const auto& request = requests_[i];
    if (request.offset == kUnplanned) continue;
    ++planned_;
    const int64_t begin = request.offset, end = begin + rounded(request.bytes);
    height_ = std::max(height_, end);
    auto at = shared_arena.upper_bound(begin);
    if (at != shared_arena.begin() && std::prev(at)->second.end > begin) --at;
    while (at != shared_arena.end() && at->first < end) {
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
      at = shared_arena.erase(at);
      if (old_begin < begin) shared_arena[old_begin] = {begin, old.owner};
      if (old.end > end) shared_arena[end] = {old.end, old.owner};
    }
    auto mine = before_.begin() + before_first_[i];
    std::sort(mine, before_.end());
    before_.erase(std::unique(mine, before_.end()), before_.end());
    shared_arena[begin] = {end, i};
  }
  before_first_[requests_.size()] = static_cast<int32_t>(before_.size());
}

void Placer::begin(std::shared_ptr<const RequestPlan> plan) {
  plan_ = std::move(plan);
  if (states_size_ < plan_->size()) {
    states_size_ = std::max(plan_->size(), 2 * states_size_);
    states_ = std::make_unique<std::atomic<uint8_t>[]>(states_size_);
  }
  for (int32_t i = 0; i < plan_->size(); ++i) states_[i].store(kNever, std::memory_order_relaxed);
  begins_.assign(plan_->starts(down_).slots(), -1);
  next_ = end_ = 0;
  looked_ = 0;
  counts_ = {};
  closed_ = false;
  active_ = true;
}

void* Placer::request(size_t bytes) {
  const auto wanted = static_cast<int64_t>(bytes);
  int32_t index = next_;
  while (index < end_ && plan_->request(index).bytes != wanted) ++index;
  if (index < end_) {
    next_ = index + 1;
    if (plan_->request(index).offset == kUnplanned) return nullptr;
  }
  if (index == end_ || closed_.load(std::memory_order_relaxed) ||
      states_[index].load(std::memory_order_relaxed) != kNever || !ground_is_free(index)) {
    ++counts_.missed;
    counts_.outside += wanted;
    return nullptr;
  }
  ++counts_.planned;
  begins_[plan_->start_slot(index, down_)] = index;
  states_[index].store(kLive, std::memory_order_relaxed);
  return address_of(index);
}

bool Placer::overdue(int32_t instruction) {
  const int32_t end = plan_->end(instruction);
  const auto& order = plan_->by_death();
  for (; looked_ < order.size() && plan_->request(order[looked_]).death < end; ++looked_) {
    if (states_[order[looked_]].load(std::memory_order_acquire) == kLive) return true;
  }
  return false;
}

bool Placer::release(void* address) {
  if (!plan_) return false;
  const auto* at = static_cast<const char*>(address);
  const int32_t slot = plan_->starts(down_).find(down_ ? base_ + bytes_ - at : at - base_);
  const int32_t index = slot < 0 ? -1 : begins_[slot];
  if (index < 0 || states_[index].load(std::memory_order_relaxed) != kLive) return false;
  states_[index].store(kReleased, std::memory_order_release);
  return true;
}

bool Placer::ground_is_free(int32_t index) const {
  for (const int32_t *before = plan_->before_begin(index), *end = plan_->before_end(index); before != end; ++before) {
    const uint8_t state = states_[*before].load(std::memory_order_acquire);
    if (state == kReleased) continue;
    if (state == kLive) return false;
    return ground_is_free_slowly(index);  // it was never made: who had the place before it?
  }
  return true;
}

bool Placer::ground_is_free_slowly(int32_t index) const {
  const auto& mine = plan_->request(index);
  const int64_t begin = mine.offset, end = begin + plan_->rounded(mine.bytes);
  for (int32_t i = 0; i < index; ++i) {
    const auto& other = plan_->request(i);
    if (other.offset == kUnplanned || other.offset >= end || other.offset + plan_->rounded(other.bytes) <= begin) {
      continue;
    }
    if (states_[i].load(std::memory_order_acquire) == kLive) return false;
  }
  return true;
}

bool Placer::any_live() const {
  if (!plan_) return false;
  for (int32_t i = 0; i < plan_->size(); ++i) {
    if (states_[i].load(std::memory_order_acquire) == kLive) return true;
  }
  return false;
}

}  // namespace waterflow
