// Where each piece of a step's memory lies: offsets from one end of an arena, known before the step runs.
#pragma once

#include <cstdint>
#include <vector>

namespace waterflow {

// Memory of `size` bytes that is there from operation `birth` to operation `death`, both inclusive.
struct Lifetime {
  int32_t birth, death;
  int64_t size;
};

enum class PlacementOrder { death, life, birth, size, area };

struct Placement {
  std::vector<int64_t> offsets;
  std::vector<int64_t> heights;  // by operation: where the furthest live byte ends
  int64_t height = 0;            // the largest of them
  double area = 0;               // their sum
};

// Places one after another in the order that is given, each in the tightest gap that is free for its whole life, or
// else above all that it meets.
Placement place_in_order(const std::vector<Lifetime>& lives, const std::vector<int32_t>& order, int32_t operations);

std::vector<int32_t> placement_order(const std::vector<Lifetime>& lives, PlacementOrder order);

// The best placement found. From each of three orders (death, life, birth), whatever ends above the most bytes that are
// ever live at once is moved to the front, one at a time, and all are placed anew: those that stick out get the
// first pick of addresses. Then pieces that end highest are moved forward at random, as long as that helps. `work`
// bounds the search, in comparisons; the first placement of each order is always tried.
Placement place(const std::vector<Lifetime>& lives, int32_t operations, int64_t work);

// A plan of offsets, walked operation by operation.
struct Walk {
  std::vector<int64_t> during;        // by operation: where the furthest live byte ends
  std::vector<int64_t> after;         // the same once what dies behind the operation is gone
  int32_t one = -1, other = -1;       // the first two pieces found that share a byte while both live; -1 where none do
  int64_t shared_at = 0, shared = 0;  // where, and how many bytes
};

// Near n log n. A walk ends at the first overlap.
Walk walk(const std::vector<Lifetime>& lives, const std::vector<int64_t>& offsets, int32_t operations);

}  // namespace waterflow
