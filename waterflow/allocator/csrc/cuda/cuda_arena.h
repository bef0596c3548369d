// An arena in a GPU's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "waterflow/allocator/csrc/planned/arena.h"
#include "waterflow/allocator/csrc/cuda/cuda_device.h"

namespace waterflow {

// Addresses are reserved once. Physical pages are made and mapped when a step is about to stand on them (`back`), and
// stay until they are discarded. Both ends map the same pages, from opposite sides. What the device still does with a
// page must be over when it is discarded, or the arena resized.
class CudaArena : public Arena {
 public:
  static constexpr int64_t LARGEST_PAGE = int64_t{64} << 20;

  // Reserves addresses for at most `most` bytes, twice. `page`: bytes, a multiple of the device's granularity; 0:
  // chosen by the size, for many small pages are slow to map and few large ones hold more than is needed.
  // `memory`: whose requests its placers serve; other than the device's in tests alone.
  CudaArena(std::shared_ptr<CudaDevice> device, int64_t most, int64_t page = 0, PlacedIn memory = PlacedIn::device);
  ~CudaArena() override;
  CudaArena(const CudaArena&) = delete;
  CudaArena& operator=(const CudaArena&) = delete;

  int64_t most() const override { return most_; }
  int64_t size() const override { return size_; }
  int64_t unit() const override { return page_; }
  void resize(int64_t bytes) override;
  Placer& placer(int32_t end) override { return *ends_[end].placer; }
  bool back(int32_t end, int64_t bytes) override;
  bool backs() const override { return true; }
  void discard(int32_t end, int64_t from, int64_t to) override;
  void detach(int32_t end) override;

  int64_t pages() const;  // physical ones that an end has mapped now
  void check() const;     // walks everything; throws std::logic_error

 private:
  struct Page {
    Page(std::shared_ptr<CudaDevice> device, int64_t bytes, cu::Handle handle)
        : device(std::move(device)), bytes(bytes), handle(handle) {}
    ~Page();
    const std::shared_ptr<CudaDevice> device;
    const int64_t bytes;
    const cu::Handle handle;
    bool left_behind = false;  // something that a step left behind lies there: no other step may
  };
  using Pages = std::vector<std::shared_ptr<Page>>;
  // Pages by their distance from this end; null where nothing is mapped. The last is the other end's first.
  struct End {
    std::unique_ptr<Placer> placer;
    Pages pages;
  };

  void reserve(int32_t end);
  std::shared_ptr<Page> make();
  uintptr_t address(int32_t end, int64_t index) const;
  void unmap(int32_t end, int64_t from, int64_t to);
  void allow(int32_t end, int64_t from, int64_t to);

  const std::shared_ptr<CudaDevice> device_;
  const PlacedIn memory_;
  int64_t page_, most_, size_ = 0;
  End ends_[2];
};

}  // namespace waterflow
