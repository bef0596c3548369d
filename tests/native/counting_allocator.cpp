#include "counting_allocator.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace waterflow {
namespace {

struct Counted final : ChainedAllocator {
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
  };
  std::mutex lock;
  std::unordered_map<void*, Block> blocks;
  int64_t current = 0;
  int64_t peak = 0;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
};

Counted& counted() {
  static auto* allocator = new Counted;  // outlives every block that it handed out
  return *allocator;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  auto& self = counted();
  c10::DataPtr memory;  // given back without the lock
  std::lock_guard<std::mutex> guard(self.lock);
  auto found = self.blocks.find(pointer);
  if (found == self.blocks.end()) return;
  self.current -= found->second.bytes;
  memory = std::move(found->second.memory);
  self.blocks.erase(found);
}

c10::DataPtr Counted::allocate(size_t bytes) {
  auto memory = inner()->allocate(bytes);
  void* const pointer = memory.get();
  if (pointer == nullptr || bytes == 0) return memory;
  std::lock_guard<std::mutex> guard(lock);
  current += static_cast<int64_t>(bytes);
  peak = std::max(peak, current);
  blocks[pointer] = {std::move(memory), static_cast<int64_t>(bytes)};
  return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr Counted::raw_deleter() const { return &release; }

}  // namespace

ChainedAllocator* start_counting() {
  auto& self = counted();
  std::lock_guard<std::mutex> guard(self.lock);
  self.current = self.peak = 0;
  for (auto& [pointer, block] : self.blocks) block.bytes = 0;  // from before: not counted
  return &self;
}

void restart_peak() {
  auto& self = counted();
  std::lock_guard<std::mutex> guard(self.lock);
  self.peak = self.current;
}

int64_t counted_now() { return counted().current; }
int64_t counted_peak() { return counted().peak; }

}  // namespace waterflow
