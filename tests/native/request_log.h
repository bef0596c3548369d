// Requests of a real run as a table, and running them again anywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "waterflow/allocator/csrc/device.h"

namespace waterflow {

class StreamAllocator;

// Rows of four: kind, id, stream, bytes. Ids of requests (releases and uses name them) and of marks (waits name
// them) are numbers of their own. Streams are numbers, too: a replay has streams of its own for them.
constexpr int64_t COLUMNS = 4;
enum RowKind : int64_t { ROW_REQUEST, ROW_RELEASE, ROW_USE, ROW_END_USE, ROW_MARK, ROW_WAIT };

// A log with dense numbers, checked once; can be replayed any number of times.
class RequestLog {
 public:
  // Throws UsageError for a row of an unknown kind, or one that names a request or a mark that is not there.
  explicit RequestLog(const std::vector<int64_t>& table);

  // Replays on a stream allocator; what the log does not release is released at the end. The log's streams are, in the
  // order in which it names them, the given ones; without any, some are added for that and removed after it. Returns
  // nanoseconds per replay.
  double replay(StreamAllocator& allocator, Device& device, int64_t repeats, std::vector<StreamId> streams = {}) const;
  // Requests and releases alone, with malloc and free of the C library.
  double replay_malloc(int64_t repeats) const;

  int64_t requests() const { return requests_; }
  int64_t streams() const { return streams_; }
  int64_t peak() const { return peak_; }  // bytes asked for and not released

 private:
  struct Row {
    RowKind kind;
    int32_t id, stream;
    int64_t bytes;
  };
  std::vector<Row> rows_;
  int32_t requests_ = 0, marks_ = 0, streams_ = 0;
  int64_t peak_ = 0;
};

}  // namespace waterflow
