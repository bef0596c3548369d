#include "device_clock.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace waterflow {

DeviceClock::DeviceClock(int32_t lanes) {
  if (lanes <= 0) throw std::invalid_argument("a device has at least one lane; got " + std::to_string(lanes));
  lanes_.resize(lanes);
}

ItemId DeviceClock::add(int32_t lane, const Work& work, std::span<const ItemId> after) {
  const ItemId id = std::ssize(items_);
  const auto out_of = [](int64_t value, int64_t most) { return value < 0 || value > most; };
  if (lane < 0 || lane >= std::ssize(lanes_)) {
    throw std::invalid_argument("the device has " + std::to_string(lanes_.size()) + " lanes; got " +
                                std::to_string(lane));
  }
  if (out_of(work.nanoseconds, kLongest) || out_of(work.memory, Work::kWhole) || out_of(work.compute, Work::kWhole)) {
    throw std::invalid_argument("work takes 0 to " + std::to_string(kLongest) + " ns and shares of 0 to " +
                                std::to_string(Work::kWhole) + " millionths; got " + std::to_string(work.nanoseconds) +
                                " ns, " + std::to_string(work.memory) + " and " + std::to_string(work.compute));
  }
  for (const ItemId before : after) {
    if (out_of(before, id - 1)) {
      throw std::invalid_argument("an item comes after items that were added before it; item " + std::to_string(id) +
                                  " cannot come after " + std::to_string(before));
    }
  }
  Item item{lane, work};
  for (const ItemId before : after) {
    if (items_[before].ended()) continue;
    ++item.missing;
    edges_.push_back({id, items_[before].followers});
    items_[before].followers = std::ssize(edges_) - 1;
  }
  items_.push_back(item);
  lanes_[lane].queue.push_back(id);
  start_front(lane);
  return id;
}

std::optional<DeviceClock::Done> DeviceClock::next() {
  if (running_.empty()) return std::nullopt;
  const auto [until, number] = running_.top();
  running_.pop();
  advance(until - progress_);
  Lane& lane = lanes_[number];
  const ItemId id = lane.queue.front();
  Item& item = items_[id];
  item.end = now_;
  memory_ -= item.work.memory;
  compute_ -= item.work.compute;
  lane.queue.pop_front();
  lane.running = false;
  start_front(number);
  for (int64_t edge = item.followers; edge >= 0; edge = edges_[edge].next) {
    Item& follower = items_[edges_[edge].follower];
    --follower.missing;
    start_front(follower.lane);
  }
  return Done{id, number, now_};
}

void DeviceClock::start_front(int32_t number) {
  Lane& lane = lanes_[number];
  if (lane.running || lane.queue.empty()) return;
  Item& item = items_[lane.queue.front()];
  if (item.missing > 0) return;
  lane.running = true;
  item.start = now_;
  memory_ += item.work.memory;
  compute_ += item.work.compute;
  running_.push({progress_ + item.work.nanoseconds, number});
}

// Starts and ends lie where something ends or is added, that is, at whole nanoseconds of progress.
void DeviceClock::advance(int64_t progress) {
  const int64_t slowed = std::max({Work::kWhole, memory_, compute_});
  const int64_t fraction = progress * (slowed % Work::kWhole) + millionths_;
  progress_ += progress;
  now_ += progress * (slowed / Work::kWhole) + fraction / Work::kWhole;
  millionths_ = fraction % Work::kWhole;
}

void DeviceClock::check() const {
  int64_t memory = 0, compute = 0, running = 0;
  for (const Lane& lane : lanes_) {
    if (lane.running && lane.queue.empty()) throw std::logic_error("a lane runs nothing");
    if (!lane.queue.empty() && !lane.running && items_[lane.queue.front()].missing == 0) {
      throw std::logic_error("item " + std::to_string(lane.queue.front()) + " may start and does not run");
    }
    for (const ItemId id : lane.queue) {
      const Item& item = items_[id];
      const bool runs = lane.running && id == lane.queue.front();
      if (item.ended() || (item.start >= 0) != runs || (runs && item.missing > 0)) {
        throw std::logic_error("item " + std::to_string(id) + " is in the wrong state");
      }
      memory += runs ? item.work.memory : 0;
      compute += runs ? item.work.compute : 0;
      running += runs;
    }
  }
  if (memory != memory_ || compute != compute_ || running != std::ssize(running_)) {
    throw std::logic_error("what runs does not add up");
  }
}

}  // namespace waterflow
