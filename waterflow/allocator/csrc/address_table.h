// From an address to the chunk that begins there: open addressing, so that a look costs no heap nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk.h"

namespace waterflow {

class AddressTable {
 public:
  AddressTable() : places_(1024) {}

  Chunk* find(uintptr_t address) const {
    for (size_t i = home(address);; i = next(i)) {
      Chunk* chunk = places_[i].chunk;
      if (chunk == nullptr || places_[i].address == address) return chunk;
    }
  }
  void insert(Chunk* chunk) {
    if (2 * ++size_ > places_.size()) enlarge();
    place(chunk);
  }
  void erase(uintptr_t address) {
    size_t hole = home(address);
    while (places_[hole].address != address) hole = next(hole);
    // Close the gap: whatever was pushed past it moves back, so that looks may end at an empty place.
    for (size_t i = next(hole); places_[i].chunk != nullptr; i = next(i)) {
      const size_t wanted = home(places_[i].address);
      const bool may_stay = hole <= i ? (hole < wanted && wanted <= i) : (hole < wanted || wanted <= i);
      if (may_stay) continue;
      places_[hole] = places_[i];
      hole = i;
    }
    places_[hole] = Place();
    --size_;
  }
  template <class Visit>
  void each(Visit&& visit) const {
    for (const auto& place : places_) {
      if (place.chunk != nullptr) visit(place.chunk);
    }
  }

 private:
  struct Place {
    uintptr_t address = 0;
    Chunk* chunk = nullptr;
  };
  size_t home(uintptr_t address) const { return (address * uint64_t{0x9E3779B97F4A7C15}) >> shift_; }
  size_t next(size_t i) const { return (i + 1) & (places_.size() - 1); }
  void place(Chunk* chunk) {
    size_t i = home(chunk->address);
    while (places_[i].chunk != nullptr) i = next(i);
    places_[i] = {chunk->address, chunk};
  }
  void enlarge() {
    std::vector<Place> old(places_.size() * 2);
    old.swap(places_);
    --shift_;
    for (const auto& place : old) {
      if (place.chunk != nullptr) this->place(place.chunk);
    }
  }

  std::vector<Place> places_;
  int shift_ = 64 - 10;
  size_t size_ = 0;
};

}  // namespace waterflow
