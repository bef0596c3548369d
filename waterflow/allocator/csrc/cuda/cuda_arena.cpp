#include "waterflow/allocator/csrc/cuda/cuda_arena.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "waterflow/allocator/csrc/planned/arena.h"

namespace waterflow {
namespace {

constexpr int64_t MOST_PAGES = 1024;

int64_t up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

CudaArena::Page::~Page() {
  try {
    device->drop_page(handle, bytes);
  } catch (const CudaError&) {
    // The context is lost or gone, and its memory with it.
  }
}

CudaArena::CudaArena(std::shared_ptr<CudaDevice> device, int64_t most, int64_t page, PlacedIn memory)
    : device_(std::move(device)), memory_(memory), page_(page) {
  const int64_t granule = device_->granularity();
  if (page < 0 || page % granule != 0 || most < 0) {
    throw std::invalid_argument("an arena's pages are multiples of " + std::to_string(granule) +
                                " bytes, and it has none " + "or more of them; got pages of " + std::to_string(page) +
                                " bytes for " + std::to_string(most));
  }
  if (page_ == 0)
    page_ = std::clamp(up((most + MOST_PAGES - 1) / MOST_PAGES, granule), granule, up(LARGEST_PAGE, granule));
  most_ = std::max(page_, up(most, page_));
  reserve(0);
  try {
    reserve(1);
  } catch (...) {
    PlannedRanges::remove(ends_[0].placer.get());
    device_->unreserve(reinterpret_cast<uintptr_t>(ends_[0].placer->base()), most_);
    throw;
  }
}

CudaArena::~CudaArena() {
  for (int32_t end = 0; end < 2; ++end) {
    PlannedRanges::remove(ends_[end].placer.get());
    try {
      unmap(end, 0, static_cast<int64_t>(ends_[end].pages.size()));
      device_->unreserve(reinterpret_cast<uintptr_t>(ends_[end].placer->base()), most_);
    } catch (const CudaError&) {
      // The context is lost or gone, and its memory with it.
    }
  }
}

void CudaArena::reserve(int32_t end) {
  const uintptr_t base = device_->reserve(most_);
  if (base == 0) throw std::runtime_error("the device has no range of " + std::to_string(most_) + " addresses left");
  auto made = std::make_unique<Placer>(reinterpret_cast<char*>(base), most_, end == 1, memory_);
  try {
    PlannedRanges::add(made.get());
  } catch (...) {
    device_->unreserve(base, most_);
    throw;
  }
  ends_[end] = {std::move(made), Pages(static_cast<size_t>(size_ / page_))};
}

uintptr_t CudaArena::address(int32_t end, int64_t index) const {
  const auto base = reinterpret_cast<uintptr_t>(ends_[end].placer->base());
  return base + static_cast<uintptr_t>(end == 0 ? index * page_ : most_ - (index + 1) * page_);
}

// The pages from one index up to, and without, another; those that are not mapped stay so.
void CudaArena::unmap(int32_t end, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; ++i) {
    auto& page = ends_[end].pages[i];
    if (!page) continue;
    device_->unmap(address(end, i), page_);
    page.reset();
  }
}

void CudaArena::allow(int32_t end, int64_t from, int64_t to) {
  if (from < to) device_->allow(address(end, end == 0 ? from : to - 1), (to - from) * page_);
}

void CudaArena::resize(int64_t bytes) {
  const int64_t wanted = std::max(up(bytes, page_), page_);
  if (bytes < 0 || wanted > most_) {
    throw std::invalid_argument("an arena with addresses for " + std::to_string(most_) + " bytes cannot have " +
                                std::to_string(bytes));
  }
  if (wanted == size_) return;
  // Counted from end 1 every page now lies elsewhere.
  unmap(1, 0, size_ / page_);
  if (wanted < size_) unmap(0, wanted / page_, size_ / page_);
  size_ = wanted;
  for (auto& end : ends_) end.pages.resize(static_cast<size_t>(size_ / page_));
}

std::shared_ptr<CudaArena::Page> CudaArena::make() {
  cu::Handle handle = 0;
  if (!device_->make_page(page_, &handle)) return nullptr;
  return std::make_shared<Page>(device_, page_, handle);
}

bool CudaArena::back(int32_t end, int64_t bytes) {
  if (bytes < 0 || bytes > size_) {
    throw std::invalid_argument("an arena of " + std::to_string(size_) + " bytes cannot back " + std::to_string(bytes));
  }
  auto& mine = ends_[end].pages;
  const auto& others = ends_[1 - end].pages;
  const auto count = static_cast<int64_t>(mine.size());
  const int64_t until = up(bytes, page_) / page_;
  int64_t fresh = 0, i = 0;  // pages from `fresh` on have been mapped now, and may not be used yet
  try {
    for (; i < until; ++i) {
      if (mine[i] && !mine[i]->left_behind) {
        allow(end, fresh, i);
        fresh = i + 1;
        continue;
      }
      unmap(end, i, i + 1);
      const auto& other = others[count - 1 - i];
      auto page = other && !other->left_behind ? other : make();
      if (!page) break;
      device_->map_page(address(end, i), page_, page->handle);
      mine[i] = std::move(page);
    }
    allow(end, fresh, i);
  } catch (...) {
    unmap(end, fresh, i);
    throw;
  }
  return i == until;
}

void CudaArena::discard(int32_t end, int64_t from, int64_t to) {
  const int64_t first = up(from, page_) / page_, last = std::min(to, size_) / page_;
  if (last <= first) return;
  const int64_t count = size_ / page_;
  unmap(end, first, last);
  unmap(1 - end, count - last, count - first);
}

// The pages that it lies on go with it; whoever stands at the other end keeps those that both have, for bytes of their
// own, and nobody takes them anew.
void CudaArena::detach(int32_t end) {
  End& mine = ends_[end];
  const auto base = reinterpret_cast<uintptr_t>(mine.placer->base());
  std::vector<char> keeps(mine.pages.size());
  mine.placer->each_live([&](char* at, int64_t bytes) {
    const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) - base), last = begin + bytes - 1;
    const int64_t near = end == 0 ? begin : most_ - 1 - last, far = end == 0 ? last : most_ - 1 - begin;
    for (int64_t i = near / page_; i <= far / page_; ++i) keeps[i] = 1;
  });
  Pages kept;
  std::vector<uintptr_t> at;
  for (size_t i = 0; i < keeps.size(); ++i) {
    if (!mine.pages[i]) continue;
    if (!keeps[i]) {
      unmap(end, static_cast<int64_t>(i), static_cast<int64_t>(i) + 1);
      continue;
    }
    mine.pages[i]->left_behind = true;
    at.push_back(address(end, static_cast<int64_t>(i)));
    kept.push_back(std::move(mine.pages[i]));
  }
  auto old = std::move(mine.placer);
  try {
    reserve(end);
  } catch (...) {
    mine.placer = std::move(old);  // where nothing is mapped but what is kept: the end has no memory any more
    throw;
  }
  PlannedRanges::keep(std::move(old), [device = device_, base, most = most_, page = page_, kept, at]() mutable {
    device->finish();
    for (const auto address : at) device->unmap(address, page);
    kept.clear();
    device->unreserve(base, most);
  });
}

int64_t CudaArena::pages() const {
  std::vector<const Page*> all;
  for (const auto& end : ends_) {
    for (const auto& page : end.pages) {
      if (page) all.push_back(page.get());
    }
  }
  std::sort(all.begin(), all.end());
  return std::unique(all.begin(), all.end()) - all.begin();
}

void CudaArena::check() const {
  const auto count = static_cast<size_t>(size_ / page_);
  for (const auto& end : ends_) {
    if (end.pages.size() != count) throw std::logic_error("an end knows of another number of pages than the arena has");
  }
  for (size_t i = 0; i < count; ++i) {
    const auto &low = ends_[0].pages[i], &high = ends_[1].pages[count - 1 - i];
    if (low && high && low != high && !low->left_behind && !high->left_behind) {
      throw std::logic_error("page " + std::to_string(i) + " is another one from the other end");
    }
  }
}

}  // namespace waterflow
