#include <algorithm>
#include <cmath>
#include <random>

#include "fuzz.h"
#include "request_log.h"

namespace waterflow {
namespace {

struct Block {
  int64_t id, stream, bytes;
};

class Writer {
 public:
  explicit Writer(const FuzzShape& shape) : shape_(shape), random_(shape.seed) {}

  std::vector<int64_t> write() {
    for (int64_t i = 0; static_cast<int64_t>(rows_.size()) < COLUMNS * shape_.rows; ++i) {
      if (i % 120 == 0) wanted_ = chance() < 0.4 ? 0 : shape_.capacity / 100 * (60 + below(60));
      one();
    }
    rows_.resize(static_cast<size_t>(COLUMNS * shape_.rows));
    return std::move(rows_);
  }

 private:
  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }
  double chance() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  int64_t stream() { return below(shape_.streams); }
  void put(int64_t kind, int64_t id, int64_t stream, int64_t number = 0) {
    rows_.insert(rows_.end(), {kind, id, stream, number});
  }

  void one() {
    const double kind = chance();
    if (kind < 0.83) {
      const bool more = held_ < wanted_ ? chance() < 0.85 : chance() < 0.12;
      more || blocks_.empty() ? request() : release();
    } else if (kind < 0.855 && !blocks_.empty()) {
      put(FUZZ_USE, any().id, stream());
    } else if (kind < 0.87 && !blocks_.empty()) {
      put(FUZZ_END_USE, any().id, stream());
    } else if (kind < 0.88) {
      put(FUZZ_MARK, ++marks_, stream());
    } else if (kind < 0.89 && marks_ > 0) {
      put(FUZZ_WAIT, std::max<int64_t>(1, marks_ - below(8)), stream());
    } else if (kind < 0.90) {
      put(FUZZ_STALL, 0, stream(), below(200));
    } else if (kind < 0.94) {
      put(FUZZ_ADVANCE, 0, stream());
    } else if (kind < 0.995) {
      put(FUZZ_TRIM, 0, 0);
    } else if (shape_.renew) {
      put(FUZZ_RENEW, 0, stream());
    }
  }

  const Block& any() { return blocks_[static_cast<size_t>(below(static_cast<int64_t>(blocks_.size())))]; }

  void request() {
    const double log_size = chance() * std::log(static_cast<double>(shape_.largest));
    request(std::max<int64_t>(1, std::llround(std::exp(log_size))));
  }

  void request(int64_t bytes) {
    const Block made{++ids_, stream(), bytes};
    put(FUZZ_REQUEST, made.id, made.stream, made.bytes);
    blocks_.push_back(made);
    held_ += made.bytes;
  }

  void release() {
    const auto at = static_cast<size_t>(below(static_cast<int64_t>(blocks_.size())));
    put(FUZZ_RELEASE, blocks_[at].id, blocks_[at].stream);
    held_ -= blocks_[at].bytes;
    blocks_[at] = blocks_.back();
    blocks_.pop_back();
    if (blocks_.size() >= 4) return;
    const double next = chance();
    if (next < 0.1) give_back();
    // What is free is in many pieces then: they must be put together.
    if (next > 0.6) request(shape_.largest / 4 * (2 + below(3)));
  }

  // Now and then all that is free leaves the device, so that it must grow again.
  void give_back() {
    for (const auto& block : blocks_) put(FUZZ_RELEASE, block.id, block.stream);
    blocks_.clear();
    held_ = 0;
    put(FUZZ_TRIM, 0, 0);
    for (int64_t stream = 0; stream < shape_.streams; ++stream) put(FUZZ_ADVANCE, 0, stream, 1);
    put(FUZZ_STALL, 0, stream(), 200);
    put(FUZZ_TRIM, 0, 0);
  }

  const FuzzShape shape_;
  std::mt19937_64 random_;
  std::vector<int64_t> rows_;
  std::vector<Block> blocks_;
  int64_t held_ = 0, wanted_ = 0, ids_ = 0, marks_ = 0;
};

}  // namespace

std::vector<int64_t> fuzz_table(const FuzzShape& shape) {
  if (shape.rows < 0 || shape.streams < 1 || shape.capacity < 1 || shape.largest < 1) {
    throw UsageError("a random run needs streams, a capacity, and sizes of at least 1");
  }
  return Writer(shape).write();
}

}  // namespace waterflow
