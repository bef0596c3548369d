#include <c10/core/CPUAllocator.h>

#include <limits>
#include <mutex>
#include <unordered_map>

#include "meter.h"

namespace waterflow {
namespace {

struct Counted final : c10::Allocator {
  c10::Allocator* inner = nullptr;
  std::mutex lock;
  std::unordered_map<void*, size_t> sizes;
  int64_t current = 0;
  int64_t peak = 0;
  bool installed = false;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t count) const override {
    inner->copy_data(target, source, count);
  }
};

Counted& counted() {
  static auto* allocator = new Counted;  // outlives every block that it handed out
  return *allocator;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  auto& self = counted();
  {
    std::lock_guard<std::mutex> guard(self.lock);
    auto found = self.sizes.find(pointer);
    if (found != self.sizes.end()) {
      self.current -= static_cast<int64_t>(found->second);
      self.sizes.erase(found);
    }
  }
  self.inner->raw_deleter()(pointer);
}

c10::DataPtr Counted::allocate(size_t bytes) {
  auto block = inner->allocate(bytes);
  void* pointer = block.get();
  if (pointer != nullptr && bytes > 0) {
    std::lock_guard<std::mutex> guard(lock);
    sizes[pointer] = bytes;
    current += static_cast<int64_t>(bytes);
    peak = std::max(peak, current);
  }
  block.release_context();
  return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr Counted::raw_deleter() const { return &release; }

}  // namespace

void CountingAllocator::start() {
  auto& self = counted();
  std::lock_guard<std::mutex> guard(self.lock);
  if (!self.installed) {
    self.inner = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&self, std::numeric_limits<uint8_t>::max());
    self.installed = true;
  }
  self.current = self.peak = 0;
  self.sizes.clear();
}

void CountingAllocator::stop() {
  auto& self = counted();
  std::lock_guard<std::mutex> guard(self.lock);
  if (self.installed) c10::SetCPUAllocator(self.inner, std::numeric_limits<uint8_t>::max());
  self.installed = false;
}

void CountingAllocator::reset_peak() {
  auto& self = counted();
  std::lock_guard<std::mutex> guard(self.lock);
  self.peak = self.current;
}

int64_t CountingAllocator::current() { return counted().current; }
int64_t CountingAllocator::peak() { return counted().peak; }

}  // namespace waterflow
