#include "fuzz.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "waterflow/allocator/csrc/cpu/cpu_device.h"
#include "waterflow/allocator/csrc/simulated/simulated_device.h"
#include "request_log.h"

namespace waterflow {
namespace {

using Guard = std::lock_guard<std::mutex>;

// Found by a check of this file; those of devices and of the allocator have types of their own.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where a block's content is written and read: all of a small one; of a large one its ends, and a word per page at
// addresses that other blocks over the same bytes would take, too.
template <class Visit>
void each_word(uintptr_t at, int64_t bytes, Visit&& visit) {
  constexpr int64_t SMALL = 16 << 10, END = 256, STEP = 4096;
  const uintptr_t end = at + static_cast<uintptr_t>(bytes) / 8 * 8;
  const bool small = bytes <= SMALL;
  const uintptr_t first_end = small ? end : at + END;
  for (uintptr_t word = at; word < first_end; word += 8) visit(word);
  if (small) return;
  for (uintptr_t word = (first_end + STEP - 1) / STEP * STEP; word < end - END; word += STEP) visit(word);
  for (uintptr_t word = end - END; word < end; word += 8) visit(word);
}

uint64_t content(uintptr_t word, int64_t id) { return (word ^ static_cast<uint64_t>(id)) * 0x9E3779B97F4A7C15u; }

struct Block {
  uintptr_t address = 0;  // 0: not held
  int64_t bytes = 0;
  StreamId stream = -1;
  std::vector<StreamId> users;  // that read it still; its own stream first
};

class Run {
 public:
  Run(const std::vector<int64_t>& table, const FuzzSetup& setup);
  FuzzResult go();

 private:
  void thread(int32_t number);
  void row(int32_t thread, int64_t index);
  int32_t thread_of(const int64_t* row) const;
  void request(Block& block, int64_t id, StreamId stream, int64_t bytes);
  void release(Block& block, int64_t id);
  void use(Block& block, int64_t id, StreamId stream);
  void renew(size_t stream);
  void touch(const Block& block, int64_t id, StreamId stream, bool write);
  void claim(uintptr_t address, int64_t bytes);
  bool gone(StreamId stream) const { return gone_.count(stream) != 0; }
  void failed(int64_t row, const std::string& what);

  const std::vector<int64_t>& table_;
  const FuzzSetup setup_;
  std::shared_ptr<SimulatedDevice> simulated_;
  std::shared_ptr<CpuDevice> cpu_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<StreamAllocator> allocator_;
  std::vector<StreamId> streams_;
  std::set<StreamId> gone_;  // changes in runs with one thread alone
  std::vector<Block> blocks_;
  std::vector<int32_t> owner_;  // the thread of a block
  std::vector<std::atomic<Mark>> marks_;
  std::mutex lock_;  // around what follows
  std::map<uintptr_t, uintptr_t> held_;
  FuzzResult result_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> done_{0}, checks_{0};
};

Run::Run(const std::vector<int64_t>& table, const FuzzSetup& setup) : table_(table), setup_(setup) {
  int64_t most = 0;
  if (table.size() % COLUMNS != 0) throw UsageError("a table has rows of " + std::to_string(COLUMNS) + " numbers");
  for (size_t at = 0; at < table.size(); at += COLUMNS) {
    most = std::max(most, table[at + 1]);
    if (table[at + 1] < 0 || table[at + 2] < 0 || table[at + 2] >= setup.streams) {
      throw UsageError("row " + std::to_string(at / COLUMNS) + " names a stream or an id that cannot be");
    }
  }
  if (setup.simulated) {
    device_ = simulated_ = std::make_shared<SimulatedDevice>(setup.capacity);
  } else {
    device_ = cpu_ = std::make_shared<CpuDevice>(setup.capacity, Stalls{setup.seed, setup.stall_share, setup.stall_us});
  }
  AllocatorOptions options;
  options.limit = setup.capacity;
  options.medium_segment = options.small_segment;  // many segments, so that pieces must be put together
  options.alignment = setup.alignment;
  options.fault = setup.fault;
  allocator_ = std::make_unique<StreamAllocator>(device_, options);
  for (int32_t i = 0; i < setup.streams; ++i) {
    streams_.push_back(device_->add_stream());
    allocator_->add_stream(streams_.back());
  }
  blocks_.resize(static_cast<size_t>(most) + 1);
  owner_.resize(blocks_.size());
  marks_ = std::vector<std::atomic<Mark>>(blocks_.size());
  for (auto& mark : marks_) mark = -1;
  for (size_t at = 0; at < table.size(); at += COLUMNS) {
    if (table[at] != FUZZ_REQUEST) continue;
    owner_[static_cast<size_t>(table[at + 1])] = static_cast<int32_t>(table[at + 2]) % setup.threads;
  }
}

void Run::failed(int64_t row, const std::string& what) {
  Guard guard(lock_);
  stop_ = true;
  if (!result_.error.empty()) return;
  result_.error = what;
  result_.row = row;
}

// Work that reads or writes a block: its order is checked on a simulated device, its content on a real one.
void Run::touch(const Block& block, int64_t id, StreamId stream, bool write) {
  if (gone(stream) || !setup_.checked) return;
  if (simulated_) {
    simulated_->access(stream, block.address, block.bytes, write);
    ++checks_;
    return;
  }
  cpu_->enqueue(stream, [this, id, stream, write, at = block.address, bytes = block.bytes] {
    int64_t wrong = 0;
    each_word(at, bytes, [&](uintptr_t word) {
      auto* place = reinterpret_cast<uint64_t*>(word);
      if (write) {
        *place = content(word, id);
      } else {
        wrong += *place != content(word, id);
      }
    });
    if (!write) ++checks_;
    if (wrong == 0) return;
    failed(-1, "stream " + std::to_string(stream) + " finds " + std::to_string(wrong) + " words of block " +
                   std::to_string(id) + " overwritten");
  });
}

void Run::claim(uintptr_t address, int64_t bytes) {
  if (!setup_.checked) return;
  if (address % static_cast<uintptr_t>(setup_.alignment) != 0) throw Wrong("an address is not aligned");
  Guard guard(lock_);
  auto after = held_.upper_bound(address);
  const bool reaches = after != held_.end() && address + static_cast<uintptr_t>(bytes) > after->first;
  const bool reached = after != held_.begin() && std::prev(after)->second > address;
  if (reaches || reached) throw Wrong("two blocks that are held overlap");
  held_.emplace(address, address + static_cast<uintptr_t>(bytes));
}

void Run::request(Block& block, int64_t id, StreamId stream, int64_t bytes) {
  if (block.address != 0) return;
  try {
    block.address = allocator_->allocate(bytes, stream);
  } catch (const OutOfMemory&) {
    return;
  }
  block.bytes = bytes;
  block.stream = stream;
  block.users = {stream};
  claim(block.address, bytes);
  touch(block, id, stream, true);
}

void Run::release(Block& block, int64_t id) {
  if (block.address == 0) return;
  for (StreamId user : block.users) touch(block, id, user, false);
  {
    Guard guard(lock_);
    held_.erase(block.address);
  }
  allocator_->release(std::exchange(block.address, 0));
}

void Run::use(Block& block, int64_t id, StreamId stream) {
  if (block.address == 0 || gone(block.stream) || stream == block.stream) return;
  allocator_->wait(stream, allocator_->mark(block.stream));
  allocator_->use(block.address, stream);
  if (std::find(block.users.begin(), block.users.end(), stream) == block.users.end()) block.users.push_back(stream);
  touch(block, id, stream, false);
}

void Run::renew(size_t stream) {
  if (setup_.threads > 1) return;
  const StreamId old = streams_[stream];
  allocator_->remove_stream(old);
  device_->remove_stream(old);
  gone_.insert(old);
  streams_[stream] = device_->add_stream();
  allocator_->add_stream(streams_[stream]);
}

int32_t Run::thread_of(const int64_t* row) const {
  const bool of_a_block = row[0] <= FUZZ_END_USE;
  return of_a_block ? owner_[static_cast<size_t>(row[1])] : static_cast<int32_t>(row[2]) % setup_.threads;
}

void Run::row(int32_t thread, int64_t index) {
  const int64_t* row = &table_[static_cast<size_t>(index * COLUMNS)];
  if (thread_of(row) != thread) return;
  const auto id = static_cast<size_t>(row[1]), number = static_cast<size_t>(row[2]);
  const StreamId stream = streams_[number];
  Block& block = blocks_[id];
  switch (row[0]) {
    case FUZZ_REQUEST:
      request(block, row[1], stream, row[3]);
      break;
    case FUZZ_RELEASE:
      release(block, row[1]);
      break;
    case FUZZ_USE:
      use(block, row[1], stream);
      break;
    case FUZZ_END_USE: {
      if (block.address == 0) break;
      auto found = std::find(block.users.begin(), block.users.end(), stream);
      if (found == block.users.end()) break;
      allocator_->end_use(block.address, stream);
      block.users.erase(found);
      break;
    }
    case FUZZ_MARK:
      marks_[id] = allocator_->mark(stream);
      break;
    case FUZZ_WAIT:
      if (const Mark mark = marks_[id]; mark >= 0) allocator_->wait(stream, mark);
      break;
    case FUZZ_STALL:
      if (cpu_) cpu_->stall(stream, row[3]);
      break;
    case FUZZ_ADVANCE:
      if (simulated_) simulated_->advance_stream(stream);
      if (cpu_ && row[3] == 1) cpu_->finish(stream);
      break;
    case FUZZ_TRIM:
      allocator_->trim();
      break;
    case FUZZ_RENEW:
      renew(number);
      break;
    default:
      throw UsageError("row " + std::to_string(index) + " is of an unknown kind");
  }
  if (++done_ % setup_.check_every == 0) allocator_->check();
}

void Run::thread(int32_t number) {
  const auto rows = static_cast<int64_t>(table_.size()) / COLUMNS;
  for (int64_t index = 0; index < rows && !stop_; ++index) {
    try {
      row(number, index);
    } catch (const std::exception& error) {
      failed(index, error.what());
    }
  }
}

FuzzResult Run::go() {
  std::vector<std::thread> threads;
  for (int32_t i = 1; i < setup_.threads; ++i) threads.emplace_back([this, i] { thread(i); });
  thread(0);
  for (auto& other : threads) other.join();
  try {
    if (!stop_) {
      for (size_t id = 0; id < blocks_.size(); ++id) release(blocks_[id], static_cast<int64_t>(id));
      allocator_->check();
      if (simulated_) simulated_->check();
    }
  } catch (const std::exception& error) {
    failed(-1, error.what());
  }
  if (cpu_) cpu_->finish_all();
  const auto report = allocator_->report();
  if (result_.error.empty() && report.held != 0) result_.error = "bytes are held that nobody holds";
  result_.operations = done_;
  result_.requests = report.requests + report.tiers[static_cast<size_t>(Tier::fail)];
  result_.tiers = report.tiers;
  result_.waits = report.waits;
  result_.checks = checks_;
  if (result_.error.empty()) {
    allocator_->trim();
    if (simulated_) simulated_->finish_all();
    if (cpu_) cpu_->finish_all();
    allocator_->trim();
    if (allocator_->report().grown != 0) result_.error = "what is free and complete was not given back";
  }
  allocator_.reset();
  return result_;
}

}  // namespace

FuzzResult run_fuzz(const std::vector<int64_t>& table, const FuzzSetup& setup) {
  if (setup.streams < 1 || setup.threads < 1 || setup.check_every < 1) {
    throw UsageError("a random run needs streams, threads, and checks");
  }
  return Run(table, setup).go();
}

}  // namespace waterflow
