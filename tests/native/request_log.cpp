#include "request_log.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "waterflow/allocator/csrc/stream/stream_allocator.h"

namespace waterflow {
namespace {

using Clock = std::chrono::steady_clock;

double nanoseconds_each(Clock::time_point start, int64_t repeats) {
  const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
  return taken.count() / static_cast<double>(std::max<int64_t>(repeats, 1));
}

int32_t dense(std::unordered_map<int64_t, int32_t>& numbers, int64_t name) {
  return numbers.emplace(name, static_cast<int32_t>(numbers.size())).first->second;
}

}  // namespace

RequestLog::RequestLog(const std::vector<int64_t>& table) {
  if (table.size() % COLUMNS != 0)
    throw UsageError("a request log has rows of " + std::to_string(COLUMNS) + " numbers");
  std::unordered_map<int64_t, int32_t> requests, marks, streams;
  std::unordered_map<int64_t, int64_t> live;  // bytes
  int64_t held = 0;
  for (size_t at = 0; at < table.size(); at += COLUMNS) {
    const int64_t kind = table[at], id = table[at + 1], stream = table[at + 2], bytes = table[at + 3];
    auto wrong = [&](const char* what) {
      throw UsageError("row " + std::to_string(at / COLUMNS) + " of the request log " + what + " " +
                       std::to_string(id));
    };
    if (kind < ROW_REQUEST || kind > ROW_WAIT) wrong("is of an unknown kind, with id");
    Row row{static_cast<RowKind>(kind), 0, 0, bytes};
    if (kind != ROW_RELEASE) row.stream = dense(streams, stream);
    if (kind == ROW_REQUEST) {
      if (bytes < 0) wrong("asks for less than nothing, with id");
      if (requests.count(id) != 0) wrong("makes again the request");
      live[id] = bytes;
      held += bytes;
      peak_ = std::max(peak_, held);
    } else if (kind == ROW_MARK) {
      if (marks.count(id) != 0) wrong("makes again the mark");
    } else if (kind == ROW_WAIT) {
      if (marks.count(id) == 0) wrong("waits for an unknown mark,");
    } else if (live.count(id) == 0) {
      wrong("names what is not held, request");
    }
    row.id = dense(kind == ROW_MARK || kind == ROW_WAIT ? marks : requests, id);
    if (kind == ROW_RELEASE) {
      held -= live[id];
      live.erase(id);
    }
    rows_.push_back(row);
  }
  std::vector<std::pair<int32_t, int64_t>> left;
  for (const auto& [id, bytes] : live) left.emplace_back(requests[id], bytes);
  std::sort(left.begin(), left.end());
  for (const auto& [id, bytes] : left) rows_.push_back({ROW_RELEASE, id, 0, bytes});
  requests_ = static_cast<int32_t>(requests.size());
  marks_ = static_cast<int32_t>(marks.size());
  streams_ = static_cast<int32_t>(streams.size());
}

double RequestLog::replay(StreamAllocator& allocator, Device& device, int64_t repeats,
                          std::vector<StreamId> streams) const {
  const bool own = streams.empty();
  if (!own && streams.size() != static_cast<size_t>(streams_)) {
    throw UsageError("the log has " + std::to_string(streams_) + " streams, and " + std::to_string(streams.size()) +
                     " were given");
  }
  for (int32_t i = 0; own && i < streams_; ++i) {
    streams.push_back(device.add_stream());
    allocator.add_stream(streams.back());
  }
  std::vector<uintptr_t> addresses(static_cast<size_t>(requests_));
  std::vector<Mark> marks(static_cast<size_t>(marks_));
  auto run = [&] {
    for (const Row& row : rows_) {
      const auto id = static_cast<size_t>(row.id);
      const auto stream = [&] { return streams[static_cast<size_t>(row.stream)]; };
      switch (row.kind) {
        case ROW_REQUEST:
          addresses[id] = allocator.allocate(row.bytes, stream());
          break;
        case ROW_RELEASE:
          allocator.release(std::exchange(addresses[id], 0));
          break;
        case ROW_USE:
          allocator.use(addresses[id], stream());
          break;
        case ROW_END_USE:
          allocator.end_use(addresses[id], stream());
          break;
        case ROW_MARK:
          marks[id] = allocator.mark(stream());
          break;
        case ROW_WAIT:
          allocator.wait(stream(), marks[id]);
          break;
      }
    }
  };
  auto leave = [&] {
    for (uintptr_t address : addresses) {
      if (address != 0) allocator.release(address);
    }
    for (StreamId stream : own ? streams : std::vector<StreamId>()) {
      allocator.remove_stream(stream);
      device.remove_stream(stream);
    }
  };
  const auto start = Clock::now();
  try {
    for (int64_t i = 0; i < repeats; ++i) run();
  } catch (...) {
    leave();
    throw;
  }
  const double taken = nanoseconds_each(start, repeats);
  leave();
  return taken;
}

double RequestLog::replay_malloc(int64_t repeats) const {
  std::vector<void*> addresses(static_cast<size_t>(requests_));
  const auto start = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) {
    for (const Row& row : rows_) {
      if (row.kind == ROW_REQUEST) addresses[static_cast<size_t>(row.id)] = std::malloc(static_cast<size_t>(row.bytes));
      if (row.kind == ROW_RELEASE) std::free(addresses[static_cast<size_t>(row.id)]);
    }
  }
  return nanoseconds_each(start, repeats);
}

}  // namespace waterflow
