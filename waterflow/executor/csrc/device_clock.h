// Virtual time of a device whose lanes share its rates: a stated model of cost, never a measurement.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <queue>
#include <span>
#include <tuple>
#include <vector>

namespace waterflow {

// What keeps a lane busy: so long where nothing else runs, and the shares of the device's memory bandwidth and of its
// arithmetic that it uses meanwhile, in millionths.
struct Work {
  static constexpr int64_t kWhole = 1'000'000;
  int64_t nanoseconds = 0;
  int64_t memory = 0, compute = 0;
};

using ItemId = int64_t;  // counted from 0 in the order in which items were added

// Lanes are queues. An item starts once the one before it in its lane has ended, and all that it comes after. What runs
// at the same time runs at one speed, 1 / max(1, sum of memory shares, sum of compute shares): processor sharing, where
// one clock of progress serves all that runs (the virtual time of fair queueing, Demers, Keshav and Shenker 1989).
//
// All in integers, and exact: times are whole nanoseconds rounded down, what is cut off is carried on. Equal calls give
// equal times; what ends at the same time ends by lane number. Not thread-safe.
class DeviceClock {
 public:
  static constexpr int64_t kLongest = int64_t{1} << 42;  // nanoseconds of one item, more than an hour
  struct Done {
    ItemId item;
    int32_t lane;
    int64_t at;
  };

  explicit DeviceClock(int32_t lanes);

  // Starts now if it may. Throws std::invalid_argument for a lane or an item that is not there, and for work out of
  // bounds: time of 0 to kLongest, shares of 0 to Work::kWhole.
  ItemId add(int32_t lane, const Work& work, std::span<const ItemId> after = {});
  // Goes on to the next end, and starts what may then start, in no time; none where nothing runs. An item of no time
  // ends at the time at which it starts, by a call of its own.
  std::optional<Done> next();

  int64_t now() const { return now_; }
  // Nanoseconds of virtual time; -1 for what has not come yet. Throws std::out_of_range for an item that is not there.
  int64_t start_of(ItemId item) const { return items_.at(item).start; }
  int64_t end_of(ItemId item) const { return items_.at(item).end; }
  // Walks everything; throws std::logic_error at what cannot be.
  void check() const;

 private:
  struct Item {
    int32_t lane;
    Work work;
    int64_t start = -1, end = -1;
    int64_t missing = 0;     // items that it comes after and that have not ended
    int64_t followers = -1;  // the first of its edges
    bool ended() const { return end >= 0; }
  };
  struct Edge {
    ItemId follower;
    int64_t next;
  };
  struct Lane {
    std::deque<ItemId> queue;  // its front runs, or waits for others
    bool running = false;
  };
  struct Running {
    int64_t until;  // progress at which it ends
    int32_t lane;
    bool operator>(const Running& other) const { return std::tie(until, lane) > std::tie(other.until, other.lane); }
  };

  void start_front(int32_t lane);
  void advance(int64_t progress);

  std::vector<Item> items_;
  std::vector<Edge> edges_;
  std::vector<Lane> lanes_;
  std::priority_queue<Running, std::vector<Running>, std::greater<>> running_;
  int64_t memory_ = 0, compute_ = 0;  // shares of all that runs
  int64_t progress_ = 0;              // nanoseconds that an item would have done that ran from the beginning
  int64_t now_ = 0, millionths_ = 0;  // and the fraction of a nanosecond behind now_
};

}  // namespace waterflow
