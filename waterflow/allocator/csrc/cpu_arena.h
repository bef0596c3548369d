// An arena in the machine's memory: two ends that face each other over the same pages.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "placer.h"

namespace waterflow {

// End 0 grows up from its origin, end 1 down from its own. Each end has addresses of its own; both see one file of
// pages, from opposite sides, so they share no byte while their heights add up to no more than the size. Pages come
// when they are first touched and stay until they are discarded. Not thread-safe: the engine's lock guards it. In a
// child process its addresses are not there.
class CpuArena {
 public:
  // Reserves addresses for at most `most` bytes. Throws std::runtime_error where the system has none.
  explicit CpuArena(int64_t most);
  ~CpuArena();
  CpuArena(const CpuArena&) = delete;
  CpuArena& operator=(const CpuArena&) = delete;

  int64_t most() const { return most_; }
  int64_t size() const { return size_; }
  // At least `bytes`, in whole pages. End 1 must be idle, and end 0 stand no higher than the new size. No address
  // changes.
  void resize(int64_t bytes);
  // Who serves the requests of an end's step.
  Placer& placer(int32_t end) { return *placers_[end]; }
  // Gives back the pages that lie wholly between two distances from an end. What was there is gone.
  void discard(int32_t end, int64_t from, int64_t to);

  // A step at an idle end has left something behind that is still held: it keeps its addresses, in memory of its own,
  // and the end moves to others.
  void strand(int32_t end);

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

// Gives back a planned request by its address alone, on any thread. False where no arena has that address.
bool release_planned(void* address);

// Bytes that steps left behind and somebody still holds.
int64_t stranded_bytes();

}  // namespace waterflow
