// The functions that torch calls for memory of a GPU: torch.cuda.memory.CUDAPluggableAllocator takes their addresses.
// They may throw, as torch calls them from C++: an out-of-memory error becomes torch.OutOfMemoryError.
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cuda_abi.h"

namespace {

using waterflow::CudaMemory;

void tell_profiler(void* address, int64_t change, int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  c10::reportMemoryUsageToProfiler(address, change, 0, 0, c10::Device(c10::DeviceType::CUDA, index));
}

}  // namespace

void* waterflow_malloc(size_t bytes, int device, CUstream_st* stream) {
  if (bytes == 0) return nullptr;
  auto& memory = CudaMemory::of(device);
  void* at = nullptr;
  std::string why;
  try {
    at = memory.allocate(bytes, stream);
  } catch (const waterflow::OutOfMemory& error) {
    why = error.what();
  }
  if (at == nullptr) {
    if (why.empty()) {
      why = "device " + std::to_string(device) + " has no " + waterflow::bytes_text(static_cast<int64_t>(bytes)) +
            " left beside the " + waterflow::bytes_text(memory.figures().reserved) +
            " that waterflow holds. Lower the batch size, or close other programs on the GPU.";
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, why);
  }
  tell_profiler(at, static_cast<int64_t>(bytes), device);
  return at;
}

void waterflow_free(void* address, size_t bytes, int device, CUstream_st*) {
  if (address == nullptr) return;
  try {
    CudaMemory::of(device).release(address, bytes);
  } catch (const std::exception& error) {
    TORCH_WARN("a block of GPU memory could not be given back: ", error.what());  // torch frees in destructors
    return;
  }
  tell_profiler(address, -static_cast<int64_t>(bytes), device);
}

void waterflow_record_stream(void* address, CUstream_st* stream) {
  // Torch does not say which device: the one that knows the address is told, and the others do not mind.
  for (int device = 0; device < waterflow::MOST_CUDA_DEVICES; ++device) {
    if (auto* memory = CudaMemory::existing(device)) memory->record_stream(address, stream);
  }
}

void waterflow_empty_cache() {
  for (int device = 0; device < waterflow::MOST_CUDA_DEVICES; ++device) {
    if (auto* memory = CudaMemory::existing(device)) memory->trim();
  }
}

void waterflow_memory_fraction(double fraction, int device) {
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "a fraction of a device's memory lies between 0 and 1; got ", fraction);
  auto& memory = CudaMemory::of(device);
  const auto bytes = static_cast<int64_t>(std::floor(fraction * static_cast<double>(memory.device()->capacity())));
  if (memory.pools()) memory.pool(std::max<int64_t>(bytes, 1));
}

void waterflow_begin_pool(int device, waterflow::GraphPoolId pool, waterflow::GraphFilter filter) {
  CudaMemory::of(device).graphs().begin(pool, std::move(filter));
}

void waterflow_end_pool(int device, waterflow::GraphPoolId pool) { CudaMemory::of(device).graphs().end(pool); }

void waterflow_release_pool(int device, waterflow::GraphPoolId pool) { CudaMemory::of(device).graphs().release(pool); }
