// A stand-in for libcuda.so.1: the functions that waterflow looks up, over memory of the host. It keeps books, refuses
// what the driver would refuse, records every call, and can be told to fail or to have little memory.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_STARTED = 3, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_READY = 600,
              IN_CAPTURE = 900, SPOILED = 901;
constexpr size_t GRANULE = size_t{2} << 20;
constexpr int DEVICES = 2;

struct Prop {
  int type, handle_types, location_type, location_id;
  void* windows_only;
  unsigned char flags[8];
};
struct AccessDesc {
  int location_type, location_id, flags;
};
struct Physical {
  int file;
  size_t bytes;
  int mapped = 0;
  bool released = false;
};
struct Mapping {
  size_t bytes;
  uint64_t handle;
  bool accessible = false;
};
struct Stream {
  unsigned long long id;
  int64_t issued = 0;
  bool stalled = false;
  std::map<int64_t, std::set<std::pair<uint64_t, int64_t>>> waits =
      {};  // by position: (stream, position) that come before
};
struct Event {
  uint64_t stream = 0;
  int64_t position = -1;  // never recorded
};

struct Node {
  void (*function)(void*);
  void* data;
};
struct Capture {
  std::thread::id thread;
  int mode;
  bool spoiled = false;
  std::vector<Node> nodes = {};
};

std::mutex lock;
bool started = false;
size_t total = size_t{1} << 30, used = 0;
uint64_t next_handle = 0x1000;
unsigned long long next_stream_id = 1;
int retained[DEVICES];
std::map<uint64_t, size_t> reservations, plain;
std::map<uint64_t, Physical> physical;
std::map<uint64_t, Mapping> mappings;
std::map<uint64_t, Stream> streams;
std::map<uint64_t, Event> events;
std::map<uint64_t, Capture> captures;  // by stream
std::map<uint64_t, std::vector<Node>> graphs, executables;
std::map<std::string, int64_t> counts;
std::string calls, failing;
int64_t failing_at = 0;
int failing_with = 0;
int64_t stream_handle_shift = 0;  // 0: handles are fresh; otherwise the last destroyed one comes back
uint64_t last_destroyed = 0;
thread_local uint64_t context = 0;
thread_local int capture_mode = 0;  // 0: global, 1: of the thread, 2: relaxed

int called(const char* name, const std::string& with = {}) {
  calls += std::string(name) + "(" + with + ")\n";
  const int64_t nth = ++counts[name];
  if (failing == name && nth == failing_at) return failing_with;
  return OK;
}

std::string text(uint64_t number) { return std::to_string(number); }

#define CALL(...)                          \
  std::lock_guard<std::mutex> guard(lock); \
  if (!started) return NOT_STARTED;        \
  if (const int failed = called(__VA_ARGS__)) return failed;
#define NEEDS_CONTEXT \
  if (context == 0) return NO_CONTEXT;

// A call that a capture cannot stand: it fails, and the capture with it.
bool spoils() {
  bool any = false;
  for (auto& [stream, capture] : captures) {
    const bool mine = capture.thread == std::this_thread::get_id();
    if (capture_mode == 2 || (mine ? capture.mode == 2 : capture.mode != 0 || capture_mode != 0)) continue;
    any = capture.spoiled = true;
  }
  return any;
}
#define NOT_IN_CAPTURE \
  if (spoils()) return IN_CAPTURE;
// Nobody but the capturing thread may know of a stream that is captured.
#define NOT_CAPTURED(stream)                                                                     \
  if (auto found = captures.find(reinterpret_cast<uint64_t>(stream)); found != captures.end()) { \
    found->second.spoiled = true;                                                                \
    return IN_CAPTURE;                                                                           \
  }

Stream* stream_of(void* handle) {
  auto found = streams.find(reinterpret_cast<uint64_t>(handle));
  if (found == streams.end() && handle == nullptr) found = streams.emplace(0, Stream{next_stream_id++}).first;
  return found == streams.end() ? nullptr : &found->second;
}

bool done(uint64_t stream, int64_t position) {
  auto found = streams.find(stream);
  if (found == streams.end()) return true;  // destroyed: the driver finishes its work
  if (found->second.stalled) return false;
  for (const auto& [at, before] : found->second.waits) {
    if (at > position) break;
    for (const auto& [other, until] : before) {
      if (!done(other, until)) return false;
    }
  }
  return true;
}

bool reserved(uint64_t at, size_t bytes) {
  auto found = reservations.upper_bound(at);
  if (found == reservations.begin()) return false;
  --found;
  return at >= found->first && at + bytes <= found->first + found->second;
}

bool any_mapped(uint64_t at, size_t bytes) {
  auto next = mappings.lower_bound(at);
  if (next != mappings.end() && next->first < at + bytes) return true;
  return next != mappings.begin() && (--next)->first + next->second.bytes > at;
}

// Whether whole mappings, side by side, make up exactly these bytes.
bool whole_mappings(uint64_t at, size_t bytes) {
  uint64_t covered = at;
  for (auto next = mappings.find(at); next != mappings.end() && next->first == covered && covered < at + bytes;
       ++next) {
    covered += next->second.bytes;
  }
  return covered == at + bytes;
}

void drop_if_unused(uint64_t handle) {
  Physical& page = physical.at(handle);
  if (!page.released || page.mapped > 0) return;
  used -= page.bytes;
  close(page.file);
  physical.erase(handle);
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int cuInit(unsigned) {
  std::lock_guard<std::mutex> guard(lock);
  started = true;
  return called("cuInit");
}
FAKE int cuGetErrorString(int error, const char** out) {
  *out = error == NO_MEMORY ? "out of memory" : error == INVALID ? "invalid argument" : "some error";
  return OK;
}
FAKE int cuGetErrorName(int error, const char** out) {
  *out = error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
  return OK;
}
FAKE int cuDeviceGetCount(int* count) {
  CALL("cuDeviceGetCount");
  return *count = DEVICES, OK;
}
FAKE int cuDeviceGet(int* device, int index) {
  CALL("cuDeviceGet", text(index));
  if (index < 0 || index >= DEVICES) return 101;
  return *device = index, OK;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int) {
  CALL("cuDeviceGetAttribute", text(attribute));
  return *value = 1, OK;
}
FAKE int cuDeviceTotalMem_v2(size_t* bytes, int) {
  CALL("cuDeviceTotalMem");
  return *bytes = total, OK;
}
FAKE int cuDevicePrimaryCtxRetain(void** made, int device) {
  CALL("cuDevicePrimaryCtxRetain", text(device));
  ++retained[device];
  *made = reinterpret_cast<void*>(static_cast<uintptr_t>(0xc0 + device));
  return OK;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int device) {
  CALL("cuDevicePrimaryCtxRelease", text(device));
  return retained[device]-- > 0 ? OK : NO_CONTEXT;
}
FAKE int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return *flags = 0, *active = retained[device] > 0, OK;
}
FAKE int cuCtxGetCurrent(void** out) { return *out = reinterpret_cast<void*>(context), OK; }
FAKE int cuCtxSetCurrent(void* made) { return context = reinterpret_cast<uint64_t>(made), OK; }
FAKE int cuCtxSynchronize() {
  CALL("cuCtxSynchronize");
  NOT_IN_CAPTURE
  NEEDS_CONTEXT
  for (auto& [id, stream] : streams) stream.stalled = false;
  return OK;
}
FAKE int cuMemGetInfo_v2(size_t* free, size_t* all) {
  CALL("cuMemGetInfo");
  NEEDS_CONTEXT
  return *free = total - used, *all = total, OK;
}
FAKE int cuMemGetAllocationGranularity(size_t* bytes, const Prop* prop, int) {
  CALL("cuMemGetAllocationGranularity");
  if (prop->type != 1 || prop->location_type != 1) return INVALID;
  return *bytes = GRANULE, OK;
}
FAKE int cuMemAddressReserve(unsigned long long* at, size_t bytes, size_t, unsigned long long,
                             unsigned long long flags) {
  CALL("cuMemAddressReserve", text(bytes));
  if (bytes == 0 || bytes % GRANULE != 0 || flags != 0) return INVALID;
  void* raw = mmap(nullptr, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NO_MEMORY;
  const auto begin = reinterpret_cast<uint64_t>(raw), base = (begin + GRANULE - 1) / GRANULE * GRANULE;
  if (base > begin) munmap(raw, base - begin);
  if (begin + GRANULE > base) munmap(reinterpret_cast<void*>(base + bytes), begin + GRANULE - base);
  reservations.emplace(base, bytes);
  *at = base;
  return OK;
}
FAKE int cuMemAddressFree(unsigned long long at, size_t bytes) {
  CALL("cuMemAddressFree", text(bytes));
  auto found = reservations.find(at);
  if (found == reservations.end() || found->second != bytes || any_mapped(at, bytes)) return INVALID;
  munmap(reinterpret_cast<void*>(at), bytes);
  reservations.erase(found);
  return OK;
}
FAKE int cuMemCreate(unsigned long long* handle, size_t bytes, const Prop* prop, unsigned long long flags) {
  CALL("cuMemCreate", text(bytes));
  NOT_IN_CAPTURE
  if (bytes == 0 || bytes % GRANULE != 0 || flags != 0) return INVALID;
  if (prop->type != 1 || prop->location_type != 1 || prop->location_id >= DEVICES) return INVALID;
  if (bytes > total - used) return NO_MEMORY;
  const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return NO_MEMORY;
  used += bytes;
  *handle = next_handle++;
  physical.emplace(*handle, Physical{file, bytes});
  return OK;
}
FAKE int cuMemRelease(unsigned long long handle) {
  CALL("cuMemRelease", text(handle));
  auto found = physical.find(handle);
  if (found == physical.end() || found->second.released) return INVALID;
  found->second.released = true;
  drop_if_unused(handle);
  return OK;
}
FAKE int cuMemMap(unsigned long long at, size_t bytes, size_t offset, unsigned long long handle,
                  unsigned long long flags) {
  CALL("cuMemMap", text(bytes));
  NOT_IN_CAPTURE
  auto found = physical.find(handle);
  if (found == physical.end() || found->second.released || offset != 0 || flags != 0) return INVALID;
  if (bytes != found->second.bytes || at % GRANULE != 0 || !reserved(at, bytes) || any_mapped(at, bytes))
    return INVALID;
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0);
  ++found->second.mapped;
  mappings.emplace(at, Mapping{bytes, handle});
  return OK;
}
FAKE int cuMemUnmap(unsigned long long at, size_t bytes) {
  CALL("cuMemUnmap", text(bytes));
  NOT_IN_CAPTURE
  if (!whole_mappings(at, bytes)) return INVALID;
  for (auto next = mappings.find(at); next != mappings.end() && next->first < at + bytes;) {
    mmap(reinterpret_cast<void*>(next->first), next->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    --physical.at(next->second.handle).mapped;
    drop_if_unused(next->second.handle);
    next = mappings.erase(next);
  }
  return OK;
}
FAKE int cuMemSetAccess(unsigned long long at, size_t bytes, const AccessDesc* access, size_t count) {
  CALL("cuMemSetAccess", text(bytes));
  if (count != 1 || access->location_type != 1 || access->flags != 3 || !whole_mappings(at, bytes)) return INVALID;
  for (auto next = mappings.find(at); next != mappings.end() && next->first < at + bytes; ++next) {
    next->second.accessible = true;
  }
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0 ? OK : INVALID;
}
FAKE int cuMemAlloc_v2(unsigned long long* at, size_t bytes) {
  CALL("cuMemAlloc", text(bytes));
  NOT_IN_CAPTURE
  NEEDS_CONTEXT
  if (bytes == 0) return INVALID;
  if (bytes > total - used) return NO_MEMORY;
  used += bytes;
  *at = reinterpret_cast<uint64_t>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  plain.emplace(*at, bytes);
  return OK;
}
FAKE int cuMemFree_v2(unsigned long long at) {
  CALL("cuMemFree");
  NOT_IN_CAPTURE
  NEEDS_CONTEXT
  auto found = plain.find(at);
  if (found == plain.end()) return INVALID;
  munmap(reinterpret_cast<void*>(at), found->second);
  used -= found->second;
  plain.erase(found);
  return OK;
}
FAKE int cuStreamCreate(void** stream, unsigned flags) {
  CALL("cuStreamCreate", text(flags));
  NEEDS_CONTEXT
  const uint64_t handle = stream_handle_shift && last_destroyed ? last_destroyed : next_handle++;
  last_destroyed = 0;
  streams.emplace(handle, Stream{next_stream_id++});
  *stream = reinterpret_cast<void*>(handle);
  return OK;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  CALL("cuStreamDestroy");
  if (stream == nullptr || stream_of(stream) == nullptr) return BAD_HANDLE;
  last_destroyed = reinterpret_cast<uint64_t>(stream);
  streams.erase(last_destroyed);
  return OK;
}
FAKE int cuStreamGetId(void* stream, unsigned long long* id) {
  CALL("cuStreamGetId");
  Stream* const on = stream_of(stream);
  return on == nullptr ? BAD_HANDLE : (*id = on->id, OK);
}
FAKE int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  CALL("cuStreamWaitEvent", text(reinterpret_cast<uint64_t>(stream)) + "," + text(reinterpret_cast<uint64_t>(event)));
  NOT_CAPTURED(stream)
  Stream* const on = stream_of(stream);
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (on == nullptr || found == events.end()) return BAD_HANDLE;
  if (flags != 0) return INVALID;
  if (found->second.position >= 0) on->waits[++on->issued].insert({found->second.stream, found->second.position});
  return OK;
}
FAKE int cuEventCreate(void** event, unsigned flags) {
  CALL("cuEventCreate", text(flags));
  NEEDS_CONTEXT
  *event = reinterpret_cast<void*>(next_handle);
  events.emplace(next_handle++, Event{});
  return OK;
}
FAKE int cuEventRecord(void* event, void* stream) {
  CALL("cuEventRecord", text(reinterpret_cast<uint64_t>(event)) + "," + text(reinterpret_cast<uint64_t>(stream)));
  NOT_CAPTURED(stream)
  Stream* const on = stream_of(stream);
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (on == nullptr || found == events.end()) return BAD_HANDLE;
  found->second = Event{reinterpret_cast<uint64_t>(stream), ++on->issued};
  return OK;
}
FAKE int cuEventQuery(void* event) {
  CALL("cuEventQuery");
  NOT_IN_CAPTURE
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (found == events.end()) return BAD_HANDLE;
  return done(found->second.stream, found->second.position) ? OK : NOT_READY;
}
FAKE int cuEventSynchronize(void* event) {
  CALL("cuEventSynchronize");
  NOT_IN_CAPTURE
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (found == events.end()) return BAD_HANDLE;
  // The host would sit there until the work is done; so it is done.
  if (!done(found->second.stream, found->second.position)) {
    for (auto& [id, stream] : streams) stream.stalled = false;
  }
  return OK;
}
FAKE int cuEventDestroy_v2(void* event) {
  CALL("cuEventDestroy");
  return events.erase(reinterpret_cast<uint64_t>(event)) ? OK : BAD_HANDLE;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return OK;
}
FAKE int cuStreamBeginCapture_v2(void* stream, int mode) {
  CALL("cuStreamBeginCapture", text(reinterpret_cast<uint64_t>(stream)) + "," + text(static_cast<uint64_t>(mode)));
  const auto on = reinterpret_cast<uint64_t>(stream);
  if (stream == nullptr || stream_of(stream) == nullptr) return IN_CAPTURE;
  return captures.emplace(on, Capture{std::this_thread::get_id(), mode}).second ? OK : INVALID;
}
FAKE int cuStreamEndCapture(void* stream, void** graph) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = captures.find(reinterpret_cast<uint64_t>(stream));
  if (found == captures.end() || found->second.thread != std::this_thread::get_id()) return INVALID;
  const Capture done = found->second;
  captures.erase(found);  // also where it fails
  *graph = nullptr;
  if (const int failed = called("cuStreamEndCapture", text(reinterpret_cast<uint64_t>(stream)))) return failed;
  if (done.spoiled) return SPOILED;
  *graph = reinterpret_cast<void*>(next_handle);
  graphs.emplace(next_handle++, done.nodes);
  return OK;
}
FAKE int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  CALL("cuGraphInstantiate");
  auto found = graphs.find(reinterpret_cast<uint64_t>(graph));
  if (found == graphs.end() || flags != 0) return INVALID;
  *made = reinterpret_cast<void*>(next_handle);
  executables.emplace(next_handle++, found->second);
  return OK;
}
FAKE int cuGraphLaunch(void* graph, void* stream) {
  std::vector<Node> nodes;
  {
    CALL("cuGraphLaunch", text(reinterpret_cast<uint64_t>(graph)) + "," + text(reinterpret_cast<uint64_t>(stream)));
    NOT_CAPTURED(stream)
    auto found = executables.find(reinterpret_cast<uint64_t>(graph));
    if (found == executables.end() || stream_of(stream) == nullptr) return BAD_HANDLE;
    nodes = found->second;
  }
  for (const Node& node : nodes) node.function(node.data);
  return OK;
}
FAKE int cuGraphExecDestroy(void* graph) {
  CALL("cuGraphExecDestroy");
  return executables.erase(reinterpret_cast<uint64_t>(graph)) ? OK : INVALID;
}
FAKE int cuGraphDestroy(void* graph) {
  CALL("cuGraphDestroy");
  return graphs.erase(reinterpret_cast<uint64_t>(graph)) ? OK : INVALID;
}
FAKE int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  {
    CALL("cuLaunchHostFunc");
    if (stream_of(stream) == nullptr) return BAD_HANDLE;
    auto found = captures.find(reinterpret_cast<uint64_t>(stream));
    if (found != captures.end()) return found->second.nodes.push_back({function, data}), OK;
  }
  function(data);
  return OK;
}

// -- what tests ask and tell

FAKE void fake_memory(size_t bytes) { total = bytes; }
FAKE size_t fake_used() { return used; }
FAKE void fake_fail(const char* name, int64_t nth, int code) {
  failing = name;
  failing_at = counts[name] + nth;
  failing_with = code;
}
FAKE int64_t fake_count(const char* name) { return counts[name]; }
FAKE void fake_stall(void* stream, int on) { stream_of(stream)->stalled = on != 0; }
FAKE void fake_reuse_streams(int on) { stream_handle_shift = on; }
FAKE const char* fake_calls() { return calls.c_str(); }
FAKE void fake_forget_calls() { calls.clear(), counts.clear(); }
// What is held: reservations, handles, mappings, own streams, events, plain, contexts, graphs and
// executables, captures; by index.
FAKE int64_t fake_held(int what) {
  const size_t held[] = {reservations.size(),
                         physical.size(),
                         mappings.size(),
                         streams.size() - streams.count(0),
                         events.size(),
                         plain.size(),
                         static_cast<size_t>(retained[0] + retained[1]),
                         graphs.size() + executables.size(),
                         captures.size()};
  return static_cast<int64_t>(held[what]);
}
