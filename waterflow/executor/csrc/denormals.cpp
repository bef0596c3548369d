#include "denormals.h"

#include <ATen/Parallel.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define WATERFLOW_MXCSR 1
#endif

namespace waterflow {

namespace {

#ifdef WATERFLOW_MXCSR
constexpr uint32_t kBits = 0x8000u | 0x0040u;  // flush to zero, denormals are zeros

void set_one(uint32_t bits) { _mm_setcsr((_mm_getcsr() & ~kBits) | bits); }
#else
void set_one(uint32_t) {}
#endif

void set_here(uint32_t bits) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (threads > 1) {
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { set_one(bits); });
  }
  set_one(bits);
}

}  // namespace

uint32_t denormals_here() {
#ifdef WATERFLOW_MXCSR
  return _mm_getcsr() & kBits;
#else
  return 0;
#endif
}

Denormals::Denormals(uint32_t bits) : before_(denormals_here()), changed_(bits != before_) {
  if (changed_) set_here(bits);
}

Denormals::~Denormals() {
  if (changed_) set_here(before_);
}

}  // namespace waterflow
