// Random runs of the allocator without Python, for sanitizers: `fuzz_main [rows] [seed]`.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../native/fuzz.h"

using namespace waterflow;

namespace {

bool run(const char* name, const FuzzShape& shape, FuzzSetup setup) {
  setup.streams = shape.streams;
  setup.capacity = shape.capacity;
  setup.seed = shape.seed;
  const FuzzResult result = run_fuzz(fuzz_table(shape), setup);
  std::printf("%-24s seed %llu: %lld operations, %lld checks, %lld waits;", name,
              static_cast<unsigned long long>(shape.seed), static_cast<long long>(result.operations),
              static_cast<long long>(result.checks), static_cast<long long>(result.waits));
  for (int32_t tier = 0; tier < TIERS; ++tier) {
    std::printf(" %s %lld", tier_name(static_cast<Tier>(tier)),
                static_cast<long long>(result.tiers[static_cast<size_t>(tier)]));
  }
  std::printf("%s%s\n", result.error.empty() ? "" : "\nWRONG: ", result.error.c_str());
  return result.error.empty();
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t rows = count > 1 ? std::atoll(arguments[1]) : 20000;
  const uint64_t seed = count > 2 ? static_cast<uint64_t>(std::atoll(arguments[2])) : 1;
  bool good = true;
  for (int32_t streams : {2, 4, 8}) {
    FuzzShape shape{seed + static_cast<uint64_t>(streams), rows, streams, int64_t{80} << 20, int64_t{64} << 20, true};
    FuzzSetup simulated;
    good &= run("simulated", shape, simulated);
    simulated.threads = streams;
    good &= run("simulated, threads", shape, simulated);
    FuzzSetup cpu;
    cpu.simulated = false;
    cpu.stall_share = 0.01;
    cpu.stall_us = 200;
    shape.largest = int64_t{8} << 20;
    shape.capacity = int64_t{10} << 20;
    good &= run("cpu", shape, cpu);
    cpu.threads = streams;
    good &= run("cpu, threads", shape, cpu);
  }
  return good ? 0 : 1;
}
