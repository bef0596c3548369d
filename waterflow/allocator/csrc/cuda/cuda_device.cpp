#include "waterflow/allocator/csrc/cuda/cuda_device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "waterflow/allocator/csrc/cuda/captures.h"
#include "waterflow/allocator/csrc/cuda/cuda_driver.h"

namespace waterflow {
namespace {

constexpr const char* DEFAULT_LIBRARY = "libcuda.so.1";

const char* remedy(cu::Result code) {
  if (code == cu::OUT_OF_MEMORY) {
    return "Lower memory= (see what else is on the device with nvidia-smi), or lower the batch size.";
  }
  if (code == cu::DEINITIALIZED) return "The process is ending: close engines before that.";
  if (code == cu::NO_DEVICE) return "No GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'.";
  if (code == 1 || code == 400) return "This is a mistake in waterflow; please report it with this message.";
  if (code == 803 || code == 35) return "The driver is older than CUDA in this torch: update it.";
  if ((code >= 700 && code < 720) || code == 214 || code == 999) {
    return "The device's context is lost: end this process and go on from a checkpoint. The error may come from any "
           "earlier kernel; CUDA_LAUNCH_BLOCKING=1 finds it.";
  }
  if (code >= 900 && code < 910) return "This cannot be done while a CUDA graph is captured: do it before.";
  return "See the CUDA driver's documentation of this error.";
}

}  // namespace

CudaDriver::CudaDriver(const std::string& library) : library_(library) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    throw CudaError(
        "cannot load the CUDA driver " + library + ": " + dlerror() + ". Install NVIDIA's driver, or use device='cpu'.",
        cu::NO_DEVICE);
  }
#define X(member, name, parameters)                                                                            \
  member = reinterpret_cast<cu::Result(*) parameters>(dlsym(opened, name));                                    \
  if (member == nullptr) {                                                                                     \
    throw CudaError("the CUDA driver " + library + " has no " name ". It is older than CUDA 11.4: update it.", \
                    cu::NO_DEVICE);                                                                            \
  }
  WATERFLOW_CUDA_FUNCTIONS(X)
#undef X
  stream_id = reinterpret_cast<decltype(stream_id)>(dlsym(opened, "cuStreamGetId"));
  take_runtime_error = reinterpret_cast<decltype(take_runtime_error)>(dlsym(RTLD_DEFAULT, "cudaGetLastError"));
  if (const auto result = init(0)) fail(result, "cuInit()");
}

const CudaDriver& CudaDriver::load(const std::string& library) {
  static std::mutex lock;
  static auto* loaded = new std::map<std::string, const CudaDriver*>;
  const char* const named = std::getenv("WATERFLOW_CUDA_LIBRARY");
  const std::string name = !library.empty() ? library : named != nullptr && *named ? named : DEFAULT_LIBRARY;
  std::lock_guard<std::mutex> guard(lock);
  const CudaDriver*& driver = (*loaded)[name];
  if (driver == nullptr) driver = new CudaDriver(name);
  return *driver;
}

void CudaDriver::fail(cu::Result result, const std::string& call) const {
  const char *text = nullptr, *name = nullptr;
  error_string(result, &text);
  error_name(result, &name);
  throw CudaError(call + " failed: " + (text ? text : "an error that the driver does not know") + " (" +
                      (name ? name : "unknown") + ", " + std::to_string(result) + "). " + remedy(result),
                  result);
}

namespace {

using Guard = std::lock_guard<std::mutex>;

std::string hex(uintptr_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

std::string range(int64_t bytes, uintptr_t at) { return std::to_string(bytes) + " bytes at " + hex(at); }

}  // namespace

CudaDevice::CudaDevice(const CudaDriver& driver, int index, int64_t capacity)
    : driver_(driver), index_(index), capacity_(capacity) {
  if (capacity < 0)
    throw std::invalid_argument("a device has a capacity of at least 0; got " + std::to_string(capacity));
  int count = 0, supported = 0;
  const std::string which = "device " + std::to_string(index);
  if (const auto result = driver_.device_count(&count)) driver_.fail(result, "cuDeviceGetCount()");
  if (index < 0 || index >= count) {
    throw std::invalid_argument("there is no CUDA " + which + "; the driver sees " + std::to_string(count) +
                                " (see CUDA_VISIBLE_DEVICES)");
  }
  if (const auto result = driver_.device(&ordinal_, index)) driver_.fail(result, "cuDeviceGet(" + which + ")");
  if (const auto result = driver_.device_attribute(&supported, cu::HAS_VIRTUAL_MEMORY, ordinal_)) {
    driver_.fail(result, "cuDeviceGetAttribute(virtual memory, " + which + ")");
  }
  if (!supported) {
    throw CudaError(which +
                        " cannot put memory behind addresses of our choice (CUDA virtual memory management). "
                        "Planned memory needs that; train on torch's own allocator with arenas=False.",
                    cu::NO_DEVICE);
  }
  const auto properties = prop();
  size_t unit = 0, total = 0;
  if (const auto result = driver_.granularity(&unit, &properties, cu::GRANULARITY_MINIMUM)) {
    driver_.fail(result, "cuMemGetAllocationGranularity(" + which + ")");
  }
  granularity_ = static_cast<int64_t>(unit);
  if (const auto result = driver_.device_memory(&total, ordinal_))
    driver_.fail(result, "cuDeviceTotalMem(" + which + ")");
  if (capacity_ == 0) capacity_ = static_cast<int64_t>(total);
  if (const auto result = driver_.retain_context(&context_, ordinal_)) {
    driver_.fail(result, "cuDevicePrimaryCtxRetain(" + which + ")");
  }
}

CudaDevice::~CudaDevice() {
  try {
    finish();
    Current current(*this);
    for (const auto& [id, event] : events_) driver_.destroy_event(event);
    for (const auto event : spare_) driver_.destroy_event(event);
    for (const auto& [id, stream] : streams_) {
      if (stream.own) driver_.destroy_stream(stream.handle);
    }
    for (const auto& [at, piece] : pieces_) {
      driver_.unmap(at, static_cast<size_t>(piece.first));
      driver_.release(piece.second);
    }
    for (const auto& [at, end] : reserved_) driver_.unreserve(at, end - at);
    for (const auto& [at, bytes] : plain_) driver_.free(at);
  } catch (const CudaError&) {
    // The driver has gone already, and everything with it.
  }
  driver_.release_context(ordinal_);
}

cu::AllocationProp CudaDevice::prop() const {
  cu::AllocationProp made;
  made.location.id = ordinal_;
  return made;
}

// -- memory

void CudaDevice::aligned(uintptr_t at, int64_t bytes) const {
  if (bytes > 0 && at % static_cast<uintptr_t>(granularity_) == 0 && bytes % granularity_ == 0) return;
  throw std::invalid_argument(range(bytes, at) + " are no whole multiples of the granularity, " +
                              std::to_string(granularity_));
}

void CudaDevice::within_reserved(uintptr_t at, int64_t bytes) const {
  aligned(at, bytes);
  auto found = reserved_.upper_bound(at);
  if (found != reserved_.begin() && at + static_cast<uintptr_t>(bytes) <= (--found)->second) return;
  throw std::invalid_argument(range(bytes, at) + " do not lie within a reserved range");
}

uintptr_t CudaDevice::reserve(int64_t bytes) {
  aligned(0, bytes);
  cu::Address base = 0;
  Current current(*this);
  const auto result = driver_.reserve(&base, static_cast<size_t>(bytes), 0, 0, 0);
  if (result == cu::OUT_OF_MEMORY) return 0;
  if (result) driver_.fail(result, "cuMemAddressReserve(" + std::to_string(bytes) + " bytes)");
  Guard guard(lock_);
  reserved_.emplace(base, base + static_cast<uintptr_t>(bytes));
  return base;
}

void CudaDevice::unreserve(uintptr_t base, int64_t bytes) {
  Guard guard(lock_);
  auto found = reserved_.find(base);
  if (found == reserved_.end() || found->second != base + static_cast<uintptr_t>(bytes)) {
    throw std::invalid_argument(range(bytes, base) + " are no reserved range");
  }
  const auto piece = pieces_.lower_bound(base);
  if (piece != pieces_.end() && piece->first < found->second) {
    throw std::invalid_argument(range(bytes, base) + " still have memory behind them, at " + hex(piece->first));
  }
  Current current(*this);
  if (const auto result = driver_.unreserve(base, static_cast<size_t>(bytes))) {
    driver_.fail(result, "cuMemAddressFree(" + range(bytes, base) + ")");
  }
  reserved_.erase(found);
}

bool CudaDevice::create(int64_t bytes, cu::Handle* page) {
  const auto properties = prop();
  const auto result = driver_.create(page, static_cast<size_t>(bytes), &properties, 0);
  if (result == cu::OUT_OF_MEMORY) return false;
  if (result) {
    driver_.fail(result, "cuMemCreate(" + std::to_string(bytes) + " bytes on device " + std::to_string(index_) + ")");
  }
  return true;
}

// Takes back what `grow` has put there.
void CudaDevice::undo(uintptr_t from, uintptr_t to) {
  for (auto piece = pieces_.lower_bound(from); piece != pieces_.end() && piece->first < to;) {
    const auto [bytes, handle] = piece->second;
    if (const auto result = driver_.unmap(piece->first, static_cast<size_t>(bytes))) {
      driver_.fail(result, "cuMemUnmap(" + range(bytes, piece->first) + ")");
    }
    if (const auto result = driver_.release(handle))
      driver_.fail(result, "cuMemRelease(" + std::to_string(bytes) + ")");
    grown_ -= bytes;
    piece = pieces_.erase(piece);
  }
}

bool CudaDevice::grow(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  const uintptr_t end = at + static_cast<uintptr_t>(bytes);
  auto next = pieces_.lower_bound(at);
  const bool before = next != pieces_.begin() && std::prev(next)->first + std::prev(next)->second.first > at;
  if (before || (next != pieces_.end() && next->first < end)) {
    throw std::invalid_argument(range(bytes, at) + " have memory behind them already, or a part of them has");
  }
  if (bytes > room_locked()) return false;
  Current current(*this);
  uintptr_t done = at;
  try {
    while (done < end) {
      const auto left = static_cast<int64_t>(end - done);
      const int64_t piece = left >= PIECE && PIECE % granularity_ == 0 ? PIECE : granularity_;
      cu::Handle handle = 0;
      if (!create(piece, &handle)) {
        undo(at, done);
        return false;
      }
      if (const auto result = driver_.map(done, static_cast<size_t>(piece), 0, handle, 0)) {
        driver_.release(handle);
        driver_.fail(result, "cuMemMap(" + range(piece, done) + ")");
      }
      pieces_.emplace(done, std::pair{piece, handle});
      count(grown_, piece);
      done += static_cast<uintptr_t>(piece);
    }
    allow(at, bytes);
  } catch (...) {
    undo(at, done);
    throw;
  }
  return true;
}

void CudaDevice::shrink(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  const uintptr_t end = at + static_cast<uintptr_t>(bytes);
  uintptr_t covered = at;
  for (auto piece = pieces_.find(at); piece != pieces_.end() && piece->first == covered && covered < end; ++piece) {
    covered += static_cast<uintptr_t>(piece->second.first);
  }
  if (covered != end) {
    throw std::invalid_argument(range(bytes, at) +
                                " are not what was grown there, piece by piece; the pieces meet at " + hex(covered));
  }
  Current current(*this);
  undo(at, end);
}

bool CudaDevice::make_page(int64_t bytes, cu::Handle* page) {
  Guard guard(lock_);
  aligned(0, bytes);
  if (bytes > room_locked()) return false;
  Current current(*this);
  if (!create(bytes, page)) return false;
  count(grown_, bytes);
  return true;
}

void CudaDevice::drop_page(cu::Handle page, int64_t bytes) {
  Guard guard(lock_);
  Current current(*this);
  if (const auto result = driver_.release(page)) driver_.fail(result, "cuMemRelease(" + std::to_string(bytes) + ")");
  grown_ -= bytes;
}

void CudaDevice::map_page(uintptr_t at, int64_t bytes, cu::Handle page) {
  Current current(*this);
  if (const auto result = driver_.map(at, static_cast<size_t>(bytes), 0, page, 0)) {
    driver_.fail(result, "cuMemMap(" + range(bytes, at) + ")");
  }
}

void CudaDevice::allow(uintptr_t at, int64_t bytes) {
  Current current(*this);
  cu::Access access;
  access.location.id = ordinal_;
  if (const auto result = driver_.set_access(at, static_cast<size_t>(bytes), &access, 1)) {
    driver_.fail(result, "cuMemSetAccess(" + range(bytes, at) + ")");
  }
}

void CudaDevice::unmap(uintptr_t at, int64_t bytes) {
  Current current(*this);
  if (const auto result = driver_.unmap(at, static_cast<size_t>(bytes))) {
    driver_.fail(result, "cuMemUnmap(" + range(bytes, at) + ")");
  }
}

uintptr_t CudaDevice::allocate_plain(int64_t bytes) {
  Current current(*this);
  free_what_may();
  cu::Address at = 0;
  const auto result = driver_.allocate(&at, static_cast<size_t>(bytes));
  if (result == cu::OUT_OF_MEMORY) return 0;
  if (result) driver_.fail(result, "cuMemAlloc(" + std::to_string(bytes) + " bytes)");
  Guard guard(lock_);
  plain_.emplace(at, bytes);
  count(plain_total_, bytes);
  return at;
}

bool CudaDevice::free_plain(uintptr_t at) {
  {
    Guard guard(lock_);
    if (plain_.count(at) == 0) return false;
    to_free_.push_back(at);
  }
  free_what_may();
  return true;
}

void CudaDevice::free_what_may() {
  const BesideCaptures beside(std::try_to_lock);
  if (!beside) return;
  Current current(*this);
  std::unique_lock<std::mutex> guard(lock_);
  while (!to_free_.empty()) {
    const auto at = to_free_.back();
    to_free_.pop_back();
    plain_total_ -= plain_.at(at);
    plain_.erase(at);
    guard.unlock();
    if (const auto result = driver_.free(at)) driver_.fail(result, "cuMemFree(" + hex(at) + ")");
    guard.lock();
  }
}

int64_t CudaDevice::grown() const {
  Guard guard(lock_);
  return grown_;
}

int64_t CudaDevice::peak(bool reset) {
  Guard guard(lock_);
  if (reset) peak_ = grown_ + plain_total_;
  return peak_;
}

void CudaDevice::count(int64_t& kind, int64_t bytes) {
  kind += bytes;
  peak_ = std::max(peak_, grown_ + plain_total_);
}

int64_t CudaDevice::room() const {
  Guard guard(lock_);
  return room_locked();
}

int64_t CudaDevice::room_locked() const {
  const int64_t room = capacity_ - grown_;
  return most_ ? std::min(room, most_(plain_total_) - grown_ - plain_total_) : room;
}

int64_t CudaDevice::plain() const {
  Guard guard(lock_);
  return plain_total_;
}

int64_t CudaDevice::free_memory() const {
  Current current(*this);
  size_t free = 0, total = 0;
  if (const auto result = driver_.memory_info(&free, &total)) driver_.fail(result, "cuMemGetInfo()");
  return static_cast<int64_t>(free);
}

// Streams and events of a GPU.

using Guard = std::lock_guard<std::mutex>;

cu::Stream CudaDevice::handle_of(StreamId stream) const {
  auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second.handle;
  throw std::invalid_argument("stream " + std::to_string(stream) +
                              (stream >= 0 && stream < next_stream_ ? " was removed" : " does not exist"));
}

cu::Event CudaDevice::handle_of_event(EventId event) const {
  auto found = events_.find(event);
  if (found != events_.end()) return found->second;
  throw std::invalid_argument("there is no event " + std::to_string(event) + ", or it was forgotten");
}

cu::Stream CudaDevice::make_stream() const {
  Current current(*this);
  cu::Stream handle = nullptr;
  if (const auto result = driver_.create_stream(&handle, cu::NON_BLOCKING)) driver_.fail(result, "cuStreamCreate()");
  return handle;
}

StreamId CudaDevice::add_stream() {
  cu::Stream const handle = make_stream();
  Guard guard(lock_);
  streams_.emplace(next_stream_, Stream{handle, true});
  return next_stream_++;
}

CudaDevice::Lent CudaDevice::lend_streams(const std::shared_ptr<CudaDevice>& device, size_t count) {
  std::shared_ptr<std::vector<cu::Stream>> lent(new std::vector<cu::Stream>, [device](auto* given_back) {
    Guard guard(device->lock_);
    device->to_lend_.insert(device->to_lend_.begin(), given_back->begin(), given_back->end());
    delete given_back;
  });
  Guard guard(device->lock_);
  auto& there = device->to_lend_;
  const auto known = there.begin() + static_cast<ptrdiff_t>(std::min(count, there.size()));
  lent->assign(there.begin(), known);
  there.erase(there.begin(), known);
  while (lent->size() < count) lent->push_back(device->make_stream());
  return lent;
}

StreamId CudaDevice::adopt_stream(cu::Stream handle) {
  Current current(*this);
  auto identity = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(handle));
  if (driver_.stream_id != nullptr) {
    if (const auto result = driver_.stream_id(handle, &identity)) driver_.fail(result, "cuStreamGetId()");
  }
  Guard guard(lock_);
  auto found = adopted_.find(identity);
  if (found != adopted_.end()) return found->second;
  streams_.emplace(next_stream_, Stream{handle, false, identity});
  adopted_.emplace(identity, next_stream_);
  return next_stream_++;
}

void CudaDevice::remove_stream(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  const auto handle = handle_of(stream);
  auto found = streams_.find(stream);
  if (found->second.own) {
    if (const auto result = driver_.destroy_stream(handle)) driver_.fail(result, "cuStreamDestroy()");
  } else {
    adopted_.erase(found->second.identity);
  }
  streams_.erase(found);
}

EventId CudaDevice::record(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  return record_locked(stream);
}

EventId CudaDevice::record_locked(StreamId stream) {
  const auto on = handle_of(stream);
  cu::Event event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (const auto result = driver_.create_event(&event, cu::WITHOUT_TIMING)) {
    driver_.fail(result, "cuEventCreate()");
  }
  if (const auto result = driver_.record_event(event, on)) {
    spare_.push_back(event);
    driver_.fail(result, "cuEventRecord(stream " + std::to_string(stream) + ")");
  }
  events_.emplace(next_event_, event);
  return next_event_++;
}

void CudaDevice::wait(StreamId stream, EventId event) {
  Current current(*this);
  Guard guard(lock_);
  const auto on = handle_of(stream);
  if (const auto result = driver_.wait_event(on, handle_of_event(event), 0)) {
    driver_.fail(result,
                 "cuStreamWaitEvent(stream " + std::to_string(stream) + ", event " + std::to_string(event) + ")");
  }
}

bool CudaDevice::complete(EventId event) {
  Current current(*this);
  Guard guard(lock_);
  const auto result = driver_.query_event(handle_of_event(event));
  if (result == cu::NOT_READY) return false;
  if (result) driver_.fail(result, "cuEventQuery(event " + std::to_string(event) + ")");
  return true;
}

void CudaDevice::synchronize(EventId event) {
  Current current(*this);
  cu::Event handle = nullptr;
  {
    Guard guard(lock_);
    handle = handle_of_event(event);
  }
  if (const auto result = driver_.synchronize_event(handle)) {
    driver_.fail(result, "cuEventSynchronize(event " + std::to_string(event) + ")");
  }
}

void CudaDevice::forget(EventId event) {
  Guard guard(lock_);
  spare_.push_back(handle_of_event(event));
  events_.erase(event);
}

void CudaDevice::synchronize_all() {
  Current current(*this);
  if (const auto result = driver_.synchronize_context()) driver_.fail(result, "cuCtxSynchronize()");
}

void CudaDevice::finish() {
  Current current(*this);
  std::vector<EventId> behind;
  {
    Guard guard(lock_);
    for (const auto& [id, stream] : streams_) {
      int capturing = 0;
      const auto refused = driver_.is_capturing(stream.handle, &capturing);  // one that its owner has destroyed
      if (!refused && !capturing) behind.push_back(record_locked(id));
    }
  }
  for (const EventId event : behind) {
    synchronize(event);
    forget(event);
  }
}

// Graphs of a GPU: what is issued once, and launched again as a whole.

using Guard = std::lock_guard<std::mutex>;

void CudaDevice::begin_capture(StreamId stream) {
  Current current(*this);
  Guard guard(lock_);
  if (const auto result = driver_.begin_capture(handle_of(stream), cu::CAPTURE_THREAD_LOCAL)) {
    driver_.fail(result, "cuStreamBeginCapture(stream " + std::to_string(stream) + ")");
  }
}

cu::Executable CudaDevice::end_capture(StreamId stream) {
  Current current(*this);
  cu::Graph graph = nullptr;
  cu::Executable made = nullptr;
  {
    Guard guard(lock_);
    if (const auto result = driver_.end_capture(handle_of(stream), &graph)) {
      if (graph != nullptr) driver_.destroy_graph(graph);
      driver_.fail(result, "cuStreamEndCapture(stream " + std::to_string(stream) + ")");
    }
  }
  const auto result = driver_.instantiate(&made, graph, 0);
  driver_.destroy_graph(graph);
  if (result) driver_.fail(result, "cuGraphInstantiate()");
  return made;
}

bool CudaDevice::abandon_capture(StreamId stream) noexcept {
  try {
    Current current(*this);
    Guard guard(lock_);
    cu::Graph graph = nullptr;
    const auto result = driver_.end_capture(handle_of(stream), &graph);
    if (graph != nullptr) driver_.destroy_graph(graph);
    return result != cu::SUCCESS;
  } catch (const std::exception&) {
    return false;  // the context is lost or gone, and the capture with it
  }
}

void CudaDevice::launch(cu::Executable graph, StreamId stream) {
  Current current(*this);
  cu::Stream on = nullptr;
  {
    Guard guard(lock_);
    on = handle_of(stream);
  }
  if (const auto result = driver_.launch_graph(graph, on)) {
    driver_.fail(result, "cuGraphLaunch(stream " + std::to_string(stream) + ")");
  }
}

void CudaDevice::destroy(cu::Executable graph) noexcept {
  try {
    Current current(*this);
    driver_.destroy_executable(graph);
  } catch (const std::exception&) {
    // The context is lost or gone, and the graph with it.
  }
}

void CudaDevice::launch_host(StreamId stream, cu::HostFunction function, void* data) {
  Current current(*this);
  cu::Stream on = nullptr;
  {
    Guard guard(lock_);
    on = handle_of(stream);
  }
  if (const auto result = driver_.launch_host(on, function, data)) {
    driver_.fail(result, "cuLaunchHostFunc(stream " + std::to_string(stream) + ")");
  }
}

}  // namespace waterflow
