// A stand-in for libcuda.so.1: the functions that waterflow looks up, over memory of the host. It keeps books, refuses
// what the driver would refuse, records every call, and can be told to fail, to have little memory, or to be late.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_STARTED = 3, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_READY = 600,
              ILLEGAL_ADDRESS = 700, IN_CAPTURE = 900, SPOILED = 901, UNJOINED = 904, ISOLATED = 905,
              CAPTURED_EVENT = 907;
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
  std::map<uint64_t, std::pair<int64_t, uint64_t>> users =
      {};  // by stream: the last one's position, and at what address
};
struct Mapping {
  size_t bytes;
  uint64_t handle;
  bool accessible = false;
};
// What a stream has to do next: a piece of work, or to wait until another stream has come so far.
struct Piece {
  std::function<void()> run;
  std::vector<std::pair<uint64_t, uint64_t>> touches = {};  // memory, from and to; where that is known
};
using Work = std::shared_ptr<Piece>;
// How far others have come before what is issued on a stream from now on.
using Seen = std::map<uint64_t, int64_t>;
struct Item {
  Work work;
  uint64_t other = 0;
  int64_t until = 0;
};
struct Stream {
  unsigned long long id;
  std::deque<Item> items = {};
  int64_t issued = 0, done = 0;
  bool stalled = false;
  Seen seen = {};
};
struct Event {
  uint64_t stream = 0;
  int64_t position = -1;  // never recorded
  uint64_t capture = 0;   // where it was recorded in one: its origin
  Seen seen = {};
};

struct Capture {
  std::thread::id thread;
  int mode;
  bool spoiled = false;
  std::vector<Work> nodes = {};
  // By stream that takes part, also by way of events: what was issued there, and how much of that the origin waits for.
  std::map<uint64_t, std::pair<int64_t, int64_t>> streams = {};
};

// When streams do their work.
enum class Schedule {
  once,   // as soon as it is issued, unless the stream is stalled or waits
  late,   // when somebody waits for it
  first,  // one stream at once, and what that waits for; the others late
  random  // some of what could be done, of any streams, whenever something is issued
};

std::recursive_mutex lock;  // work may call the driver
bool started = false;
size_t total = size_t{1} << 30, used = 0;
uint64_t next_handle = 0x1000;
unsigned long long next_stream_id = 1;
int retained[DEVICES];
int devices = DEVICES;
std::map<uint64_t, size_t> reservations, plain;
std::map<uint64_t, Physical> physical;
std::map<uint64_t, Mapping> mappings;
std::map<uint64_t, Stream> streams;
std::map<uint64_t, Event> events;
std::map<uint64_t, Capture> captures;  // by stream
std::map<uint64_t, std::vector<Work>> graphs, executables;
std::map<std::string, int64_t> counts;
std::string calls, failing;
int64_t failing_at = 0;
int failing_with = 0;
Schedule schedule = Schedule::once;
int64_t favoured = 0;        // stream, by number, where one comes first
std::minstd_rand numbers;    // of the random schedule
int64_t at_once = 0;         // times that a page was used at two addresses without an order between the two
bool waits_dropped = false;  // a planted fault: streams do not wait for each other
bool keeps_calls = true;
int64_t stream_handle_shift = 0;  // 0: handles are fresh; otherwise the last destroyed one comes back
uint64_t last_destroyed = 0;
thread_local uint64_t context = 0;
thread_local int capture_mode = 0;  // 0: global, 1: of the thread, 2: relaxed

int called(const char* name, const std::string& with = {}) {
  if (keeps_calls) calls += std::string(name) + "(" + with + ")\n";
  const int64_t nth = ++counts[name];
  if (failing == name && nth == failing_at) return failing_with;
  return OK;
}

std::string text(uint64_t number) { return std::to_string(number); }

#define CALL(...)                                    \
  std::lock_guard<std::recursive_mutex> guard(lock); \
  if (!started) return NOT_STARTED;                  \
  if (const int failed = called(__VA_ARGS__)) return failed;
#define NEEDS_CONTEXT \
  if (context == 0) return NO_CONTEXT;

// A call that is not safe beside a capture fails, and the capture with it: where the mode is global for any thread's
// capture, where it is the thread's own for that thread's.
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

// "CUDA Graphs, Prohibited and Unhandled Operations": a broader handle that takes in a capturing stream, as the context
// does, may not be synchronized either. Whoever does so, in whatever mode: the call fails, and each capture with it.
bool spoils_all() {
  for (auto& [stream, capture] : captures) capture.spoiled = true;
  return !captures.empty();
}

Capture* capture_of(void* stream) {
  for (auto& [origin, capture] : captures) {
    if (capture.streams.count(reinterpret_cast<uint64_t>(stream)) > 0) return &capture;
  }
  return nullptr;
}
// A stream that is captured may not be asked or waited for.
#define NOT_CAPTURED(stream)                         \
  if (Capture* const capture = capture_of(stream)) { \
    capture->spoiled = true;                         \
    return IN_CAPTURE;                               \
  }

Stream* stream_of(void* handle) {
  auto found = streams.find(reinterpret_cast<uint64_t>(handle));
  if (found == streams.end() && handle == nullptr) found = streams.emplace(0, Stream{next_stream_id++}).first;
  return found == streams.end() ? nullptr : &found->second;
}

bool done(uint64_t stream, int64_t position) {
  auto found = streams.find(stream);
  return found == streams.end() || found->second.done >= position;
}

void take(Stream& stream) {
  const Item item = std::move(stream.items.front());
  stream.items.pop_front();
  if (item.work) item.work->run();
  ++stream.done;
}

// A stream's work up to a position, with all that it waits for.
void force(uint64_t handle, int64_t position) {
  auto found = streams.find(handle);
  if (found == streams.end()) return;
  Stream& stream = found->second;
  stream.stalled = false;
  while (stream.done < position && !stream.items.empty()) {
    const Item& next = stream.items.front();
    if (!next.work) force(next.other, next.until);
    take(stream);
  }
}

void force_all() {
  for (auto& [handle, stream] : streams) force(handle, stream.issued);
}

void take_at_random() {
  while (numbers() % 4 != 0) {
    auto chosen = std::next(streams.begin(), static_cast<ptrdiff_t>(numbers() % streams.size()));
    Stream& stream = chosen->second;
    if (stream.stalled || stream.items.empty()) continue;
    const Item& next = stream.items.front();
    if (next.work || done(next.other, next.until)) take(stream);
  }
}

// What the schedule lets streams do now.
void go_on() {
  if (schedule == Schedule::random) return take_at_random();
  for (bool any = true; any;) {
    any = false;
    for (auto& [handle, stream] : streams) {
      if (schedule == Schedule::first && static_cast<int64_t>(stream.id) == favoured) force(handle, stream.issued);
      if (schedule != Schedule::once) continue;
      while (!stream.stalled && !stream.items.empty()) {
        const Item& next = stream.items.front();
        if (!next.work && !done(next.other, next.until)) break;
        take(stream);
        any = true;
      }
    }
  }
}

// "Virtual Aliasing Support": what one address of a page is written by is not seen at another one before the kernel
// ends.
void look_at_pages(uint64_t handle, const Piece& piece) {
  Stream& stream = streams.at(handle);
  for (const auto& [from, to] : piece.touches) {
    auto page = mappings.upper_bound(from);
    if (page != mappings.begin()) --page;
    for (; page != mappings.end() && page->first < to; ++page) {
      if (page->first + page->second.bytes <= from) continue;
      auto& users = physical.at(page->second.handle).users;
      for (const auto& [other, use] : users) {
        const auto& [position, address] = use;
        at_once += other != handle && address != page->first && !done(other, position) && stream.seen[other] < position;
      }
      users[handle] = {stream.issued + 1, page->first};
    }
  }
}

void see(Stream& stream, const Seen& seen) {
  for (const auto& [other, position] : seen) stream.seen[other] = std::max(stream.seen[other], position);
}

void issue(Stream& stream, Item item) {
  stream.items.push_back(std::move(item));
  ++stream.issued;
  go_on();
}

// Whoever asks again and again whether work is done sees some of it done.
bool asked(uint64_t handle, int64_t position) {
  if (done(handle, position)) return true;
  if (schedule != Schedule::once) force(handle, streams.at(handle).done + 1);
  return false;
}

// Whether work that is not done uses this memory: a GPU would fault there once it is gone.
bool in_use(uint64_t at, size_t bytes) {
  for (const auto& [handle, stream] : streams) {
    for (const auto& item : stream.items) {
      if (!item.work) continue;
      for (const auto& [from, to] : item.work->touches) {
        if (from < at + bytes && at < to) return true;
      }
    }
  }
  return false;
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

[[maybe_unused]] bool mapped(uint64_t at, size_t bytes) {
  for (uint64_t here = at; here < at + bytes;) {
    auto found = mappings.upper_bound(here);
    if (found == mappings.begin() || (--found)->first + found->second.bytes <= here) return false;
    here = found->first + found->second.bytes;
  }
  return true;
}

void drop_if_unused(uint64_t handle) {
  Physical& page = physical.at(handle);
  if (!page.released || page.mapped > 0) return;
  used -= page.bytes;
  close(page.file);
  physical.erase(handle);
}

}  // namespace

namespace {

uint64_t origin_of(const Capture& capture) {
  for (const auto& [origin, one] : captures) {
    if (&one == &capture) return origin;
  }
  return 0;
}

// Work in a stream's order, or kept where that is captured.
void run_on(void* handle, const Work& work) {
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Capture* const capture = capture_of(handle)) {
      capture->nodes.push_back(work);
      ++capture->streams[reinterpret_cast<uint64_t>(handle)].first;
      return;
    }
    Stream& stream = *stream_of(handle);
    look_at_pages(reinterpret_cast<uint64_t>(handle), *work);
    if (schedule != Schedule::once || stream.stalled || !stream.items.empty()) return issue(stream, {work});
  }
  work->run();  // without the lock: it may wait for others
}

// "once", "late", the number of the stream that comes first, or "random" and a seed.
void take_schedule(const std::string& asked) {
  schedule = asked == "once"                  ? Schedule::once
             : asked == "late"                ? Schedule::late
             : asked.rfind("random ", 0) == 0 ? Schedule::random
                                              : Schedule::first;
  if (schedule == Schedule::first) favoured = std::stoll(asked);
  if (schedule == Schedule::random) numbers.seed(std::stoul(asked.substr(7)));
}

void read_environment() {
  take_schedule(std::getenv("STANDIN_SCHEDULE"));
  waits_dropped = std::getenv("STANDIN_DROPS_WAITS") != nullptr;
  total = size_t{8} << 30;
  devices = 1;
  keeps_calls = false;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int cuInit(unsigned) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (!started && std::getenv("STANDIN_SCHEDULE") != nullptr) read_environment();
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
  return *count = devices, OK;
}
FAKE int cuDeviceGet(int* device, int index) {
  CALL("cuDeviceGet", text(index));
  if (index < 0 || index >= devices) return 101;
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
  if (spoils_all()) return IN_CAPTURE;
  NEEDS_CONTEXT
  return force_all(), OK;
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
  if (in_use(at, bytes)) return ILLEGAL_ADDRESS;
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
  force_all();
  munmap(reinterpret_cast<void*>(at), found->second);
  used -= found->second;
  plain.erase(found);
  return OK;
}
FAKE int cuStreamCreate(void** stream, unsigned flags) {
  CALL("cuStreamCreate", text(flags));
  NEEDS_CONTEXT
  next_handle = (next_handle | 15) + 1;  // as an address is: torch tells streams that it has not made by their last bit
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
  force(last_destroyed, streams.at(last_destroyed).issued);  // the driver would finish it
  streams.erase(last_destroyed);
  return OK;
}
FAKE int cuStreamGetId(void* stream, unsigned long long* id) {
  CALL("cuStreamGetId");
  Stream* const on = stream_of(stream);
  return on == nullptr ? BAD_HANDLE : (*id = on->id, OK);
}
FAKE int cuStreamIsCapturing(void* stream, int* status) {
  CALL("cuStreamIsCapturing");
  if (stream_of(stream) == nullptr) return BAD_HANDLE;
  const Capture* const capture = capture_of(stream);
  return *status = capture == nullptr ? 0 : capture->spoiled ? 2 : 1, OK;
}
FAKE int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  CALL("cuStreamWaitEvent", text(reinterpret_cast<uint64_t>(stream)) + "," + text(reinterpret_cast<uint64_t>(event)));
  Stream* const on = stream_of(stream);
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (on == nullptr || found == events.end()) return BAD_HANDLE;
  if (flags != 0) return INVALID;
  const Event& after = found->second;
  Capture* const capture = capture_of(stream);
  if (after.capture != 0) {  // the waiting stream takes part from here on
    auto begun = captures.find(after.capture);
    if (begun == captures.end() || (capture != nullptr && capture != &begun->second)) return IN_CAPTURE;
    auto& parts = begun->second.streams;
    parts[reinterpret_cast<uint64_t>(stream)];
    auto& [issued, joined] = parts[after.stream];
    if (reinterpret_cast<uint64_t>(stream) == after.capture) joined = std::max(joined, after.position);
    return OK;
  }
  if (capture != nullptr) {  // what is not captured cannot come before what is
    if (after.position < 0) return OK;
    capture->spoiled = true;
    return ISOLATED;
  }
  if (after.position < 0 || waits_dropped) return OK;
  see(*on, after.seen);
  return issue(*on, {nullptr, after.stream, after.position}), OK;
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
  Stream* const on = stream_of(stream);
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (on == nullptr || found == events.end()) return BAD_HANDLE;
  const auto handle = reinterpret_cast<uint64_t>(stream);
  if (Capture* const capture = capture_of(stream)) {
    if (capture->thread != std::this_thread::get_id()) return capture->spoiled = true, IN_CAPTURE;
    found->second = Event{handle, capture->streams[handle].first, origin_of(*capture)};
    return OK;
  }
  issue(*on, {std::make_shared<Piece>([] {})});
  found->second = Event{handle, on->issued, 0, on->seen};
  found->second.seen[handle] = on->issued;
  return OK;
}
FAKE int cuEventQuery(void* event) {
  CALL("cuEventQuery");
  NOT_IN_CAPTURE
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (found == events.end()) return BAD_HANDLE;
  if (found->second.capture != 0) return CAPTURED_EVENT;
  return asked(found->second.stream, found->second.position) ? OK : NOT_READY;
}
FAKE int cuEventSynchronize(void* event) {
  CALL("cuEventSynchronize");
  NOT_IN_CAPTURE
  auto found = events.find(reinterpret_cast<uint64_t>(event));
  if (found == events.end()) return BAD_HANDLE;
  if (found->second.capture != 0) return CAPTURED_EVENT;
  force(found->second.stream, found->second.position);  // the host would sit there until it is done
  return go_on(), OK;
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
  if (capture_of(stream) != nullptr) return INVALID;
  captures[on] = Capture{std::this_thread::get_id(), mode};
  captures[on].streams[on];
  return OK;
}
FAKE int cuStreamEndCapture(void* stream, void** graph) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = captures.find(reinterpret_cast<uint64_t>(stream));
  if (found == captures.end() || found->second.thread != std::this_thread::get_id()) return INVALID;
  const Capture done = found->second;
  captures.erase(found);  // also where it fails
  *graph = nullptr;
  if (const int failed = called("cuStreamEndCapture", text(reinterpret_cast<uint64_t>(stream)))) return failed;
  if (done.spoiled) return SPOILED;
  for (const auto& [part, issued] : done.streams) {
    if (part != reinterpret_cast<uint64_t>(stream) && issued.first > issued.second) return UNJOINED;
  }
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
  std::vector<Work> nodes;
  {
    CALL("cuGraphLaunch", text(reinterpret_cast<uint64_t>(graph)) + "," + text(reinterpret_cast<uint64_t>(stream)));
    NOT_CAPTURED(stream)
    auto found = executables.find(reinterpret_cast<uint64_t>(graph));
    if (found == executables.end() || stream_of(stream) == nullptr) return BAD_HANDLE;
    nodes = found->second;
  }
  for (const auto& node : nodes) run_on(stream, node);
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
  }
  run_on(stream, std::make_shared<Piece>([=] { function(data); }));
  return OK;
}

// -- what tests ask and tell

FAKE int64_t fake_pages_at_once() { return at_once; }
FAKE void fake_schedule(const char* asked) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  take_schedule(asked);
}
FAKE void fake_memory(size_t bytes) { total = bytes; }
FAKE size_t fake_used() { return used; }
FAKE void fake_fail(const char* name, int64_t nth, int code) {
  failing = name;
  failing_at = counts[name] + nth;
  failing_with = code;
}
FAKE int64_t fake_count(const char* name) { return counts[name]; }
FAKE void fake_stall(void* stream, int on) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  stream_of(stream)->stalled = on != 0;
  go_on();
}
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
