#include "placer.h"

#include <algorithm>
#include <utility>

namespace waterflow {

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
    return ground_is_free_slowly(index);  // it was never made: who had the ground before it?
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
