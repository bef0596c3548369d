// Free chunks by size, in two levels: powers of two, each in 32 parts (after TLSF, Masmano et al. 2004).
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "chunk.h"

namespace waterflow {

class SizeBins {
 public:
  static constexpr int32_t ALL = std::numeric_limits<int32_t>::max();

  explicit SizeBins(int64_t alignment);

  void insert(Chunk* chunk);
  void erase(Chunk* chunk);
  // The smallest chunk of at least `size` among the first `looks` of the bin that has one; null where none has.
  // With ALL looks: the smallest there is.
  Chunk* best(int64_t size, int32_t looks) const;
  int32_t bin_of(int64_t size) const;
  Chunk* head(int32_t bin) const { return heads_[static_cast<size_t>(bin)]; }
  // Throws std::logic_error where a bitmap or a list is wrong; returns how many chunks there are.
  int64_t check() const;

 private:
  static constexpr int32_t PARTS = 32, LEVELS = 40;
  int32_t next_filled(int32_t bin) const;

  const int shift_;
  uint64_t levels_ = 0;
  std::array<uint32_t, LEVELS> parts_{};
  std::array<Chunk*, LEVELS * PARTS> heads_{};
};

}  // namespace waterflow
