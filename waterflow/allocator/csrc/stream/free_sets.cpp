#include "waterflow/allocator/csrc/stream/free_sets.h"

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

namespace {

// Sets are nearly in the order of their last uses, so a few chunks that must stay end a walk.
constexpr int32_t PATIENCE = 8;

}  // namespace

FreeSets::FreeSets(StreamClocks& clocks, ChunkPool& pool, AddressTable& addresses, int64_t alignment, Fault fault,
                   bool merge_at_once)
    : clocks_(clocks),
      pool_(pool),
      addresses_(addresses),
      alignment_(alignment),
      fault_(fault),
      aside_allowed_(!merge_at_once &&
                     !WATERFLOW_PLANTED(fault == Fault::merge_across_sets || fault == Fault::no_rerecord)) {
  for (SetId set = APART; set < 0; ++set) sets_.push_back(std::make_unique<Set>(alignment));
}

void FreeSets::add_slot(Slot slot) {
  while (sets() <= slot) sets_.push_back(std::make_unique<Set>(alignment_));
  if (static_cast<size_t>(slot) >= last_use_.size()) last_use_.resize(static_cast<size_t>(slot) + 1);
}

void FreeSets::settle_all() {
  for (SetId set = 0; set < sets(); ++set) {
    if (with(set).aside == 0) continue;
    for (auto& place : with(set).places) {
      while (place.chunk != nullptr) {
        Chunk* chunk = take_aside(set, place.size);
        chunk->set = LIVE;
        addresses_.erase(chunk->address);
        insert(chunk, set);
      }
    }
  }
}

int64_t FreeSets::last_use(Slot slot) const { return last_use_[static_cast<size_t>(slot)]; }

bool FreeSets::may_merge(const Chunk* one, const Chunk* other, SetId set) const {
  if (one == nullptr || other == nullptr || other->set == LIVE || other->bin == ASIDE) return false;
  return (other->set == set && set != APART) || WATERFLOW_PLANTED(fault_ == Fault::merge_across_sets);
}

// `chunk` becomes one with its right neighbour; neither is in a set.
void FreeSets::absorb(Chunk* chunk, Chunk* after, bool with_uses) {
  chunk->size += after->size;
  chunk->after = after->after;
  if (after->after != nullptr) after->after->before = chunk;
  if (with_uses) {
    for (int32_t i = 0; i < after->uses.size(); ++i) clocks_.add_use(chunk->uses, after->uses[i]);
  }
  pool_.give(after);
}

void FreeSets::insert(Chunk* chunk, SetId set) {
  for (int32_t i = 0; i < chunk->uses.size(); ++i) {
    auto& last = last_use_[static_cast<size_t>(chunk->uses[i].slot)];
    last = std::max(last, chunk->uses[i].tick);
  }
  const bool with_uses = !WATERFLOW_PLANTED(fault_ == Fault::merge_across_sets);
  if (Chunk* after = chunk->after; may_merge(chunk, after, set)) {
    remove(after);
    absorb(chunk, after, with_uses);
  }
  if (Chunk* before = chunk->before; may_merge(chunk, before, set)) {
    remove(before);
    if (!with_uses) before->uses = chunk->uses;
    absorb(before, chunk, with_uses);
    chunk = before;
  }
  auto& to = with(set);
  chunk->set = set;
  chunk->newer = nullptr;
  chunk->older = to.newest;
  (to.newest != nullptr ? to.newest->newer : to.oldest) = chunk;
  to.newest = chunk;
  to.bytes += chunk->size;
  ++to.count;
  to.bins.insert(chunk);
}

void FreeSets::remove(Chunk* chunk) {
  auto& from = with(chunk->set);
  (chunk->older != nullptr ? chunk->older->newer : from.oldest) = chunk->newer;
  (chunk->newer != nullptr ? chunk->newer->older : from.newest) = chunk->older;
  from.bytes -= chunk->size;
  --from.count;
  from.bins.erase(chunk);
  chunk->set = LIVE;
}

SetId FreeSets::home(const Uses& uses) const {
  auto runs_after_all = [&](Slot slot) { return uses.all([&](Use use) { return clocks_.ordered(use, slot); }); };
  if (uses.all([&](Use use) { return clocks_.ordered_for_all(use); })) return SYNCHRONIZED;
  if (uses.size() == 1) return uses[0].slot;
  for (int32_t i = uses.size() - 1; i >= 0; --i) {
    if (runs_after_all(uses[i].slot)) return uses[i].slot;
  }
  return APART;
}

void FreeSets::split(Chunk* chunk, int64_t size, SetId rest) {
  if (chunk->size - size < alignment_) return;
  const int64_t cut = WATERFLOW_PLANTED(fault_ == Fault::split_off_by_one) ? size - alignment_ : size;
  Chunk* made = pool_.take();
  made->address = chunk->address + static_cast<uintptr_t>(cut);
  made->size = chunk->size - cut;
  made->segment = chunk->segment;
  made->uses = chunk->uses;
  made->before = chunk;
  made->after = chunk->after;
  if (made->after != nullptr) made->after->before = made;
  chunk->after = made;
  chunk->size = size;
  insert(made, rest);
}

// The rest keeps its place in the set, and mostly in its bin: that makes this the cheap way.
Chunk* FreeSets::take_front(Chunk* chunk, int64_t size) {
  auto& from = with(chunk->set);
  if (chunk->size - size < alignment_ || WATERFLOW_PLANTED(fault_ != Fault::none)) {
    const SetId set = chunk->set;
    remove(chunk);
    split(chunk, size, set);
    return chunk;
  }
  Chunk* made = pool_.take();
  made->address = chunk->address;
  made->size = size;
  made->segment = chunk->segment;
  made->before = chunk->before;
  made->after = chunk;
  (made->before != nullptr ? made->before->after : made->segment->first) = made;
  chunk->before = made;
  chunk->address += static_cast<uintptr_t>(size);
  chunk->size -= size;
  from.bytes -= size;
  if (from.bins.bin_of(chunk->size) != chunk->bin) {
    from.bins.erase(chunk);
    from.bins.insert(chunk);
  }
  return made;
}

Chunk* FreeSets::best(SetId set, int64_t size, int32_t looks) {
  auto& from = with(set);
  return from.bytes < size ? nullptr : from.bins.best(size, looks);
}

template <class Holds>
void FreeSets::move_where(SetId from, SetId to, Holds&& holds) {
  int32_t left = PATIENCE;
  for (Chunk* chunk = with(from).oldest; chunk != nullptr && left > 0 && chunk->set == from;) {
    Chunk* next = chunk->newer;
    if (chunk->uses.all(holds)) {
      remove(chunk);
      insert(chunk, to);  // merges within `to` only, so `next` stays
    } else {
      --left;
    }
    chunk = next;
  }
}

void FreeSets::promote() {
  settle();
  for (SetId set = APART; set < sets(); ++set) {
    if (set == SYNCHRONIZED || with(set).count == 0) continue;
    move_where(set, SYNCHRONIZED, [&](Use use) { return clocks_.ordered_for_all(use); });
  }
}

void FreeSets::move_to(Slot waiter) {
  settle();
  for (SetId set = APART; set < sets(); ++set) {
    if (set == SYNCHRONIZED || set == waiter || with(set).count == 0) continue;
    move_where(set, waiter, [&](Use use) { return clocks_.ordered(use, waiter); });
  }
}

void FreeSets::merge_segment(Segment& segment, Slot slot) {
  for (Chunk* chunk = segment.first; chunk != nullptr; chunk = chunk->after) {
    if (chunk->set == LIVE || chunk->after == nullptr || chunk->after->set == LIVE) continue;
    remove(chunk);
    while (chunk->after != nullptr && chunk->after->set != LIVE) {
      Chunk* after = chunk->after;
      remove(after);
      absorb(chunk, after, true);
    }
    const bool for_all = chunk->uses.all([&](Use use) { return clocks_.ordered_for_all(use); });
    insert(chunk, for_all ? SYNCHRONIZED : slot);
  }
}

int64_t FreeSets::free_bytes() const {
  int64_t sum = 0;
  for (const auto& set : sets_) sum += set->bytes + set->aside;
  return sum;
}

int64_t FreeSets::largest() const {
  int64_t most = 0;
  for (const auto& set : sets_) {
    for (const Chunk* chunk = set->oldest; chunk != nullptr; chunk = chunk->newer) most = std::max(most, chunk->size);
  }
  return most;
}

void FreeSets::check() const {
  auto must = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("free sets: ") + what);
  };
  for (SetId set = APART; set < sets(); ++set) {
    const auto& self = with(set);
    int64_t bytes = 0, count = 0;
    const Chunk* older = nullptr;
    for (const Chunk* chunk = self.oldest; chunk != nullptr; chunk = chunk->newer) {
      must(chunk->set == set && chunk->older == older, "a chunk is in the wrong set, or a list is broken");
      must(chunk->uses.all([&](Use use) {
        if (use.slot < 0 || use.slot >= clocks_.slots()) return false;
        if (set == SYNCHRONIZED) return clocks_.ordered_for_all(use);
        return set == APART || clocks_.ordered(use, set);
      }),
           "a chunk has a use that its set's stream does not run after");
      for (int32_t i = 0; i < chunk->uses.size(); ++i) {
        must(chunk->uses[i].tick <= last_use(chunk->uses[i].slot), "the last use of a slot is wrong");
        for (int32_t j = 0; j < i; ++j) must(chunk->uses[i].slot != chunk->uses[j].slot, "a stream has two last uses");
      }
      must(set == APART || chunk->after == nullptr || chunk->after->set != set, "two neighbours should be one");
      older = chunk;
      bytes += chunk->size;
      ++count;
    }
    must(self.aside == 0, "something is still put aside");
    must(self.newest == older && bytes == self.bytes && count == self.count, "a sum is wrong");
    must(self.bins.check() == count, "a chunk is in no bin");
  }
}

}  // namespace waterflow
