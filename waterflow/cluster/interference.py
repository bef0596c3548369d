"""Speeds of jobs that share a device: from public measurements of pairs, and from a model if a pair is unknown.

All speeds are shares of the speed alone. Three sources, in this order:

1. pairs under control (``controlled``), as AntMan published them (section 5.1);
2. pairs measured without control: ``gavel_colocation.csv`` (by model and batch size, on one kind of GPU);
3. a model of one number per job, its *demand* d: jobs run at min(1, 1 / sum of d). Gandiva's table 1 gives d for its
   models; elsewhere d = utilization / packing_efficiency. Two copies of a model measured by Gavel give d too.

Under control, the interference controller of live devices finds the share of the leftover that the opportunistic jobs may
take (``coordinated``), and they share that.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from waterflow.cluster.book import Entry
from waterflow.cluster.model_profiles import GIB, KNOWN_MODELS, UNKNOWN, ModelProfile
from waterflow.cluster.shared_device import Load, coordinated
from waterflow.cluster.submission import Priority
from waterflow.executor.interference import Allowed

Pair = tuple[str, str]

# Guaranteed job, opportunistic job: the speeds of both beside each other (AntMan section 5.1). ESPnet 20.1 to 20.8
# minutes and ResNet-50 at 57 %; ResNet-50 91.1 to 91.8 minutes, GCN 43.0 to 43.9 with 17 minutes of them shared.
CONTROLLED_PAIRS: dict[Pair, tuple[float, float]] = {
    ("ESPnet", "ResNet-50"): (20.1 / 20.8, 0.57),
    ("ResNet-50", "GCN"): (91.1 / 91.8, 17.0 / 17.9),
}


@dataclass(frozen=True, slots=True)
class Resident:
    """A job on a device, with what its neighbours notice of it."""

    model: str | None
    priority: Priority


@dataclass(frozen=True)
class Interference:
    """Speeds of jobs that share a device. Every number here is an assumption, and reports print it.

    - ``packing_efficiency``: the part of a device that packed jobs use together, as a share of one job alone: the mean over
      the six models of Gandiva's table 1 that fill a device (0.73 to 0.93).
    - ``contention``: by how much steps of a guaranteed job get longer beside neighbours under control, for the share of the
      device that these use: the mean of the two pairs that AntMan published (3.5 % beside 0.65, 0.8 % beside 0.22).
    - ``allowed_slowdown``: by how much they may get longer; the controller slows the neighbours down until they do not.
    - ``least_leftover``: the share that a guaranteed job leaves even if its utilization, which counts time and not the work
      done in it, fills the device; 0.22 is what GCN got beside ResNet-50, at the demand assumed for it.
    - ``queueing``: without control, a job waits for kernels of jobs that keep the device busier. Its speed is at most 1 / (1
      + queueing x sum of what their utilizations are above its own). The one such pair that AntMan published (ESPnet 5.23
      times slower beside ResNet-50) means 6.6; equal models (Gandiva) and the mean of Gavel's pairs (1.32 together) mean 0.
    - ``utilization_scale`` multiplies all utilizations, for sensitivity tables.
    """

    models: Mapping[str, ModelProfile] = field(default_factory=lambda: KNOWN_MODELS)
    pairs: Mapping[Pair, tuple[float, float]] = field(default_factory=dict)
    controlled_pairs: Mapping[Pair, tuple[float, float]] = field(default_factory=lambda: CONTROLLED_PAIRS)
    packing_efficiency: float = 0.86
    contention: float = 0.044
    allowed_slowdown: float = Allowed().median
    least_leftover: float = 0.22
    queueing: float = 0.0
    utilization_scale: float = 1.0
    device_memory: int = 32 * GIB
    _known: dict[tuple[bool, tuple[Resident, ...]], tuple[float, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def parameters(self) -> dict[str, float | int | str]:
        """Return the assumptions by name, as reports print them."""
        return {
            "packing_efficiency": self.packing_efficiency,
            "contention": self.contention,
            "allowed_slowdown": self.allowed_slowdown,
            "least_leftover": self.least_leftover,
            "queueing": self.queueing,
            "utilization_scale": self.utilization_scale,
            "device_memory": f"{self.device_memory / GIB:g} GiB",
            "measured pairs": len(self.pairs) // 2,
        }

    def profile(self, model: str | None) -> ModelProfile:
        """Return the profile of a model; ``UNKNOWN`` if there is none."""
        found = self.models.get(model or "", UNKNOWN)
        if self.utilization_scale == 1.0:
            return found
        demand = None if found.demand is None else found.demand * self.utilization_scale
        return replace(found, utilization=min(1.0, found.utilization * self.utilization_scale), demand=demand)

    def utilization(self, model: str | None) -> float:
        """Return the share of time in which a model alone keeps its device busy."""
        return self.profile(model).utilization

    def memory(self, model: str | None) -> int:
        """Return the bytes that a model holds on each device."""
        return self.profile(model).memory

    def demand(self, model: str | None) -> float:
        """Return the share of a device that a model takes when packed; above 1 if packing loses throughput."""
        profile = self.profile(model)
        return profile.demand if profile.demand is not None else profile.utilization / self.packing_efficiency

    def load(self, guaranteed: str | None, others: Sequence[str | None]) -> Load:
        """Return the load that opportunistic models put on the device of a guaranteed one."""
        left = max(self.least_leftover, 1.0 - self.demand(guaranteed))
        return Load(min(1.0, self._asked(others)), left, self.contention)

    def _asked(self, models: Sequence[str | None]) -> float:
        # Sorted, as float addition depends on the order, and equal sets of models must give equal speeds.
        return sum(sorted(self.demand(model) for model in models))

    def speeds(self, residents: Sequence[Resident], controlled: bool) -> tuple[float, ...]:
        """Return the speed of each job on one device, in the order given.

        Raises:
            ValueError: Under control, more than one job is guaranteed.
        """
        if len(residents) < 2:
            return (1.0,) * len(residents)
        key = (controlled, tuple(residents))
        if key not in self._known:
            self._known[key] = self._speeds(residents, controlled)
        return self._known[key]

    def of(self, sharing: str) -> Callable[[object, Sequence[Entry]], Sequence[float]] | None:
        """Return the ``speeds`` of ``Simulator`` for a policy's way of sharing; None if devices are not shared."""
        return {"controlled": self.under_control, "packed": self.packed}.get(sharing)

    def under_control(self, device: object, entries: Sequence[Entry]) -> tuple[float, ...]:
        """Return the speeds of entries on a device with an interference controller."""
        return self.speeds([Resident(entry.submission.model, entry.priority) for entry in entries], True)

    def packed(self, device: object, entries: Sequence[Entry]) -> tuple[float, ...]:
        """Return the speeds of entries on a device without control."""
        return self.speeds([Resident(entry.submission.model, entry.priority) for entry in entries], False)

    def _speeds(self, residents: Sequence[Resident], controlled: bool) -> tuple[float, ...]:
        first = [at for at, one in enumerate(residents) if one.priority == "guaranteed"]
        if controlled and len(first) > 1:
            raise ValueError("under control a device has at most one guaranteed job, not " + str(len(first)))
        if controlled and first:
            return self._beside_guaranteed(residents, first[0])
        if len(residents) == 2:
            measured = self.pairs.get((residents[0].model or "", residents[1].model or ""))
            if measured is not None:
                return measured
        room = self._in_memory([one.model for one in residents], self.device_memory, controlled)
        share = min(1.0, 1.0 / sum(self.demand(one.model) for one in residents))
        if not self.queueing:
            return tuple(share * in_memory for in_memory in room)
        busy = [self.utilization(one.model) for one in residents]
        # Summed over the neighbours that are busier than the job itself: it waits for their kernels.
        behind = [sum(max(0.0, other - own) for other in busy) for own in busy]
        return tuple(min(share, 1.0 / (1.0 + self.queueing * more)) * in_memory for more, in_memory in zip(behind, room))

    def _beside_guaranteed(self, residents: Sequence[Resident], first: int) -> tuple[float, ...]:
        # Only the guaranteed job is sure of its memory: what it leaves is all that the others have.
        guaranteed = residents[first].model
        others = [one.model for at, one in enumerate(residents) if at != first]
        if len(others) == 1:
            pair = self.controlled_pairs.get((guaranteed or "", others[0] or ""))
            if pair is not None:
                return pair if first == 0 else (pair[1], pair[0])
        pace = coordinated(self.load(guaranteed, others), self.allowed_slowdown)
        share = pace.taken / self._asked(others)
        room = self._in_memory(others, self.device_memory - self.memory(guaranteed), True)
        speeds = [share * in_memory for in_memory in room]
        speeds.insert(first, pace.guaranteed)
        return tuple(speeds)

    def _in_memory(self, models: Sequence[str | None], memory: int, chosen: bool) -> list[float]:
        """Return the speeds of jobs whose memory lies partly in host memory.

        With ``chosen`` the jobs are paged out that lose least by it, as AntMan's coordinator finds out by trial; otherwise
        all by the same share.
        """
        wanted = sum(self.memory(model) for model in models)
        lacking = max(0, wanted - max(memory, 0))
        if not lacking:
            return [1.0] * len(models)
        if not chosen:
            return [1.0 / (1.0 + self.profile(model).paging * lacking / wanted) for model in models]
        speeds = [1.0] * len(models)
        for at in sorted(range(len(models)), key=lambda at: self.profile(models[at]).paging / self.memory(models[at])):
            out = min(lacking, self.memory(models[at]))
            speeds[at] = 1.0 / (1.0 + self.profile(models[at]).paging * out / self.memory(models[at]))
            lacking -= out
        return speeds


def gavel_name(model: str, batch: str) -> str:
    """Return a model of Gavel's with its batch size, as its traces write it."""
    return f"{model} (batch size {batch})" if batch else model


def read_gavel_pairs(path: Path, gpu: str = "v100") -> dict[Pair, tuple[float, float]]:
    """Read the speeds of both jobs of each pair measured on ``gpu``, in both orders.

    Pairs without a working measurement (0) are left out.

    Raises:
        ValueError: The file has no pair of that GPU.
    """
    pairs: dict[Pair, tuple[float, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            speeds = float(row["norm1"]), float(row["norm2"])
            if row["gpu"] != gpu or min(speeds) <= 0:
                continue
            one, two = gavel_name(row["model1"], row["bs1"]), gavel_name(row["model2"], row["bs2"])
            pairs[one, two] = speeds
            pairs[two, one] = speeds[1], speeds[0]
    if not pairs:
        raise ValueError(f"{path} has no pair measured on {gpu!r}. Choose one of its column 'gpu'.")
    return pairs


def gavel_models(pairs: Mapping[Pair, tuple[float, float]], packing_efficiency: float = 0.86) -> dict[str, ModelProfile]:
    """Return profiles of Gavel's models, from two copies of each side by side: a speed of s means a demand of 1 / (2 s)."""
    profiles = {}
    for (one, two), (speed, _) in pairs.items():
        if one == two:
            demand = 1.0 / (2.0 * speed)
            busy = min(1.0, demand * packing_efficiency)
            profiles[one] = ModelProfile(one, busy, 4 * GIB, "gavel_colocation.csv, itself twice", demand=demand)
    return profiles


def read_gandiva_models(path: Path) -> dict[str, ModelProfile]:
    """Read the models of Gandiva's table 1: packed, they do (1 + gain) times as much as by time slicing. Memory is assumed."""
    profiles = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            profiles[row["model"]] = ModelProfile(
                row["model"],
                float(row["gpu_util_pct"]) / 100,
                4 * GIB,
                "Gandiva table 1; memory assumed",
                demand=1.0 / (1.0 + float(row["gain_pct"]) / 100),
            )
    return profiles
