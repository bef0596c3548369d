// The free chunks of the multi-stream allocator: by size (SizeBins), in a set for each stream (FreeSets).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "waterflow/allocator/csrc/stream/chunk.h"
#include "waterflow/allocator/csrc/stream/stream_clocks.h"

namespace waterflow {

// Free chunks by size, in two levels: powers of two, each in 32 parts (after TLSF, Masmano et al. 2004).
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

// Free chunks, in one set per stream, one of those that everyone may take, and one of those apart.

// Sets say where to look first; what may be handed to whom is for the clocks to say. What holds of each set:
//   of a slot      its stream runs after every use of the chunk
//   SYNCHRONIZED   every live stream does
//   APART          several uses, and no stream known to run after all of them
class FreeSets {
 public:
  FreeSets(StreamClocks& clocks, ChunkPool& pool, AddressTable& addresses, int64_t alignment, Fault fault,
           bool merge_at_once);

  // A chunk that its stream released just now, where the same size is asked for next; merging is put off until
  // `settle`, and so is forgetting its address. False, and nothing done, where there is no place for it.
  bool put_aside(Chunk* chunk, Slot slot) {
    if (chunk->size > MOST_ASIDE || !aside_allowed_) return false;
    auto& place = aside(slot, chunk->size);
    if (place.chunk != nullptr && place.size != chunk->size) return false;
    place.size = chunk->size;
    chunk->set = slot;
    chunk->bin = ASIDE;
    chunk->bin_after = place.chunk;
    place.chunk = chunk;
    with(slot).aside += chunk->size;
    ++count_aside_;
    return true;
  }
  // One of exactly this size; null if there is none.
  Chunk* take_aside(Slot slot, int64_t size) {
    auto& place = aside(slot, size);
    Chunk* chunk = place.chunk;
    if (chunk == nullptr || place.size != size) return nullptr;
    place.chunk = chunk->bin_after;
    with(slot).aside -= size;
    --count_aside_;
    chunk->bin = -1;
    return chunk;
  }
  // Merges what was put aside. Whatever looks into sets, or walks them, comes after this.
  void settle() {
    if (count_aside_ > 0) settle_all();
  }

  // Puts a free chunk into a set and merges it with neighbours of the same set.
  void insert(Chunk* chunk, SetId set);
  void remove(Chunk* chunk);
  // Where a chunk with these uses belongs.
  SetId home(const Uses& uses) const;
  // Takes the first `size` bytes of a chunk out of its set, for a stream that runs after its uses.
  Chunk* take_front(Chunk* chunk, int64_t size);
  // Cuts a chunk that is in no set down to `size`; the rest goes into `rest`.
  void split(Chunk* chunk, int64_t size, SetId rest);
  Chunk* best(SetId set, int64_t size, int32_t looks);
  // After clocks have moved: what all live streams run after becomes synchronized.
  void promote();
  // After `waiter` waited: what it runs after now becomes its own.
  void move_to(Slot waiter);
  // Merges the free neighbours of a segment, whatever their sets, for a stream that runs after all their uses.
  void merge_segment(Segment& segment, Slot slot);

  int64_t bytes(SetId set) const { return with(set).bytes + with(set).aside; }
  int64_t free_bytes() const;
  int64_t largest() const;
  // The latest tick of this slot that any chunk was freed with.
  int64_t last_use(Slot slot) const;
  SetId sets() const { return static_cast<SetId>(sets_.size()) + APART; }  // one past the last
  void add_slot(Slot slot);
  void check() const;

 private:
  static constexpr int32_t ASIDE = -2;  // instead of a bin
  // A log of BERT costs 30 ns a pair with 4 MiB and takes 1,092 MiB from the device; with 1 MiB, 37 ns and 912 MiB.
  static constexpr int64_t MOST_ASIDE = int64_t{4} << 20;
  static constexpr int32_t PLACES_BITS = 6;
  struct Place {
    int64_t size = 0;
    Chunk* chunk = nullptr;
  };
  struct Set {
    explicit Set(int64_t alignment) : bins(alignment) {}
    SizeBins bins;
    Chunk *oldest = nullptr, *newest = nullptr;
    int64_t bytes = 0, count = 0;
    int64_t aside = 0;  // bytes
    std::array<Place, size_t{1} << PLACES_BITS> places;
  };
  Set& with(SetId set) { return *sets_[static_cast<size_t>(set - APART)]; }
  const Set& with(SetId set) const { return *sets_[static_cast<size_t>(set - APART)]; }
  Place& aside(Slot slot, int64_t size) {
    return with(slot).places[(static_cast<uint64_t>(size) * 0x9E3779B97F4A7C15u) >> (64 - PLACES_BITS)];
  }
  void settle_all();
  bool may_merge(const Chunk* one, const Chunk* other, SetId set) const;
  void absorb(Chunk* chunk, Chunk* after, bool with_uses);
  template <class Holds>
  void move_where(SetId from, SetId to, Holds&& holds);

  StreamClocks& clocks_;
  ChunkPool& pool_;
  AddressTable& addresses_;  // of what is held or put aside
  const int64_t alignment_;
  const Fault fault_;
  const bool aside_allowed_;
  int64_t count_aside_ = 0;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<int64_t> last_use_;
};

}  // namespace waterflow
