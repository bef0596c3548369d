#include "waterflow/executor/csrc/engine/cross_lane_fences.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace waterflow {

size_t CrossLaneFences::side(int end) {
  if (end != 0 && end != 1) throw std::invalid_argument("an arena has the ends 0 and 1, not " + std::to_string(end));
  return static_cast<size_t>(end);
}

std::optional<EventId> CrossLaneFences::before(int end, int64_t peak, int64_t size) {
  if (peak < 0 || peak > size) {
    throw std::invalid_argument("a group cannot reach " + std::to_string(peak) + " bytes into an arena of " +
                                std::to_string(size));
  }
  auto& facing = groups_[1 - side(end)];
  // Peaks fall, so those that cross come first; the last of them is the latest.
  const int64_t clear = size - peak;
  auto first_clear =
      std::partition_point(facing.begin(), facing.end(), [clear](const Issued& group) { return group.peak > clear; });
  if (first_clear == facing.begin()) return std::nullopt;
  const EventId event = std::prev(first_clear)->event;
  facing.erase(facing.begin(), first_clear);
  if (WATERFLOW_PLANTED(fault_ == OrderFault::dropped_waits) && (forget_ = !forget_)) return std::nullopt;
  return event;
}

void CrossLaneFences::after(int end, int64_t peak, EventId event, int64_t held_after) {
  auto& own = groups_[side(end)];
  if (WATERFLOW_PLANTED(fault_ == OrderFault::heights_at_events)) peak = held_after;
  if (peak < 0) throw std::invalid_argument("a peak cannot be negative: " + std::to_string(peak));
  while (!own.empty() && own.back().peak <= peak) own.pop_back();
  if (peak == 0) return;
  own.push_back({peak, event});
  if (own.size() > kMost) {
    own[1].peak = own[0].peak;
    own.pop_front();
  }
}

void CrossLaneFences::reached(int end, EventId event) {
  auto& own = groups_[side(end)];
  while (!own.empty() && own.front().event <= event) own.pop_front();
}

void CrossLaneFences::check() const {
  for (const auto& groups : groups_) {
    if (groups.size() > kMost) throw std::logic_error("more events are kept than may be");
    for (size_t i = 1; i < groups.size(); ++i) {
      if (groups[i].peak >= groups[i - 1].peak) {
        throw std::logic_error("peaks " + std::to_string(groups[i - 1].peak) + " and " +
                               std::to_string(groups[i].peak) + " do not fall");
      }
    }
  }
}

}  // namespace waterflow
