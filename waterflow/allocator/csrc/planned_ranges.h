// Every range of planned addresses in the process, for releases that know nothing but an address.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "placer.h"

namespace waterflow {

// Thread-safe; releases take a lock only for what was left behind.
class PlannedRanges {
 public:
  // Throws std::runtime_error where there are too many.
  static void add(Placer* placer);
  static void remove(const Placer* placer);
  // A range is kept until nothing in it is held; then `give_back` is called. Once its step is over, `discard` is called
  // for what lies between its live requests. `instead`, where there is one, takes its place among the ranges of arenas.
  static void keep(std::unique_ptr<Placer> placer, std::function<void()> give_back,
                   std::function<void(char* from, char* to)> discard = nullptr, Placer* instead = nullptr);
  // Looks at all that is kept: to be called when a step is over whose range is.
  static void sweep();

  // In a forked child: what is there is the parent's, and nobody may give it back.
  static void begin_anew();
  static bool of_parents(const void* address);
};

// Gives back a planned request by its address alone, on any thread. False where no arena has that address.
bool release_planned(void* address);

// Bytes that steps left behind and somebody still holds.
int64_t stranded_bytes();

}  // namespace waterflow
