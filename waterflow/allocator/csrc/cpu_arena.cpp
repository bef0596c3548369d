#include "cpu_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {
namespace {

[[noreturn]] void fail(const std::string& what, int64_t bytes) {
  throw std::runtime_error("cannot " + what + " of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
}

int64_t whole_pages(int64_t bytes) { return (bytes + CpuArena::page() - 1) / CpuArena::page() * CpuArena::page(); }

// Every range of planned addresses in the process, for releases that know nothing but an address.
struct Ranges {
  static constexpr int32_t kMost = 256;
  std::mutex lock;
  std::atomic<Placer*> entries[kMost] = {};
  std::atomic<int32_t> used{0};  // entries behind are empty
  std::vector<std::unique_ptr<Placer>> stranded;

  void add(Placer* placer) {
    std::lock_guard<std::mutex> guard(lock);
    for (int32_t i = 0; i < kMost; ++i) {
      if (entries[i].load() != nullptr) continue;
      entries[i].store(placer);
      used.store(std::max(used.load(), i + 1));
      return;
    }
    throw std::runtime_error("there are " + std::to_string(kMost) + " ends of arenas in this process already");
  }
  void remove_locked(const Placer* placer) {
    for (auto& entry : entries) {
      if (entry.load() == placer) entry.store(nullptr);
    }
  }
  void remove(const Placer* placer) {
    std::lock_guard<std::mutex> guard(lock);
    remove_locked(placer);
  }
  void sweep_locked() {
    std::erase_if(stranded, [this](const std::unique_ptr<Placer>& placer) {
      if (placer->any_live()) return false;
      remove_locked(placer.get());
      munmap(placer->base(), placer->bytes());
      return true;
    });
  }
};

Ranges& ranges() {
  static auto* made = new Ranges;  // what is held may outlive every engine
  return *made;
}

}  // namespace

int64_t CpuArena::page() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

bool release_planned(void* address) {
  auto& all = ranges();
  for (int32_t i = 0, used = all.used.load(std::memory_order_acquire); i < used; ++i) {
    Placer* const placer = all.entries[i].load(std::memory_order_acquire);
    if (placer != nullptr && placer->contains(address)) return placer->release(address);
  }
  return false;
}

int64_t stranded_bytes() {
  auto& all = ranges();
  std::lock_guard<std::mutex> guard(all.lock);
  all.sweep_locked();
  int64_t total = 0;
  for (const auto& placer : all.stranded) {
    placer->each_live([&](char*, int64_t bytes) { total += bytes; });
  }
  return total;
}

CpuArena::CpuArena(int64_t most) : most_(std::max(page(), whole_pages(most))) {
  file_ = memfd_create("waterflow-arena", MFD_CLOEXEC);
  if (file_ < 0) fail("make an arena", most_);
  try {
    for (int32_t end = 0; end < 2; ++end) placers_[end] = reserve(end);
  } catch (...) {
    let_go();
    throw;
  }
}

CpuArena::~CpuArena() { let_go(); }

void CpuArena::let_go() {
  for (auto& placer : placers_) {
    if (!placer) continue;
    ranges().remove(placer.get());
    munmap(placer->base(), most_);
  }
  close(file_);
}

std::unique_ptr<Placer> CpuArena::reserve(int32_t end) const {
  void* base = mmap(nullptr, most_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) fail("reserve addresses for an arena", most_);
  auto made = std::make_unique<Placer>(static_cast<char*>(base), most_, end == 1);
  try {
    ranges().add(made.get());
  } catch (...) {
    munmap(base, most_);
    throw;
  }
  return made;
}

void CpuArena::map(int32_t end) {
  if (size_ == 0) return;
  char* const base = placers_[end]->base();
  char* const at = end == 0 ? base : base + most_ - size_;
  void* made = mmap(at, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file_, 0);
  if (made == MAP_FAILED) fail("map an arena", size_);
  // A forked worker that wrote here would write into a running step.
  madvise(at, size_, MADV_DONTFORK);
}

void CpuArena::resize(int64_t bytes) {
  const int64_t wanted = std::max<int64_t>(whole_pages(bytes), page());
  if (bytes < 0 || wanted > most_) {
    throw std::invalid_argument("an arena with addresses for " + std::to_string(most_) + " bytes cannot have " +
                                std::to_string(bytes));
  }
  if (wanted == size_) return;
  const int64_t before = std::exchange(size_, wanted);
  // End 1 first lets go of the old pages: none may be behind its addresses that the file does not have any more.
  mmap(placers_[1]->base(), most_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (wanted < before) {
    mmap(placers_[0]->base() + wanted, before - wanted, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  if (ftruncate(file_, wanted) != 0) fail("resize an arena", wanted);
  // The pages that end 0 stands on stay where they are; mapping them once more changes nothing for it.
  map(0);
  map(1);
}

void CpuArena::discard(int32_t end, int64_t from, int64_t to) {
  from = whole_pages(from);
  to = std::min(to, size_) / page() * page();
  if (to <= from) return;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, end == 0 ? from : size_ - to, to - from);
}

void CpuArena::strand(int32_t end) {
  auto fresh = reserve(end);
  char* const old = placers_[end]->base();
  void* made = mmap(nullptr, most_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) fail("copy what a step left behind, within a range", most_);
  auto* const copy = static_cast<char*>(made);
  placers_[end]->each_live([&](char* at, int64_t bytes) { std::memcpy(copy + (at - old), at, bytes); });
  // The copy takes the old addresses in one move: whoever reads there sees the same bytes before and after.
  if (mremap(copy, most_, most_, MREMAP_MAYMOVE | MREMAP_FIXED, old) == MAP_FAILED) fail("move a range", most_);
  {
    auto& all = ranges();
    std::lock_guard<std::mutex> guard(all.lock);
    all.stranded.push_back(std::exchange(placers_[end], std::move(fresh)));
    all.sweep_locked();
  }
  map(end);
}

}  // namespace waterflow
