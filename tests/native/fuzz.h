// Random requests on a stream allocator, with every byte's order and content checked. Serves tests and benchmarks.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "waterflow/allocator/csrc/stream/stream_allocator.h"

namespace waterflow {

// Rows of four: kind, id, stream, number. Each row stands for itself, so that any of them may be left out: what
// names a block or a mark that is not there does nothing.
enum FuzzRow : int64_t {
  FUZZ_REQUEST,  // number: bytes
  FUZZ_RELEASE,
  FUZZ_USE,      // the stream waits for the block's own, and reads it
  FUZZ_END_USE,  // ... and reads it no more
  FUZZ_MARK,
  FUZZ_WAIT,
  FUZZ_STALL,    // number: microseconds, where streams are threads
  FUZZ_ADVANCE,  // the stream's work gets done, where that has to be told; number 1: elsewhere, wait for it
  FUZZ_TRIM,
  FUZZ_RENEW,  // the stream is removed, and a new one takes its number in the table
};

struct FuzzShape {
  uint64_t seed = 0;
  int64_t rows = 0;
  int32_t streams = 4;
  int64_t capacity = 0;  // bytes; what is held goes from a fifth of it to a little more than all
  int64_t largest = int64_t{64} << 20;
  bool renew = true;  // streams come and go
};

struct FuzzSetup {
  bool simulated = true;  // else CPU
  int32_t streams = 4;
  int32_t threads = 1;
  int64_t capacity = 0;  // the allocator's limit
  int64_t check_every = 1009;
  uint64_t seed = 0;  // of random stalls
  double stall_share = 0;
  int64_t stall_us = 0;
  int64_t alignment = 64;
  Fault fault = Fault::none;
  bool checked = true;  // else nobody looks at orders, contents, and overlaps
};

struct FuzzResult {
  std::string error;  // empty: nothing was wrong
  int64_t row = -1;   // at which it was found
  int64_t operations = 0, requests = 0;
  int64_t checks = 0;  // accesses whose order, or blocks whose content, was checked
  int64_t waits = 0;
  std::array<int64_t, TIERS> tiers{};
};

std::vector<int64_t> fuzz_table(const FuzzShape& shape);
FuzzResult run_fuzz(const std::vector<int64_t>& table, const FuzzSetup& setup);

}  // namespace waterflow
