// How loops of our own kernels become vectors: of the widest kind that the CPU has.
#pragma once

// No two operations become one: that would round otherwise. Only for the loops: what differs in these options from the
// functions around it is not inlined into them, nor they into it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WATERFLOW_LOOPS optimize("O3", "no-trapping-math", "fp-contract=off")
#define WATERFLOW_VECTORS __attribute__((WATERFLOW_LOOPS, target_clones("default", "avx2", "avx512f")))
#define WATERFLOW_INLINE inline __attribute__((WATERFLOW_LOOPS, always_inline))
#else
#define WATERFLOW_VECTORS
#define WATERFLOW_INLINE inline
#endif
