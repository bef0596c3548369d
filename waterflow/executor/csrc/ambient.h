// Settings of the process and the calling thread that change what a step computes, or what its code sees.
#pragma once

#include <string>

namespace waterflow {

// One key of all of them, two bytes each. Equal keys: a step that is traced under either records the same.
std::string ambient(const std::string& device_type);

// Function modes, dispatch modes, and hooks for saved tensors that the calling thread is in.
int modes_here();

}  // namespace waterflow
