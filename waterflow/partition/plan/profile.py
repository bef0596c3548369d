"""Profiles: heights and times from steps that ran, in the place of predicted ones."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from waterflow import _C
from waterflow.partition.plan.liveness import OperationMemory
from waterflow.partition.plan.offsets import ALIGNMENT, CUDA_ALIGNMENT, MOST_WORK

UNPLANNED = -1


@dataclass(frozen=True)
class PlannedRequests:
    """The requests of a step in order, each with its place: bytes from the lane's end, -1 if it outlives the step.

    Births and deaths are ticks, which count the requests of a step and the ends of its operations. ``first`` has the
    number of each operation's first request, and at its end the number of all requests; ``ends`` has the tick of each
    operation's end.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    births: tuple[int, ...]
    deaths: tuple[int, ...]
    first: tuple[int, ...]
    ends: tuple[int, ...]
    alignment: int = ALIGNMENT

    def native(self) -> _C.RequestPlan:
        """Return the plan that lanes replay. Raises ValueError where two requests that live at once share a byte."""
        rows = list(zip(self.sizes, self.offsets, self.births, self.deaths))
        return _C.RequestPlan(rows, list(self.first), list(self.ends), self.alignment)


@dataclass(frozen=True)
class StepProfile:
    """The executor's record of one step.

    ``table`` has a row per operation: bytes at its highest point above those at its beginning, bytes that it added,
    nanoseconds, requests. ``requests`` has a row per request: bytes, birth, death (-1: it outlives the step); ``ends``
    has the tick of each operation's end.
    """

    table: torch.Tensor
    requests: torch.Tensor
    first: Sequence[int]
    ends: Sequence[int]
    alignment: int = ALIGNMENT  # of planned addresses

    @classmethod
    def of(cls, run: _C.StepRun, device: torch.device | None = None) -> StepProfile:
        """Return the profile of a step that ran with profiling on ``device``."""
        on_gpu = device is not None and device.type == "cuda"
        requests, first, ends = run.requests()
        return cls(run.profile(), requests, first, ends, CUDA_ALIGNMENT if on_gpu else ALIGNMENT)

    def same_requests(self, other: StepProfile) -> bool:
        """Return whether both steps requested and released the same memory in the same order."""
        return torch.equal(self.requests, other.requests) and self.first == other.first and self.ends == other.ends

    def memory(self, predicted: Sequence[OperationMemory]) -> tuple[list[OperationMemory], list[float]]:
        """Return the measured memory and seconds of each operation; ``predicted`` has the traffic, which is not measured."""
        held = 0
        memory, seconds = [], []
        for (peak, net, nanoseconds, _), before in zip(self.table.tolist(), predicted):
            # An operation may release more than it takes: its highest point is then its beginning.
            top = held + max(peak, net, 0)
            held = max(0, held + net)
            memory.append(OperationMemory(max(top, held), held, before.traffic))
            seconds.append(nanoseconds * 1e-9)
        return memory, seconds

    def place(self, predicted: Sequence[OperationMemory]) -> tuple[list[OperationMemory], PlannedRequests]:
        """Return each operation's memory, and the step's requests with a place for each that dies within the step.

        A request that outlives the step has no place, and counts on top of the heights.
        """
        sizes, births, deaths = (column.tolist() for column in self.requests.T)
        planned = [i for i, death in enumerate(deaths) if death >= 0]
        ticks = self.ends[-1] + 1
        unit = self.alignment
        lives = [(births[i], deaths[i], -(-sizes[i] // unit) * unit) for i in planned]
        places, reach = _placed(lives, self.ends)
        kept = [0] * ticks
        for birth, death, size in zip(births, deaths, sizes):
            if death < 0:
                kept[birth] += size
        heights = [height + held for height, held in zip(reach, itertools.accumulate(kept))]
        offsets = [UNPLANNED] * len(sizes)
        for i, offset in zip(planned, places):
            offsets[i] = offset
        memory, begin, before = [], 0, 0
        for end, of_graph in zip(self.ends, predicted):
            after = heights[end]
            memory.append(OperationMemory(max(before, *heights[begin : end + 1]), after, of_graph.traffic))
            begin, before = end + 1, after
        # A request that outlives the step has no place: it counts as dying at its birth.
        births_, deaths_ = tuple(births), tuple(max(b, d) for b, d in zip(births, deaths))
        rows = tuple(sizes), tuple(offsets), births_, deaths_, tuple(self.first), tuple(self.ends)
        return memory, PlannedRequests(*rows, unit)


def _placed(lives: list[tuple[int, int, int]], ends: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    # The search does not find the best placement of all. Where it stays above the live bytes, lives are also placed by
    # whole operations, as the step was planned before it ran, and the lower of both is taken.
    ticks = ends[-1] + 1
    made = _C.place(lives, ticks, MOST_WORK)
    change = [0] * (ticks + 1)
    for birth, death, size in lives:
        change[birth] += size
        change[death + 1] -= size
    if max(made.heights, default=0) > max(itertools.accumulate(change)):
        # Ticks within one operation become equal: pieces that live in the same operation never share bytes.
        coarse = [(bisect_left(ends, birth), bisect_left(ends, death), size) for birth, death, size in lives]
        other = _C.place(coarse, len(ends), MOST_WORK)
        if max(other.heights) < max(made.heights):
            return other.offsets, _C.walk_offsets(lives, other.offsets, ticks).during
    return made.offsets, made.heights
