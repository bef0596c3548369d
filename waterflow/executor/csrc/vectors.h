// How loops of our own kernels become vectors: of the widest kind that the CPU has. To be included last.
#pragma once

// No two operations become one: that would round otherwise.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WATERFLOW_VECTORS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WATERFLOW_VECTORS
#endif
