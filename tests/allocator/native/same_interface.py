"""Whether our table of driver functions has the shapes that NVIDIA's header declares, where one is installed."""

from __future__ import annotations

import re
from pathlib import Path

OURS = Path(__file__).parents[3] / "waterflow/allocator/csrc/cuda/cuda_driver.h"

# Ours, and the header's name for it.
NUMBERS = {
    "OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY", "DEINITIALIZED": "CUDA_ERROR_DEINITIALIZED",
    "NO_DEVICE": "CUDA_ERROR_NO_DEVICE", "NOT_READY": "CUDA_ERROR_NOT_READY",
    "PINNED": "CU_MEM_ALLOCATION_TYPE_PINNED", "LOCATION_DEVICE": "CU_MEM_LOCATION_TYPE_DEVICE",
    "READ_WRITE": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE", "GRANULARITY_MINIMUM": "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
    "HAS_VIRTUAL_MEMORY": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "NON_BLOCKING": "CU_STREAM_NON_BLOCKING", "WITHOUT_TIMING": "CU_EVENT_DISABLE_TIMING",
    "CAPTURE_THREAD_LOCAL": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
    "CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
}  # fmt: skip
LAYOUTS = {
    "Location": ("CUmemLocation", {"type": "type", "id": "id"}),
    "AllocationProp": (
        "CUmemAllocationProp",
        {"type": "type", "handle_types": "requestedHandleTypes", "location": "location",
         "windows_only": "win32HandleMetaData", "flags": "allocFlags"},
    ),
    "Access": ("CUmemAccessDesc", {"location": "location", "flags": "flags"}),
}  # fmt: skip
HEAD = """
#include <cuda.h>
#include <type_traits>
#include "cuda_driver.h"
using namespace waterflow;
template <class A, class B> struct Same : std::false_type {};
template <class R, class... A, class S, class... B> struct Same<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B) || sizeof(R) != sizeof(S)) return false;
    else return ((sizeof(A) == sizeof(B)) && ... && true);
  }();
};
"""


def functions() -> list[tuple[str, str]]:
    """(member, exported name) of all functions in the table."""
    text = OURS.read_text()
    pairs = re.findall(r"X\((\w+), \"(\w+)\"", text)
    return [*pairs, ("stream_id", "cuStreamGetId")]


def source() -> str:
    """A program that compiles only where both say the same."""
    lines = [HEAD]
    for member, name in functions():
        # Under its plain name the header means the newest form; that must be ours.
        plain = re.sub(r"_v\d$", "", name)
        lines.append(f'static_assert(Same<decltype(&::{plain}), decltype(CudaDriver::{member})>::value, "{name}");')
        lines.append(f'static_assert(WF_IS(({plain}), "{name}"), "{name}");')
    lines += [f"static_assert(static_cast<long long>(cu::{o}) == {theirs});" for o, theirs in NUMBERS.items()]
    for own, (theirs, members) in LAYOUTS.items():
        lines.append(f"static_assert(sizeof(cu::{own}) == sizeof({theirs}));")
        lines += [f"static_assert(offsetof(cu::{own}, {a}) == offsetof({theirs}, {b}));" for a, b in members.items()]
    same = """
#define WF_TEXT(...) #__VA_ARGS__
#define WF_NAME(...) WF_TEXT(__VA_ARGS__)
constexpr bool wf_same(const char* a, const char* b) {  // "(name)" and "name"
  for (++a; *b && *a == *b; ++a, ++b) {}
  return *b == 0 && *a == ')';
}
#define WF_IS(name, text) wf_same(WF_NAME(name), text)
"""
    return "\n".join([lines[0], same, *lines[1:], "int main() {}"])
