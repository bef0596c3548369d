// Settings of the process and the calling thread that change what a step computes, or what its code sees.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace waterflow {

// Each of them with its name.
std::vector<std::pair<const char*, int>> ambient_parts(const std::string& device_type);

// One key of all of them, two bytes each. Equal keys: a step that is traced under either records the same.
std::string ambient(const std::string& device_type);

// Function modes, dispatch modes, and hooks for saved tensors that the calling thread is in.
int modes_here();

}  // namespace waterflow
