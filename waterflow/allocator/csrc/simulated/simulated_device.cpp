#include "waterflow/allocator/csrc/simulated/simulated_device.h"

#include <algorithm>
#include <iterator>
#include <sstream>

namespace waterflow {
namespace {

using Guard = std::lock_guard<std::mutex>;

constexpr uintptr_t FIRST_ADDRESS = uintptr_t{1} << 40;

std::string range_text(uintptr_t begin, uintptr_t end) {
  std::ostringstream text;
  text << std::hex << "0x" << begin << " .. 0x" << end << std::dec << " (" << end - begin << " bytes)";
  return text.str();
}

std::string stretch_text(const Stretch& stretch) {
  return "stream " + std::to_string(stretch.stream) + " at tick " + std::to_string(stretch.tick);
}

// The entry of a map of ranges that holds `at`, or its end.
template <class Map>
auto holding(Map& ranges, uintptr_t at) {
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return at < found->second ? found : ranges.end();
}

}  // namespace

SimulatedDevice::SimulatedDevice(int64_t capacity, int64_t granularity)
    : capacity_(capacity), granularity_(granularity), next_address_(FIRST_ADDRESS) {
  if (capacity < 0 || granularity <= 0 || (granularity & (granularity - 1)) != 0) {
    throw std::invalid_argument(
        "a simulated device needs a capacity of at least 0 and a power of two as granularity; " +
        std::to_string(capacity) + " and " + std::to_string(granularity) + " were given");
  }
}

// -- memory

void SimulatedDevice::aligned(uintptr_t at, int64_t bytes) const {
  const auto unit = static_cast<uintptr_t>(granularity_);
  if (bytes <= 0 || static_cast<uintptr_t>(bytes) % unit != 0 || at % unit != 0) {
    throw std::invalid_argument("device memory comes in whole multiples of " + std::to_string(granularity_) +
                                " bytes; " + std::to_string(bytes) + " bytes at " + std::to_string(at) +
                                " were asked for");
  }
}

void SimulatedDevice::within_reserved(uintptr_t at, int64_t bytes) const {
  aligned(at, bytes);
  auto found = holding(reserved_, at);
  if (found == reserved_.end() || at + static_cast<uintptr_t>(bytes) > found->second) {
    throw std::invalid_argument(range_text(at, at + static_cast<uintptr_t>(bytes)) + " is not reserved");
  }
}

uintptr_t SimulatedDevice::reserve(int64_t bytes) {
  Guard guard(lock_);
  aligned(0, bytes);
  const uintptr_t base = next_address_;
  // A gap between ranges, so that a step over an end never lands in the neighbour.
  next_address_ += static_cast<uintptr_t>(bytes) + static_cast<uintptr_t>(granularity_);
  reserved_.emplace(base, base + static_cast<uintptr_t>(bytes));
  return base;
}

void SimulatedDevice::unreserve(uintptr_t base, int64_t bytes) {
  Guard guard(lock_);
  const uintptr_t end = base + static_cast<uintptr_t>(bytes);
  auto found = reserved_.find(base);
  if (found == reserved_.end() || found->second != end) {
    throw std::invalid_argument(range_text(base, end) + " is not a reserved range");
  }
  auto inside = backed_.lower_bound(base);
  if (inside != backed_.end() && inside->first < end) {
    throw std::invalid_argument(range_text(base, end) + " still has memory behind it; shrink it first");
  }
  reserved_.erase(found);
  if (end + static_cast<uintptr_t>(granularity_) == next_address_) next_address_ = base;
}

bool SimulatedDevice::grow(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  uintptr_t begin = at, end = at + static_cast<uintptr_t>(bytes);
  auto next = backed_.lower_bound(begin);
  if ((next != backed_.end() && next->first < end) || holding(backed_, begin) != backed_.end()) {
    throw std::invalid_argument(range_text(begin, end) + " has memory behind it already");
  }
  if (bytes > capacity_ - grown_) return false;
  grown_ += bytes;
  if (next != backed_.end() && next->first == end && holding(reserved_, begin)->second > end) {
    end = next->second;
    next = backed_.erase(next);
  }
  if (next != backed_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    backed_.emplace(begin, end);
  }
  return true;
}

void SimulatedDevice::shrink(uintptr_t at, int64_t bytes) {
  Guard guard(lock_);
  within_reserved(at, bytes);
  const uintptr_t begin = at, end = at + static_cast<uintptr_t>(bytes);
  if (!backed(begin, end)) throw std::invalid_argument(range_text(begin, end) + " has no memory behind it");
  auto pending = [&](const Stretch& stretch) { return this->at(seen_, stretch.stream) < stretch.tick; };
  for (auto it = first_over(begin); it != history_.end() && it->first < end; ++it) {
    auto reads = it->second.reads;
    if (it->second.write) reads.push_back(*it->second.write);
    auto busy = std::find_if(reads.begin(), reads.end(), pending);
    if (busy == reads.end()) continue;
    throw Race("memory is given back while " + stretch_text(*busy) + " may still use " +
               range_text(it->first, it->second.end));
  }
  split(begin);
  split(end);
  history_.erase(history_.lower_bound(begin), history_.lower_bound(end));
  auto found = holding(backed_, begin);
  const uintptr_t old_end = found->second;
  found->second = begin;
  if (found->first == begin) backed_.erase(found);
  if (old_end > end) backed_.emplace(end, old_end);
  grown_ -= bytes;
}

bool SimulatedDevice::backed(uintptr_t begin, uintptr_t end) const {
  auto found = holding(backed_, begin);
  return found != backed_.end() && end <= found->second;
}

// -- order

int64_t SimulatedDevice::at(const Clock& clock, StreamId stream) {
  const auto index = static_cast<size_t>(stream);
  return index < clock.size() ? clock[index] : 0;
}

void SimulatedDevice::join(Clock& clock, const Event& event) {
  clock.resize(std::max({clock.size(), event.others->size(), static_cast<size_t>(event.last.stream) + 1}));
  for (size_t i = 0; i < event.others->size(); ++i) clock[i] = std::max(clock[i], (*event.others)[i]);
  auto& own = clock[static_cast<size_t>(event.last.stream)];
  own = std::max(own, event.last.tick);
}

SimulatedDevice::Stream& SimulatedDevice::live(StreamId stream) {
  if (stream < 0 || static_cast<size_t>(stream) >= streams_.size()) {
    throw std::invalid_argument("there is no stream " + std::to_string(stream));
  }
  auto& found = streams_[static_cast<size_t>(stream)];
  if (found.removed) throw std::invalid_argument("stream " + std::to_string(stream) + " was removed");
  return found;
}

const SimulatedDevice::Event& SimulatedDevice::known(EventId event) const {
  auto found = events_.find(event);
  if (found == events_.end()) {
    throw std::invalid_argument("there is no event " + std::to_string(event) + ", or it was forgotten");
  }
  return found->second;
}

StreamId SimulatedDevice::add_stream() {
  Guard guard(lock_);
  streams_.emplace_back();
  return static_cast<StreamId>(streams_.size()) - 1;
}

void SimulatedDevice::remove_stream(StreamId stream) {
  Guard guard(lock_);
  live(stream).removed = true;
}

EventId SimulatedDevice::record(StreamId stream) {
  Guard guard(lock_);
  auto& self = live(stream);
  events_.emplace(next_event_, Event{{stream, self.tick++}, self.others});
  return next_event_++;
}

void SimulatedDevice::wait(StreamId stream, EventId event) {
  Guard guard(lock_);
  auto& self = live(stream);
  const Event& awaited = known(event);
  if (self.others.use_count() > 1) self.others = std::make_shared<Clock>(*self.others);
  join(*self.others, awaited);
  ++waits_;
}

bool SimulatedDevice::complete(EventId event) {
  Guard guard(lock_);
  const Event& asked = known(event);
  if (at(done_, asked.last.stream) < asked.last.tick) return false;
  join(seen_, asked);
  return true;
}

void SimulatedDevice::synchronize(EventId event) {
  Guard guard(lock_);
  const Event& asked = known(event);
  join(done_, asked);
  join(seen_, asked);
}

void SimulatedDevice::forget(EventId event) {
  Guard guard(lock_);
  known(event);
  events_.erase(event);
}

void SimulatedDevice::advance(EventId event) {
  Guard guard(lock_);
  join(done_, known(event));
}

void SimulatedDevice::advance_stream(StreamId stream) {
  Guard guard(lock_);
  if (stream < 0 || static_cast<size_t>(stream) >= streams_.size()) live(stream);
  const auto& self = streams_[static_cast<size_t>(stream)];
  join(done_, Event{{stream, self.tick - 1}, self.others});
}

void SimulatedDevice::finish_all() {
  Guard guard(lock_);
  done_.resize(streams_.size());
  for (size_t i = 0; i < streams_.size(); ++i) done_[i] = streams_[i].tick - 1;
}

bool SimulatedDevice::before(const Stretch& stretch, StreamId stream) const {
  if (stretch.stream == stream || at(seen_, stretch.stream) >= stretch.tick) return true;
  return at(*streams_[static_cast<size_t>(stream)].others, stretch.stream) >= stretch.tick;
}

// -- accesses

SimulatedDevice::History::iterator SimulatedDevice::first_over(uintptr_t begin) {
  auto found = history_.upper_bound(begin);
  if (found != history_.begin() && std::prev(found)->second.end > begin) --found;
  return found;
}

void SimulatedDevice::split(uintptr_t at) {
  auto found = first_over(at);
  if (found == history_.end() || found->first >= at) return;
  Last upper = found->second;
  found->second.end = at;
  history_.emplace_hint(std::next(found), at, std::move(upper));
}

void SimulatedDevice::must_be_ordered(const Last& last, StreamId stream, bool write, uintptr_t begin,
                                      uintptr_t end) const {
  auto check = [&](const Stretch& earlier, const char* what) {
    if (before(earlier, stream)) return;
    const Stretch later{stream, streams_[static_cast<size_t>(stream)].tick};
    throw Race(stretch_text(later) + (write ? " writes " : " reads ") + range_text(begin, end) +
               " and nothing orders that after " + stretch_text(earlier) + ", which " + what + " it");
  };
  if (last.write) check(*last.write, "wrote");
  if (!write) return;
  for (const auto& read : last.reads) check(read, "read");
}

void SimulatedDevice::note_read(uintptr_t begin, uintptr_t end, Stretch now) {
  split(begin);
  split(end);
  auto it = history_.lower_bound(begin);
  for (uintptr_t at = begin; at < end;) {
    if (it == history_.end() || it->first > at) {
      const uintptr_t gap_end = it == history_.end() ? end : std::min(end, it->first);
      it = history_.emplace_hint(it, at, Last{gap_end, std::nullopt, {}});
    }
    auto& reads = it->second.reads;
    // A stream's earlier read lies before its later one, and so needs no place of its own.
    reads.erase(std::remove_if(reads.begin(), reads.end(), [&](auto& read) { return read.stream == now.stream; }),
                reads.end());
    reads.push_back(now);
    at = it->second.end;
    ++it;
  }
}

void SimulatedDevice::access(StreamId stream, uintptr_t at, int64_t bytes, bool write) {
  Guard guard(lock_);
  auto& self = live(stream);
  if (bytes < 0) throw std::invalid_argument("an access of " + std::to_string(bytes) + " bytes");
  ++accesses_;
  if (bytes == 0) return;
  const uintptr_t end = at + static_cast<uintptr_t>(bytes);
  if (!backed(at, end)) {
    throw std::out_of_range("stream " + std::to_string(stream) + " touches " + range_text(at, end) +
                            ", and there is no memory behind all of it");
  }
  auto first = first_over(at);
  auto past = first;
  for (; past != history_.end() && past->first < end; ++past) {
    must_be_ordered(past->second, stream, write, std::max(at, past->first), std::min(end, past->second.end));
  }
  const Stretch now{stream, self.tick};
  if (!write) return note_read(at, end, now);
  if (first != past && first->first == at && first->second.end == end) {  // the same piece again: the usual case
    first->second.write = now;
    first->second.reads.clear();
    return;
  }
  split(at);
  split(end);
  auto here = history_.erase(history_.lower_bound(at), history_.lower_bound(end));
  history_.emplace_hint(here, at, Last{end, now, {}});
}

// -- questions

int64_t SimulatedDevice::grown() const {
  Guard guard(lock_);
  return grown_;
}

int64_t SimulatedDevice::accesses() const {
  Guard guard(lock_);
  return accesses_;
}

int64_t SimulatedDevice::waits() const {
  Guard guard(lock_);
  return waits_;
}

void SimulatedDevice::check() const {
  Guard guard(lock_);
  auto must = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("simulated device: ") + what);
  };
  int64_t sum = 0;
  uintptr_t last = 0;
  for (const auto& [begin, end] : backed_) {
    must(begin < end && begin >= last, "pieces of memory overlap");
    auto range = holding(reserved_, begin);
    must(range != reserved_.end() && end <= range->second, "memory lies outside of the reserved ranges");
    sum += static_cast<int64_t>(end - begin);
    last = end;
  }
  must(sum == grown_ && grown_ <= capacity_, "the sum of memory is wrong");
  last = 0;
  for (const auto& [begin, entry] : history_) {
    must(begin < entry.end && begin >= last, "accesses overlap");
    must(backed(begin, entry.end), "an access to nothing was noted");
    must(entry.write || !entry.reads.empty(), "a range that nobody touched");
    last = entry.end;
  }
  auto recorded = [&](const Clock& clock) {
    for (size_t i = 0; i < clock.size(); ++i) {
      must(clock[i] >= 0 && (i < streams_.size() ? clock[i] < streams_[i].tick : clock[i] == 0), "a clock runs ahead");
    }
  };
  recorded(done_);
  recorded(seen_);
  for (size_t i = 0; i < seen_.size(); ++i) must(seen_[i] <= at(done_, static_cast<StreamId>(i)), "seen, not done");
  for (const auto& stream : streams_) recorded(*stream.others);
  for (const auto& [id, event] : events_) {
    must(id < next_event_, "an event from the future");
    recorded(*event.others);
  }
}

}  // namespace waterflow
