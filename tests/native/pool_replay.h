// Steps of jobs whose every request goes to one pool, in an order that is given: what dynamic placement costs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "waterflow/executor/csrc/engine/simulation.h"

namespace waterflow {

// What the operations of a step ask of a pool: operation i asks for all that is born with it, in the order given, and
// releases all that dies behind it once it is issued.
struct PoolStep {
  std::vector<int64_t> bytes;                     // by piece
  std::vector<std::vector<int32_t>> born, dying;  // pieces, by operation
  std::vector<Work> work;                         // by operation
  int64_t copy_ns;                                // of one batch, from the host

  // Throws std::invalid_argument for a piece that does not live within the operations.
  PoolStep(std::vector<Work> work, const std::vector<int32_t>& births, const std::vector<int32_t>& deaths,
           std::vector<int64_t> bytes, int64_t copy_ns);
  int32_t operations() const { return static_cast<int32_t>(work.size()); }
};
using PoolSteps = std::vector<std::shared_ptr<const PoolStep>>;

// Operations [begin, end) of a job's step; of none where a stream stays idle.
struct PoolGroup {
  int32_t job = -1, begin = 0, end = 0;
  int32_t operations() const { return end - begin; }
};
// What two streams do between two synchronizations.
using PoolPair = std::array<PoolGroup, 2>;

struct PoolResult {
  std::string refused;   // the first request that was not served, in words; empty if all were
  int64_t requests = 0;  // served
  int64_t peak = 0;      // most bytes handed out at once, alignment included
  int64_t reach = 0;     // the furthest byte that was handed out, from the pool's beginning
  int64_t waits = 0;     // that the pool put between the streams, where a request found no memory otherwise
  // The device's time, where that is modelled: nanoseconds until all is done, while both streams were busy, and of all
  // operations one by one.
  int64_t makespan = 0, overlapped = 0, alone = 0;
};

// The pool is the engine's own allocator on a device without memory: best fit, neighbours merged at once, pieces in
// multiples of 256 bytes. It has all of `limit` as one segment from the beginning, so segments lose nothing. The device
// never gets ahead of what orders it: memory goes to the other stream behind an event, or not at all.
constexpr int64_t kPoolAlignment = 256;

// The pairs, one after the other, so often; streams wait for each other in between. The two groups of a pair are issued
// at the same time: operations are merged in proportion to their numbers. With `check` the device checks the order of
// all first and last uses of a piece. Throws std::invalid_argument where a job's operations are not all there, in
// order.
PoolResult replay_pairs(const PoolSteps& jobs, const std::vector<PoolPair>& pairs, int64_t limit, int32_t iterations,
                        bool check = false);
// Operations (job, number) in this order, on one stream; without time.
PoolResult replay_operations(const PoolSteps& jobs, const std::vector<std::pair<int32_t, int32_t>>& operations,
                             int64_t limit, bool check = false);

}  // namespace waterflow
