#include "waterflow/partition/csrc/offsets.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {
namespace {

struct Placed {
  int64_t begin, end;
  int32_t birth, death;
};

// A step's height decides what fits together, its area how long the other lane has to wait.
constexpr double kAreaWeight = 0.1;
// Close enough to the floor: looking for less costs more area than it wins height.
constexpr double kCloseEnough = 1.002;
constexpr int32_t kMostPromoted = 128;
constexpr int32_t kMostMoves = 400;
constexpr size_t kHighest = 20;  // of which one is moved

void check(const std::vector<Lifetime>& lives, int32_t operations) {
  for (const auto& life : lives) {
    if (life.size < 0 || life.birth < 0 || life.birth > life.death || life.death >= operations) {
      throw std::invalid_argument("a life of " + std::to_string(life.size) + " bytes from operation " +
                                  std::to_string(life.birth) + " to " + std::to_string(life.death) +
                                  " does not lie within a step of " + std::to_string(operations) + " operations");
    }
  }
}

// The heights of all operations, from the furthest ends down: each operation takes the first end that covers it.
void measure(const std::vector<Lifetime>& lives, int32_t operations, Placement& placement) {
  std::vector<int32_t> by_end(lives.size());
  std::iota(by_end.begin(), by_end.end(), 0);
  const auto end_of = [&](int32_t i) { return placement.offsets[i] + lives[i].size; };
  std::sort(by_end.begin(), by_end.end(), [&](int32_t a, int32_t b) { return end_of(a) > end_of(b); });
  std::vector<int32_t> next(operations + 1);  // the next operation without a height, itself included
  std::iota(next.begin(), next.end(), 0);
  const auto find = [&](int32_t at) {
    int32_t root = at;
    while (next[root] != root) root = next[root];
    while (next[at] != root) at = std::exchange(next[at], root);
    return root;
  };
  placement.heights.assign(operations, 0);
  for (int32_t i : by_end) {
    for (int32_t at = find(lives[i].birth); at <= lives[i].death; at = find(at + 1)) {
      placement.heights[at] = end_of(i);
      next[at] = at + 1;
    }
  }
  placement.height = operations > 0 ? *std::max_element(placement.heights.begin(), placement.heights.end()) : 0;
  placement.area = std::accumulate(placement.heights.begin(), placement.heights.end(), 0.0);
}

}  // namespace

Placement place_in_order(const std::vector<Lifetime>& lives, const std::vector<int32_t>& order, int32_t operations) {
  check(lives, operations);
  Placement placement;
  placement.offsets.assign(lives.size(), 0);
  std::vector<Placed> placed;  // by where they begin
  placed.reserve(lives.size());
  for (int32_t i : order) {
    const Lifetime& life = lives.at(i);
    if (life.size == 0) continue;
    int64_t top = 0, at = -1, tightest = std::numeric_limits<int64_t>::max();
    for (const Placed& other : placed) {
      if (other.birth > life.death || other.death < life.birth) continue;
      const int64_t gap = other.begin - top;
      if (gap >= life.size && gap < tightest) {
        tightest = gap;
        at = top;
      }
      top = std::max(top, other.end);
    }
    if (at >= 0) top = at;
    placement.offsets[i] = top;
    const auto where = std::upper_bound(placed.begin(), placed.end(), top,
                                        [](int64_t begin, const Placed& other) { return begin < other.begin; });
    placed.insert(where, {top, top + life.size, life.birth, life.death});
  }
  measure(lives, operations, placement);
  return placement;
}

std::vector<int32_t> placement_order(const std::vector<Lifetime>& lives, PlacementOrder order) {
  std::vector<int32_t> made(lives.size());
  std::iota(made.begin(), made.end(), 0);
  const auto span = [](const Lifetime& life) { return static_cast<int64_t>(life.death) - life.birth + 1; };
  // Smaller keys first; equal ones in the order in which they are given, so that the result never varies.
  const auto by = [&](auto key) {
    std::stable_sort(made.begin(), made.end(), [&](int32_t a, int32_t b) { return key(lives[a]) < key(lives[b]); });
  };
  switch (order) {
    case PlacementOrder::death:
      by([](const Lifetime& life) { return std::pair<int64_t, int64_t>(-life.death, -life.size); });
      break;
    case PlacementOrder::life:
      by([&](const Lifetime& life) { return -span(life); });
      break;
    case PlacementOrder::birth:
      by([](const Lifetime& life) { return std::pair<int64_t, int64_t>(life.birth, -life.death); });
      break;
    case PlacementOrder::size:
      by([](const Lifetime& life) { return -life.size; });
      break;
    case PlacementOrder::area:
      by([&](const Lifetime& life) { return -static_cast<double>(life.size) * span(life); });
      break;
  }
  return made;
}

Placement place(const std::vector<Lifetime>& lives, int32_t operations, int64_t work) {
  check(lives, operations);
  std::vector<int64_t> live(operations + 1, 0);
  for (const auto& life : lives) {
    live[life.birth] += life.size;
    live[life.death + 1] -= life.size;
  }
  std::partial_sum(live.begin(), live.end(), live.begin());
  const double peak = std::max<double>(1, live.empty() ? 0 : *std::max_element(live.begin(), live.end()));
  const double area = std::max(1.0, std::accumulate(live.begin(), live.end(), 0.0));
  const auto cost = [&](const Placement& p) { return p.height / peak + kAreaWeight * p.area / area; };

  const int64_t one = static_cast<int64_t>(lives.size()) * static_cast<int64_t>(lives.size()) / 2 + 1;
  const int64_t tries = std::clamp<int64_t>(work / one / 4, 0, kMostPromoted);
  Placement best;
  std::vector<int32_t> best_order;
  for (auto base : {PlacementOrder::death, PlacementOrder::life, PlacementOrder::birth}) {
    std::vector<int32_t> order = placement_order(lives, base);
    std::vector<bool> promoted(lives.size(), false);
    for (int64_t tried = 0;; ++tried) {
      Placement made = place_in_order(lives, order, operations);
      int32_t highest = -1;
      for (size_t i = 0; i < lives.size(); ++i) {
        const auto end_of = [&](size_t j) { return made.offsets[j] + lives[j].size; };
        if (promoted[i] || end_of(i) <= peak * kCloseEnough) continue;
        if (highest < 0 || end_of(i) > end_of(highest)) highest = static_cast<int32_t>(i);
      }
      if (best.offsets.empty() || cost(made) < cost(best)) {
        best = std::move(made);
        best_order = order;
      }
      if (highest < 0 || tried >= tries) break;
      promoted[highest] = true;
      order.erase(std::find(order.begin(), order.end(), highest));
      order.insert(order.begin(), highest);
    }
  }

  std::mt19937 random(0);  // the same numbers everywhere, so that equal steps have equal plans
  const int64_t moves = std::clamp<int64_t>(work / one / 4, 0, kMostMoves);
  std::vector<int32_t> highest(lives.size());
  for (int64_t move = 0; move < moves && best.height > peak * kCloseEnough; ++move) {
    std::iota(highest.begin(), highest.end(), 0);
    const size_t count = std::min(kHighest, highest.size());
    std::partial_sort(highest.begin(), highest.begin() + count, highest.end(), [&](int32_t a, int32_t b) {
      const int64_t end_a = best.offsets[a] + lives[a].size, end_b = best.offsets[b] + lives[b].size;
      return std::pair(-end_a, a) < std::pair(-end_b, b);
    });
    auto order = best_order;
    const auto from = std::find(order.begin(), order.end(), highest[random() % count]);
    const auto to = order.begin() + random() % (from - order.begin() + 1);
    std::rotate(to, from, from + 1);
    Placement made = place_in_order(lives, order, operations);
    if (cost(made) > cost(best)) continue;
    best = std::move(made);
    best_order = std::move(order);
  }
  return best;
}

Walk walk(const std::vector<Lifetime>& lives, const std::vector<int64_t>& offsets, int32_t operations) {
  check(lives, operations);
  if (offsets.size() != lives.size()) throw std::invalid_argument("each piece needs an offset");
  std::vector<std::vector<int32_t>> born(operations), dies(operations);
  for (size_t i = 0; i < lives.size(); ++i) {
    if (offsets[i] < 0) throw std::invalid_argument("an offset cannot be negative: " + std::to_string(offsets[i]));
    if (lives[i].size == 0) continue;
    born[lives[i].birth].push_back(static_cast<int32_t>(i));
    dies[lives[i].death].push_back(static_cast<int32_t>(i));
  }
  Walk walk;
  std::map<int64_t, int32_t> live;  // by offset; none overlap, so the last one ends furthest
  const auto end_of = [&](int32_t i) { return offsets[i] + lives[i].size; };
  const auto furthest = [&] { return live.empty() ? 0 : end_of(live.rbegin()->second); };
  const auto meets = [&](int32_t i, int32_t neighbour) {
    const int64_t from = std::max(offsets[i], offsets[neighbour]);
    const int64_t to = std::min(end_of(i), end_of(neighbour));
    if (from >= to) return false;
    walk.one = std::min(i, neighbour);
    walk.other = std::max(i, neighbour);
    walk.shared_at = from;
    walk.shared = to - from;
    return true;
  };
  for (int32_t at = 0; at < operations; ++at) {
    for (int32_t i : born[at]) {
      const auto behind = live.lower_bound(offsets[i]);
      if (behind != live.end() && meets(i, behind->second)) return walk;
      if (behind != live.begin() && meets(i, std::prev(behind)->second)) return walk;
      live.emplace(offsets[i], i);
    }
    walk.during.push_back(furthest());
    for (int32_t i : dies[at]) live.erase(offsets[i]);
    walk.after.push_back(furthest());
  }
  return walk;
}

}  // namespace waterflow

// What Python sees of the placement of a step's memory.

namespace py = pybind11;

namespace waterflow {
namespace {

std::vector<Lifetime> lifetimes(const std::vector<std::tuple<int32_t, int32_t, int64_t>>& given) {
  std::vector<Lifetime> made;
  made.reserve(given.size());
  for (const auto& [birth, death, size] : given) made.push_back({birth, death, size});
  return made;
}

}  // namespace

void bind_offsets(py::module_& m) {
  py::enum_<PlacementOrder>(m, "PlacementOrder")
      .value("death", PlacementOrder::death)
      .value("life", PlacementOrder::life)
      .value("birth", PlacementOrder::birth)
      .value("size", PlacementOrder::size)
      .value("area", PlacementOrder::area);
  py::class_<Placement>(m, "Placement")
      .def_readonly("offsets", &Placement::offsets)
      .def_readonly("heights", &Placement::heights)
      .def_readonly("height", &Placement::height)
      .def_readonly("area", &Placement::area);
  m.def(
      "placement_order",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, PlacementOrder order) {
        return placement_order(lifetimes(lives), order);
      },
      py::arg("lives"), py::arg("order"));
  m.def(
      "place_in_order",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, const std::vector<int32_t>& order,
         int32_t operations) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return place_in_order(given, order, operations);
      },
      py::arg("lives"), py::arg("order"), py::arg("operations"));
  m.def(
      "place",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, int32_t operations, int64_t work) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return place(given, operations, work);
      },
      py::arg("lives"), py::arg("operations"), py::arg("work"));
  py::class_<Walk>(m, "Walk")
      .def_readonly("during", &Walk::during)
      .def_readonly("after", &Walk::after)
      .def_property_readonly("overlap", [](const Walk& self) -> py::object {
        if (self.one < 0) return py::none();
        return py::make_tuple(self.one, self.other, self.shared_at, self.shared);
      });
  m.def(
      "walk_offsets",
      [](const std::vector<std::tuple<int32_t, int32_t, int64_t>>& lives, const std::vector<int64_t>& offsets,
         int32_t operations) {
        const auto given = lifetimes(lives);
        py::gil_scoped_release release;
        return walk(given, offsets, operations);
      },
      py::arg("lives"), py::arg("offsets"), py::arg("operations"));
}

}  // namespace waterflow
