// The functions that torch calls for memory of a GPU, with the signatures of torch's CUDAPluggableAllocator.
#pragma once

#include <cstddef>

#include "cuda_memory.h"

#define WATERFLOW_EXPORT __attribute__((visibility("default")))

// They may throw, as torch calls them from C++: memory that is not there becomes torch.OutOfMemoryError.
extern "C" {
WATERFLOW_EXPORT void* waterflow_malloc(size_t bytes, int device, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_free(void* address, size_t bytes, int device, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_record_stream(void* address, CUstream_st* stream);
WATERFLOW_EXPORT void waterflow_empty_cache();
WATERFLOW_EXPORT void waterflow_memory_fraction(double fraction, int device);
}
// Not C: these take C++ types by value, as torch passes them.
WATERFLOW_EXPORT void waterflow_begin_pool(int device, waterflow::GraphPoolId pool, waterflow::GraphFilter filter);
WATERFLOW_EXPORT void waterflow_end_pool(int device, waterflow::GraphPoolId pool);
WATERFLOW_EXPORT void waterflow_release_pool(int device, waterflow::GraphPoolId pool);
