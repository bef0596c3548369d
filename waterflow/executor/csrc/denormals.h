// Whether a thread takes denormal numbers for zero, and makes none: torch.set_flush_denormal sets it for its caller
// alone.
#pragma once

#include <cstdint>

namespace waterflow {

// The calling thread's bits for that (x86: FTZ and DAZ of MXCSR); 0 elsewhere.
uint32_t denormals_here();

// Within its scope the calling thread, and those that share its operators' work, have such bits.
class Denormals {
 public:
  explicit Denormals(uint32_t bits);
  ~Denormals();
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
  const uint32_t before_;
  const bool changed_;
};

}  // namespace waterflow
