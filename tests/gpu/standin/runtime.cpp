// libcuda.so.1 of a machine without a GPU: the driver's stand-in, and in front of the real one the runtime's functions
// that torch calls, on top of it. What computes is in compute.cpp.
#include "tests/allocator/native/fake_cuda.cpp"

#define CUDART_NO_ATTR
#include <cuda_runtime_api.h>

#include <cstdio>
#include <utility>
#undef cudaGetDeviceProperties

namespace {

std::map<uint64_t, size_t> pinned;

thread_local cudaError_t last_error = cudaSuccess;  // stays until it is asked for

cudaError_t as_runtime(int result) {
  if (result != OK) last_error = static_cast<cudaError_t>(result);
  return static_cast<cudaError_t>(result);
}

void begin() {
  cuInit(0);
  if (context == 0) context = 0xc0;
}

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const Capture* const capture = capture_of(stream);
  if (capture == nullptr) return cudaStreamCaptureStatusNone;
  return capture->spoiled ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

// As the driver's NOT_CAPTURED, for calls that the runtime alone has.
bool spoiled(cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  Capture* const capture = capture_of(stream);
  if (capture != nullptr) capture->spoiled = true;
  return capture != nullptr;
}

bool lies_in(const std::map<uint64_t, size_t>& blocks, const void* address) {
  const auto at = reinterpret_cast<uint64_t>(address);
  auto found = blocks.upper_bound(at);
  return found != blocks.begin() && at < std::prev(found)->first + std::prev(found)->second;
}

}  // namespace

FAKE void standin_run(void* stream, std::function<void()>* work,
                      const std::vector<std::pair<uint64_t, uint64_t>>* touches) {
  run_on(stream, std::make_shared<Piece>(std::move(*work), *touches));
}
// NaN in memory that was given back, behind what its stream has to do; at once where that is nothing.
FAKE void standin_fill(void* stream, void* at, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const auto from = reinterpret_cast<uint64_t>(at);
  const auto fill = [=] {
    if (lies_in(plain, at) || mapped(from, bytes)) std::memset(at, 0xff, bytes);
  };
  Stream* const on = stream_of(stream);
  if (on == nullptr) return;
  if (capture_of(stream) == nullptr && on->items.empty()) return fill();
  run_on(stream, std::make_shared<Piece>(fill));
}
// What the launch of a kernel says: an error that was left behind on this thread, or that its capture is spoiled, which
// a library leaves behind.
FAKE int standin_launch(void* stream) {
  if (const int left = std::exchange(last_error, cudaSuccess)) return left;
  const bool spoiled = status_of(static_cast<cudaStream_t>(stream)) == cudaStreamCaptureStatusInvalidated;
  return spoiled ? as_runtime(SPOILED) : OK;
}
FAKE bool standin_capturing(void* stream) {
  return status_of(static_cast<cudaStream_t>(stream)) != cudaStreamCaptureStatusNone;
}
FAKE void standin_finish(void* stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  Stream* const on = stream_of(stream);
  if (on != nullptr) force(reinterpret_cast<uint64_t>(stream), on->issued);
}
// Whatever was issued on one stream so far comes before what is issued on the other from now on.
FAKE void standin_wait(void* stream, void* other) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (capture_of(stream) != nullptr || stream_of(stream) == nullptr || stream_of(other) == nullptr) return;
  see(*stream_of(stream), {{reinterpret_cast<uint64_t>(other), stream_of(other)->issued}});
  issue(*stream_of(stream), {nullptr, reinterpret_cast<uint64_t>(other), stream_of(other)->issued});
}
FAKE bool standin_pinned(const void* address) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  return lies_in(pinned, address);
}

// -- the runtime

#define RUNTIME extern "C" __attribute__((visibility("default"))) cudaError_t
#define FORWARD(name, parameters, call) \
  RUNTIME name parameters {             \
    begin();                            \
    return as_runtime(call);            \
  }

RUNTIME cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
RUNTIME cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
RUNTIME cudaSetDevice(int device) { return begin(), device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
RUNTIME cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
RUNTIME cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
RUNTIME cudaPeekAtLastError() { return last_error; }
RUNTIME cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {{cudaDevAttrMultiProcessorCount, 132},
                                           {cudaDevAttrComputeCapabilityMajor, 9},
                                           {cudaDevAttrComputeCapabilityMinor, 0},
                                           {cudaDevAttrMaxThreadsPerBlock, 1024}};
  const auto found = known.find(attribute);
  return *value = found == known.end() ? 1 : found->second, cudaSuccess;
}
RUNTIME cudaGetDeviceProperties(cudaDeviceProp* made, int) {
  begin();
  std::memset(made, 0, sizeof *made);
  std::strcpy(made->name, "stand-in for a GPU");
  made->major = 9;
  made->multiProcessorCount = 132;
  made->warpSize = 32;
  made->maxThreadsPerBlock = 1024;
  made->totalGlobalMem = total;
  return cudaSuccess;
}
FORWARD(cudaDeviceSynchronize, (), cuCtxSynchronize())
FORWARD(cudaMemGetInfo, (size_t* free, size_t* all), cuMemGetInfo_v2(free, all))
FORWARD(cudaMalloc, (void** at, size_t bytes), cuMemAlloc_v2(reinterpret_cast<unsigned long long*>(at), bytes))
RUNTIME cudaFree(void* at) {
  begin();
  return at == nullptr ? cudaSuccess : as_runtime(cuMemFree_v2(reinterpret_cast<unsigned long long>(at)));
}
RUNTIME cudaHostAlloc(void** at, size_t bytes, unsigned) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  *at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  pinned.emplace(reinterpret_cast<uint64_t>(*at), bytes);
  return cudaSuccess;
}
RUNTIME cudaFreeHost(void* at) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  force_all();
  pinned.erase(reinterpret_cast<uint64_t>(at));
  return std::free(at), cudaSuccess;
}
RUNTIME cudaPointerGetAttributes(cudaPointerAttributes* made, const void* at) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  std::memset(made, 0, sizeof *made);
  const bool own = lies_in(reservations, at) || lies_in(plain, at);
  made->type = own ? cudaMemoryTypeDevice : lies_in(pinned, at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  made->devicePointer = const_cast<void*>(at);
  return cudaSuccess;
}
RUNTIME cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
RUNTIME cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, cudaSuccess; }
FORWARD(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int),
        cuStreamCreate(reinterpret_cast<void**>(stream), flags))
FORWARD(cudaStreamCreate, (cudaStream_t * stream), cuStreamCreate(reinterpret_cast<void**>(stream), 0))
FORWARD(cudaStreamDestroy, (cudaStream_t stream), cuStreamDestroy_v2(stream))
RUNTIME cudaStreamSynchronize(cudaStream_t stream) {
  if (spoiled(stream)) return as_runtime(IN_CAPTURE);
  return standin_finish(stream), cudaSuccess;
}
RUNTIME cudaStreamQuery(cudaStream_t stream) {
  if (spoiled(stream)) return as_runtime(IN_CAPTURE);
  std::lock_guard<std::recursive_mutex> guard(lock);
  Stream* const on = stream_of(stream);
  if (on == nullptr) return cudaErrorInvalidResourceHandle;
  return as_runtime(asked(reinterpret_cast<uint64_t>(stream), on->issued) ? OK : NOT_READY);
}
FORWARD(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned), cuStreamWaitEvent(stream, event, 0))
RUNTIME cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return *status = status_of(stream), cudaSuccess;
}
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                 cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = status_of(stream);
  if (id != nullptr) *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}
RUNTIME cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  int value = static_cast<int>(*mode);
  cuThreadExchangeStreamCaptureMode(&value);
  return *mode = static_cast<cudaStreamCaptureMode>(value), cudaSuccess;
}
FORWARD(cudaStreamBeginCapture, (cudaStream_t stream, cudaStreamCaptureMode mode),
        cuStreamBeginCapture_v2(stream, static_cast<int>(mode)))
FORWARD(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t* graph),
        cuStreamEndCapture(stream, reinterpret_cast<void**>(graph)))
FORWARD(cudaGraphInstantiateWithFlags, (cudaGraphExec_t * made, cudaGraph_t graph, unsigned long long),
        cuGraphInstantiateWithFlags(reinterpret_cast<void**>(made), graph, 0))
FORWARD(cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream), cuGraphLaunch(graph, stream))
FORWARD(cudaGraphDestroy, (cudaGraph_t graph), cuGraphDestroy(graph))
FORWARD(cudaGraphExecDestroy, (cudaGraphExec_t graph), cuGraphExecDestroy(graph))
RUNTIME cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }

FORWARD(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags),
        cuEventCreate(reinterpret_cast<void**>(event), flags))
FORWARD(cudaEventCreate, (cudaEvent_t * event), cuEventCreate(reinterpret_cast<void**>(event), 0))
FORWARD(cudaEventDestroy, (cudaEvent_t event), cuEventDestroy_v2(event))
FORWARD(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), cuEventRecord(event, stream))
FORWARD(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned), cuEventRecord(event, stream))
FORWARD(cudaEventQuery, (cudaEvent_t event), cuEventQuery(event))
FORWARD(cudaEventSynchronize, (cudaEvent_t event), cuEventSynchronize(event))
RUNTIME cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                         cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
// Torch's libraries are linked to these, and call none of them here.
// clang-format off
#define ABSENT(X) \
  X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuFuncSetCacheConfig) X(cuLaunchCooperativeKernel) \
  X(cuLaunchKernel) X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2) X(cuModuleGetFunction) \
  X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleUnload) \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuPointerGetAttribute) X(cuTensorMapEncodeTiled)
// clang-format on
#define X(name) \
  FAKE int name() { return cudaErrorNotSupported; }
ABSENT(X)
