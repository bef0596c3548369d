// A process-wide allocator that counts every thread's bytes and hands the work to torch's own: the independent witness
// of tests and benchmarks.
#pragma once

#include <cstdint>

#include "waterflow/allocator/csrc/cpu/lane_allocator.h"

namespace waterflow {

// The allocator, which counts from now on; bytes already held are not counted. Blocks that it handed out stay valid
// behind its end. It stands in its place when waterflow_witness was told.
ChainedAllocator* start_counting();
void restart_peak();
int64_t counted_now();
int64_t counted_peak();

}  // namespace waterflow
