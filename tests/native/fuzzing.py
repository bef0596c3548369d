"""Random runs of the multi-stream allocator, with the order and the content of every byte checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.native.build import load
from tests.native.stream_allocator import Fault

_C = load()
MiB = 1 << 20


@dataclass(frozen=True)
class FuzzSetup:
    """What a table of random operations runs on; sizes are bytes.

    On the CPU, streams are threads that stall before a ``stall_share`` of their work for up to ``stall_us``
    microseconds. ``threads`` make the requests, each those of its streams; with one, a run on the simulated device goes
    the same way every time. A ``fault`` is planted by its name; where nothing is ``checked``, nobody finds it.
    """

    simulated: bool = True
    streams: int = 4
    threads: int = 1
    capacity: int = 80 * MiB
    check_every: int = 1009
    seed: int = 0
    stall_share: float = 0.0
    stall_us: int = 0
    alignment: int = 64
    fault: str = "none"
    checked: bool = True


@dataclass(frozen=True)
class FuzzResult:
    """How a run went: ``error`` is empty if nothing was wrong, ``checks`` counts accesses or contents checked."""

    error: str
    row: int
    operations: int
    requests: int
    checks: int
    waits: int
    tiers: dict[str, int]


def fuzz_table(setup: FuzzSetup, rows: int, seed: int, *, largest: int = 64 * MiB, renew: bool = True) -> npt.NDArray[np.int64]:
    """Random operations (``fuzz.h``); any rows may be left out. With ``renew``, streams come and go."""
    made = _C.fuzz_table(seed, rows, setup.streams, setup.capacity, largest, renew)
    return np.asarray(made)


def run_fuzz(table: npt.ArrayLike, setup: FuzzSetup) -> FuzzResult:
    """Run a table of operations; never raises for what it finds."""
    arguments: dict[str, Any] = asdict(setup)
    arguments["fault"] = getattr(Fault, setup.fault)
    return FuzzResult(**_C.run_fuzz(np.asarray(table, dtype=np.int64).reshape(-1, 4), **arguments))
