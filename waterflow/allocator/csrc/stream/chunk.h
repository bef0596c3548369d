// Pieces of device memory, the streams that used each last, and the table that finds a piece by its address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

namespace waterflow {

// A stream's place in the allocator's clocks. A slot passes on to a new stream when all work of the old one is
// complete; its ticks go on counting, so what was noted of the old stream stays true.
using Slot = int32_t;

// Work of a stream between two of its events: tick k runs before the stream's event k.
struct Use {
  Slot slot = -1;
  int64_t tick = 0;
  bool operator==(const Use& other) const { return slot == other.slot && tick == other.tick; }
};

// A use that goes on: its tick is found when the chunk is released.
constexpr int64_t OPEN = std::numeric_limits<int64_t>::max();

// Nearly always one or two, so those need no memory of their own.
class Uses {
 public:
  Uses() = default;
  explicit Uses(Use use) { push(use); }
  int32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Use& operator[](int32_t i) { return i < INLINE ? near_[i] : far_[static_cast<size_t>(i - INLINE)]; }
  const Use& operator[](int32_t i) const { return i < INLINE ? near_[i] : far_[static_cast<size_t>(i - INLINE)]; }
  void push(Use use) {
    if (size_ < INLINE) {
      near_[size_] = use;
    } else {
      far_.push_back(use);
    }
    ++size_;
  }
  void erase(int32_t i) {
    (*this)[i] = (*this)[size_ - 1];
    if (size_ > INLINE) far_.pop_back();
    --size_;
  }
  void set(Use use) {  // this one alone
    far_.clear();
    near_[0] = use;
    size_ = 1;
  }
  template <class Holds>
  bool all(Holds&& holds) const {
    for (int32_t i = 0; i < size_; ++i) {
      if (!holds((*this)[i])) return false;
    }
    return true;
  }

 private:
  static constexpr int32_t INLINE = 2;
  Use near_[INLINE];
  int32_t size_ = 0;
  std::vector<Use> far_;
};

// Where a chunk is: in the set of a stream's slot (0 and above), or in one of these.
using SetId = int32_t;
constexpr SetId SYNCHRONIZED = -1;  // every live stream runs after its uses
constexpr SetId APART = -2;         // no one stream runs after all of them
constexpr SetId LIVE = -3;          // handed out

struct Chunk;

struct Segment {
  uintptr_t base = 0;
  int64_t bytes = 0;
  Chunk* first = nullptr;
  int32_t live = 0;  // chunks handed out
};

struct Chunk {
  uintptr_t address = 0;
  int64_t size = 0;  // multiple of the alignment
  Chunk *bin_before = nullptr, *bin_after = nullptr;
  SetId set = LIVE;
  int32_t bin = -1;
  Chunk *before = nullptr, *after = nullptr;  // neighbours in the segment
  Chunk *older = nullptr, *newer = nullptr;   // in the order in which they came into the set
  Segment* segment = nullptr;
  Slot stream = -1;   // that asked for it
  bool lane = false;  // for a lane, as that stream was one
  int64_t id = 0;     // of the request
  Uses uses;          // free: the last of each stream, none of which happens before another
};

// Chunk descriptors never move and are used again.
class ChunkPool {
 public:
  Chunk* take() {
    if (free_.empty()) {
      all_.emplace_back();
      return &all_.back();
    }
    Chunk* chunk = free_.back();
    free_.pop_back();
    return chunk;
  }
  void give(Chunk* chunk) {
    chunk->uses = Uses();
    chunk->set = LIVE;
    free_.push_back(chunk);
  }

 private:
  std::deque<Chunk> all_;
  std::vector<Chunk*> free_;
};

// From an address to the chunk that begins there: open addressing, so that a look costs no heap nodes.

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
