#include "size_bins.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace waterflow {

SizeBins::SizeBins(int64_t alignment) : shift_(std::countr_zero(static_cast<uint64_t>(alignment))) {}

int32_t SizeBins::bin_of(int64_t size) const {
  const auto units = static_cast<uint64_t>(size) >> shift_;
  if (units < PARTS) return static_cast<int32_t>(units);  // one size to each
  const int top = std::bit_width(units) - 1;
  const int32_t level = top - 4;
  if (level >= LEVELS) return LEVELS * PARTS - 1;
  return level * PARTS + static_cast<int32_t>((units >> (top - 5)) & (PARTS - 1));
}

void SizeBins::insert(Chunk* chunk) {
  const int32_t bin = chunk->bin = bin_of(chunk->size);
  Chunk*& head = heads_[static_cast<size_t>(bin)];
  chunk->bin_before = nullptr;
  chunk->bin_after = head;
  if (head != nullptr) head->bin_before = chunk;
  head = chunk;
  parts_[static_cast<size_t>(bin / PARTS)] |= 1u << (bin % PARTS);
  levels_ |= uint64_t{1} << (bin / PARTS);
}

void SizeBins::erase(Chunk* chunk) {
  const int32_t bin = chunk->bin;
  if (chunk->bin_after != nullptr) chunk->bin_after->bin_before = chunk->bin_before;
  if (chunk->bin_before != nullptr) {
    chunk->bin_before->bin_after = chunk->bin_after;
  } else {
    heads_[static_cast<size_t>(bin)] = chunk->bin_after;
    if (chunk->bin_after == nullptr) {
      auto& parts = parts_[static_cast<size_t>(bin / PARTS)];
      parts &= ~(1u << (bin % PARTS));
      if (parts == 0) levels_ &= ~(uint64_t{1} << (bin / PARTS));
    }
  }
  chunk->bin = -1;
}

int32_t SizeBins::next_filled(int32_t bin) const {
  const int32_t level = bin / PARTS;
  if (level >= LEVELS) return -1;
  const uint32_t here = parts_[static_cast<size_t>(level)] & (~uint32_t{0} << (bin % PARTS));
  if (here != 0) return level * PARTS + std::countr_zero(here);
  const uint64_t above = levels_ & ~((uint64_t{2} << level) - 1);
  if (above == 0) return -1;
  const int32_t found = std::countr_zero(above);
  return found * PARTS + std::countr_zero(parts_[static_cast<size_t>(found)]);
}

Chunk* SizeBins::best(int64_t size, int32_t looks) const {
  for (int32_t bin = next_filled(bin_of(size)); bin >= 0; bin = next_filled(bin + 1)) {
    Chunk* best = nullptr;
    int32_t left = looks;
    for (Chunk* chunk = heads_[static_cast<size_t>(bin)]; chunk != nullptr && left-- > 0; chunk = chunk->bin_after) {
      if (chunk->size < size || (best != nullptr && chunk->size >= best->size)) continue;
      best = chunk;
      if (chunk->size == size || bin < PARTS) break;
    }
    if (best != nullptr) return best;  // any bin after the first holds only what fits
  }
  return nullptr;
}

int64_t SizeBins::check() const {
  auto must = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("size bins: ") + what);
  };
  int64_t count = 0;
  for (int32_t bin = 0; bin < LEVELS * PARTS; ++bin) {
    const Chunk* head = heads_[static_cast<size_t>(bin)];
    const bool marked = (parts_[static_cast<size_t>(bin / PARTS)] >> (bin % PARTS)) & 1u;
    must(marked == (head != nullptr), "a bit says otherwise than its list");
    const Chunk* before = nullptr;
    for (const Chunk* chunk = head; chunk != nullptr; chunk = chunk->bin_after) {
      must(chunk->bin == bin && bin_of(chunk->size) == bin, "a chunk is in the wrong bin");
      must(chunk->bin_before == before, "a list is broken");
      before = chunk;
      ++count;
    }
  }
  for (int32_t level = 0; level < LEVELS; ++level) {
    must(((levels_ >> level) & 1u) == (parts_[static_cast<size_t>(level)] != 0),
         "a level says otherwise than its parts");
  }
  return count;
}

}  // namespace waterflow
