// The functions of the CUDA driver that memory and order need, looked up when the program runs: no header, no library
// to link with. Names, numbers and layouts are those of the driver's public interface (CUDA 11.4 to 13).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace waterflow {

namespace cu {

using Result = int;
using Ordinal = int;
using Context = void*;
using Stream = void*;  // null: the legacy default stream
using Event = void*;
using Address = unsigned long long;
using Handle = unsigned long long;  // physical memory without an address
using Graph = void*;
using Executable = void*;  // a graph, ready to be launched
using HostFunction = void (*)(void* data);

constexpr Result SUCCESS = 0, OUT_OF_MEMORY = 2, DEINITIALIZED = 4, NO_DEVICE = 100, NOT_READY = 600;
constexpr int PINNED = 1, LOCATION_DEVICE = 1, READ_WRITE = 3;
constexpr int GRANULARITY_MINIMUM = 0;
constexpr int HAS_VIRTUAL_MEMORY = 102;  // device attribute
constexpr unsigned NON_BLOCKING = 1, WITHOUT_TIMING = 2;
constexpr int CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2;

struct Location {
  int type = LOCATION_DEVICE;
  int id = 0;
};

struct AllocationProp {
  int type = PINNED;
  int handle_types = 0;
  Location location;
  void* windows_only = nullptr;
  struct {
    unsigned char compression = 0, direct_rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};

struct Access {
  Location location;
  int flags = READ_WRITE;
};

static_assert(sizeof(Location) == 8 && offsetof(Location, id) == 4);
static_assert(sizeof(AllocationProp) == 32 && offsetof(AllocationProp, handle_types) == 4 &&
              offsetof(AllocationProp, location) == 8 && offsetof(AllocationProp, windows_only) == 16 &&
              offsetof(AllocationProp, flags) == 24);
static_assert(sizeof(Access) == 12 && offsetof(Access, flags) == 8);
static_assert(sizeof(Address) == sizeof(void*));

}  // namespace cu

// Member, exported name, parameters. A `_v2` is the form that headers have used since CUDA 3.2, 4.0 or 11.0.
#define WATERFLOW_CUDA_FUNCTIONS(X)                                                                                 \
  X(init, "cuInit", (unsigned flags))                                                                               \
  X(error_string, "cuGetErrorString", (cu::Result error, const char** text))                                        \
  X(error_name, "cuGetErrorName", (cu::Result error, const char** text))                                            \
  X(device_count, "cuDeviceGetCount", (int* count))                                                                 \
  X(device, "cuDeviceGet", (cu::Ordinal * device, int index))                                                       \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, cu::Ordinal device))                      \
  X(device_memory, "cuDeviceTotalMem_v2", (size_t* bytes, cu::Ordinal device))                                      \
  X(retain_context, "cuDevicePrimaryCtxRetain", (cu::Context * context, cu::Ordinal device))                        \
  X(release_context, "cuDevicePrimaryCtxRelease_v2", (cu::Ordinal device))                                          \
  X(context_state, "cuDevicePrimaryCtxGetState", (cu::Ordinal device, unsigned* flags, int* active))                \
  X(get_context, "cuCtxGetCurrent", (cu::Context * context))                                                        \
  X(set_context, "cuCtxSetCurrent", (cu::Context context))                                                          \
  X(synchronize_context, "cuCtxSynchronize", (void))                                                                \
  X(memory_info, "cuMemGetInfo_v2", (size_t* free, size_t* total))                                                  \
  X(granularity, "cuMemGetAllocationGranularity", (size_t* bytes, const cu::AllocationProp* prop, int option))      \
  X(reserve, "cuMemAddressReserve",                                                                                 \
    (cu::Address * at, size_t bytes, size_t alignment, cu::Address wish, unsigned long long flags))                 \
  X(unreserve, "cuMemAddressFree", (cu::Address at, size_t bytes))                                                  \
  X(create, "cuMemCreate",                                                                                          \
    (cu::Handle * handle, size_t bytes, const cu::AllocationProp* prop, unsigned long long flags))                  \
  X(release, "cuMemRelease", (cu::Handle handle))                                                                   \
  X(map, "cuMemMap", (cu::Address at, size_t bytes, size_t offset, cu::Handle handle, unsigned long long flags))    \
  X(unmap, "cuMemUnmap", (cu::Address at, size_t bytes))                                                            \
  X(set_access, "cuMemSetAccess", (cu::Address at, size_t bytes, const cu::Access* access, size_t count))           \
  X(allocate, "cuMemAlloc_v2", (cu::Address * at, size_t bytes))                                                    \
  X(free, "cuMemFree_v2", (cu::Address at))                                                                         \
  X(create_stream, "cuStreamCreate", (cu::Stream * stream, unsigned flags))                                         \
  X(destroy_stream, "cuStreamDestroy_v2", (cu::Stream stream))                                                      \
  X(wait_event, "cuStreamWaitEvent", (cu::Stream stream, cu::Event event, unsigned flags))                          \
  X(create_event, "cuEventCreate", (cu::Event * event, unsigned flags))                                             \
  X(record_event, "cuEventRecord", (cu::Event event, cu::Stream stream))                                            \
  X(query_event, "cuEventQuery", (cu::Event event))                                                                 \
  X(synchronize_event, "cuEventSynchronize", (cu::Event event))                                                     \
  X(destroy_event, "cuEventDestroy_v2", (cu::Event event))                                                          \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                                        \
  X(is_capturing, "cuStreamIsCapturing", (cu::Stream stream, int* status))                                          \
  X(begin_capture, "cuStreamBeginCapture_v2", (cu::Stream stream, int mode))                                        \
  X(end_capture, "cuStreamEndCapture", (cu::Stream stream, cu::Graph * graph))                                      \
  X(instantiate, "cuGraphInstantiateWithFlags", (cu::Executable * made, cu::Graph graph, unsigned long long flags)) \
  X(launch_graph, "cuGraphLaunch", (cu::Executable graph, cu::Stream stream))                                       \
  X(destroy_executable, "cuGraphExecDestroy", (cu::Executable graph))                                               \
  X(destroy_graph, "cuGraphDestroy", (cu::Graph graph))                                                             \
  X(launch_host, "cuLaunchHostFunc", (cu::Stream stream, cu::HostFunction function, void* data))

// A call that failed: what was called with what, what the driver says, and what helps.
struct CudaError : std::runtime_error {
  CudaError(const std::string& text, cu::Result code) : std::runtime_error(text), code(code) {}
  bool of_capture() const { return code >= 900 && code < 910; }
  cu::Result code;
};

// One loaded driver. Never unloaded: memory and contexts may outlive everything.
class CudaDriver {
 public:
  // The library named, else the one that WATERFLOW_CUDA_LIBRARY names, else libcuda.so.1; loaded once for each name and
  // initialized. Throws CudaError where it is not there, lacks a function, or finds no device.
  static const CudaDriver& load(const std::string& library = {});

#define X(member, name, parameters) cu::Result(*member) parameters = nullptr;
  WATERFLOW_CUDA_FUNCTIONS(X)
#undef X
  // Since CUDA 12; null before. A number that no other stream of this process ever has.
  cu::Result (*stream_id)(cu::Stream stream, unsigned long long* id) = nullptr;
  // Of the runtime that torch uses, where there is one: the error that a call of this thread has left there, which
  // whoever launches a kernel next would take for its own.
  int (*take_runtime_error)() = nullptr;

  // `call` with its values, as in "cuMemMap(2097152 bytes at 0x7f00)".
  [[noreturn]] void fail(cu::Result result, const std::string& call) const;
  const std::string& library() const { return library_; }

 private:
  explicit CudaDriver(const std::string& library);
  std::string library_;
};

}  // namespace waterflow
