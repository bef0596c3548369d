// What lanes ask for outside of their plans, on the CPU: served by the multi-stream allocator from pages that stay.
#pragma once

#include <cstddef>
#include <cstdint>

namespace waterflow {

// One for the process, for blocks may outlive every engine. Thread-safe. A CPU has done whatever was asked of it before
// it goes on, so all its threads are one stream, and what is given back is free for all.
class CpuPool {
 public:
  // Null where there is no memory: torch's own allocator then has its turn.
  static void* request(size_t bytes);
  static bool owns(const void* address);
  static void release(void* address);

  // Bytes that nobody holds and that stay for later requests; and giving those back to the system.
  static int64_t idle();
  static int64_t held();
  static void trim();

  // In a forked child: what is there is the parent's, and nobody may give it back.
  static void begin_anew();
  static bool of_parents(const void* address);

  // While nobody uses it nothing idle stays.
  static void open();
  static void close();
};

}  // namespace waterflow
