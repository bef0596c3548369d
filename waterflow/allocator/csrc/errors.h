// What the allocator says no with.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace waterflow {

// The caller is wrong; nothing has changed.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The memory is not there.
struct OutOfMemory : std::runtime_error {
  OutOfMemory(const std::string& text, int64_t needed, int64_t limit)
      : std::runtime_error(text), needed(needed), limit(limit) {}
  int64_t needed, limit;  // bytes
};

std::string bytes_text(int64_t bytes);  // for people: 12.5 MiB

}  // namespace waterflow
