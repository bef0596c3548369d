"""GPU presets: memory sizes and data-sheet rates, for plans and for simulated time. Nothing here was measured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from waterflow.errors import InvalidJobError

MIB = 1 << 20
# Bytes of a process's CUDA context, with kernels loaded at their first use (CUDA 11.7 and later). Users
# report 300 to 400 MiB for some cards (pytorch/pytorch issues 20532 and 107667); the rest is guessed from those, more where
# there are more multiprocessors. Workspaces of libraries come on top.
_PASCAL, _VOLTA, _AMPERE, _ADA, _HOPPER = (each * MIB for each in (300, 350, 420, 400, 520))


@dataclass(frozen=True)
class GPU:
    """A GPU as its maker states it. Memory is in bytes; rates are peaks, so times computed from them are lower bounds.

    ``memory`` is the total that the driver reports (``cudaDeviceProp::totalGlobalMem``); ``context`` is the part of it that a
    CUDA context takes. ``memory_rate`` and ``bus_rate`` (host to device) are bytes per nanosecond, that is GB/s.
    ``compute_rate`` is floating point operations per nanosecond in float32 without tensor cores, torch's default for matrix
    products. Each kernel takes ``launch_ns`` of its stream on top of its work.
    """

    name: str
    memory: int
    context: int
    memory_rate: int
    compute_rate: int
    launch_ns: int
    bus_rate: int

    def __post_init__(self) -> None:
        if min(self.memory_rate, self.compute_rate, self.bus_rate) <= 0 or min(self.launch_ns, self.context) < 0:
            raise InvalidJobError(f"rates of a GPU must be positive, and none of its costs negative; got {self}")

    @property
    def usable(self) -> int:
        """Bytes left for a process beside its CUDA context."""
        return self.memory - self.context


# Rates: data sheets of the P100 PCIe, V100 SXM2, A100 SXM4, H100 SXM5, H200 SXM5, and the Ada whitepaper. Buses: PCIe 3, 4
# and 5 with 16 lanes, as large copies from pinned memory get it. Totals: deviceQuery and torch on such cards; nvidia-smi
# shows more on newer ones (40,960 MiB for an A100 40 GB), part of which the driver keeps. Launches: what it takes to issue
# one, 3 to 5 microseconds.
GPUS = (
    GPU("p100-16g", 17_071_734_784, _PASCAL, memory_rate=732, compute_rate=9_300, launch_ns=5_000, bus_rate=12),
    GPU("v100-32g", 34_089_730_048, _VOLTA, memory_rate=900, compute_rate=15_700, launch_ns=4_000, bus_rate=12),
    GPU("a100-40g", 42_298_834_944, _AMPERE, memory_rate=1_555, compute_rate=19_500, launch_ns=4_000, bus_rate=24),
    GPU("a100-80g", 84_987_740_160, _AMPERE, memory_rate=2_039, compute_rate=19_500, launch_ns=4_000, bus_rate=24),
    GPU("h100-80g", 81_089 * MIB, _HOPPER, memory_rate=3_350, compute_rate=67_000, launch_ns=3_000, bus_rate=48),
    GPU("h200-141g", 143_156 * MIB, _HOPPER, memory_rate=4_800, compute_rate=67_000, launch_ns=3_000, bus_rate=48),
    GPU("rtx4090-24g", 24_563 * MIB, _ADA, memory_rate=1_008, compute_rate=82_600, launch_ns=3_000, bus_rate=24),
)


def gpu(name: str) -> GPU:
    """Return the preset with this name, ignoring case. Raises InvalidJobError for an unknown name."""
    known = {each.name: each for each in GPUS}
    if not isinstance(name, str):
        raise InvalidJobError(f"gpu must be a name, such as 'v100-32g', or a GPU; got {name!r}")
    wanted = name.strip().lower()
    if wanted not in known:
        # A prefix such as "a100" names several cards: list them all instead of guessing the nearest spelling.
        alike = [each for each in known if wanted and each.startswith(wanted)]
        meant = " or ".join(alike or difflib.get_close_matches(wanted, known, n=1, cutoff=0.0))
        raise InvalidJobError(f"no GPU is called {name!r}; did you mean {meant}? Known are {', '.join(known)}")
    return known[wanted]
