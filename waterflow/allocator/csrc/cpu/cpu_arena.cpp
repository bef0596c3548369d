#include "waterflow/allocator/csrc/cpu/cpu_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "waterflow/allocator/csrc/planned/arena.h"

namespace waterflow {
namespace {

[[noreturn]] void fail(const std::string& what, int64_t bytes) {
  throw std::runtime_error("cannot " + what + " of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
}

int64_t whole_pages(int64_t bytes) { return (bytes + CpuArena::page() - 1) / CpuArena::page() * CpuArena::page(); }

// Addresses of private memory, given back unless they are taken.
class Addresses {
 public:
  Addresses(int64_t bytes, int protection, const char* what) : bytes_(bytes) {
    base_ = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) fail(what, bytes);
  }
  ~Addresses() {
    if (base_ != MAP_FAILED) munmap(base_, bytes_);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  char* base() const { return static_cast<char*>(base_); }
  void taken() { base_ = MAP_FAILED; }

 private:
  void* base_;
  int64_t bytes_;
};

void discard_pages(char* from, char* to) {
  const auto page = static_cast<uintptr_t>(CpuArena::page());
  const uintptr_t first = (reinterpret_cast<uintptr_t>(from) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(to) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

int64_t CpuArena::page() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
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
    char* const base = placer->base();
    if (placer->any_live()) {  // it could not be left behind before; its mapping keeps the file
      PlannedRanges::keep(std::move(placer), [base, most = most_] { munmap(base, most); });
      continue;
    }
    PlannedRanges::remove(placer.get());
    munmap(base, most_);
  }
  close(file_);
}

std::unique_ptr<Placer> CpuArena::reserve(int32_t end) const {
  Addresses range(most_, PROT_NONE, "reserve addresses for an arena");
  auto made = std::make_unique<Placer>(range.base(), most_, end == 1);
  PlannedRanges::add(made.get());
  range.taken();
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

void CpuArena::detach(int32_t end) {
  Addresses range(most_, PROT_NONE, "reserve addresses for an arena");
  Addresses copy(most_, PROT_READ | PROT_WRITE, "copy what a step left behind, within a range");
  auto fresh = std::make_unique<Placer>(range.base(), most_, end == 1);
  char* const old = placers_[end]->base();
  placers_[end]->each_live([&](char* at, int64_t bytes) { std::memcpy(copy.base() + (at - old), at, bytes); });
  // The copy takes the old addresses in one move: whoever reads there sees the same bytes before and after.
  if (mremap(copy.base(), most_, most_, MREMAP_MAYMOVE | MREMAP_FIXED, old) == MAP_FAILED) fail("move a range", most_);
  copy.taken();
  range.taken();
  auto left = std::exchange(placers_[end], std::move(fresh));
  PlannedRanges::keep(std::move(left), [old, most = most_] { munmap(old, most); }, discard_pages, placers_[end].get());
  map(end);
}

}  // namespace waterflow
