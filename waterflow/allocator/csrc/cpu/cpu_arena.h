// An arena in the machine's memory.
#pragma once

#include <cstdint>
#include <memory>

#include "waterflow/allocator/csrc/planned/arena.h"

namespace waterflow {

// Both ends see one file of pages. Pages come when they are first touched and stay until they are discarded. In a child
// process its addresses are not there.
class CpuArena : public Arena {
 public:
  // Reserves addresses for at most `most` bytes. Throws std::runtime_error where the system has none.
  explicit CpuArena(int64_t most);
  ~CpuArena() override;
  CpuArena(const CpuArena&) = delete;
  CpuArena& operator=(const CpuArena&) = delete;

  int64_t most() const override { return most_; }
  int64_t size() const override { return size_; }
  int64_t unit() const override { return page(); }
  void resize(int64_t bytes) override;
  Placer& placer(int32_t end) override { return *placers_[end]; }
  bool back(int32_t, int64_t) override { return true; }
  bool backs() const override { return false; }
  void discard(int32_t end, int64_t from, int64_t to) override;
  void detach(int32_t end) override;

  static int64_t page();

 private:
  std::unique_ptr<Placer> reserve(int32_t end) const;
  void map(int32_t end);
  void let_go();

  int file_ = -1;
  int64_t most_;
  int64_t size_ = 0;
  std::unique_ptr<Placer> placers_[2];
};

}  // namespace waterflow
