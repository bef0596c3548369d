"""From profiled steps to heights: real requests and times in the place of predicted ones."""

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
    """Every request of a step, in order, with its place: bytes from the lane's end, -1 for what outlives the step.

    Births and deaths are ticks, which count the requests of a step and the ends of its operations. ``first`` has each
    operation's first request, and behind the last one their number; ``ends`` the tick of each operation's end.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    births: tuple[int, ...]
    deaths: tuple[int, ...]
    first: tuple[int, ...]
    ends: tuple[int, ...]
    alignment: int = ALIGNMENT

    def native(self) -> _C.RequestPlan:
        """What lanes replay. Raises ValueError where two requests that live at once share a byte."""
        rows = list(zip(self.sizes, self.offsets, self.births, self.deaths))
        return _C.RequestPlan(rows, list(self.first), list(self.ends), self.alignment)


@dataclass(frozen=True)
class StepProfile:
    """The executor's record of one step.

    ``table`` has a row per operation: bytes at its highest above what was held when it began, bytes that it left
    behind, nanoseconds, requests. ``requests`` has a row per request: bytes, birth, death (-1: it outlives the step);
    ``ends`` has the tick of each operation's end.
    """

    table: torch.Tensor
    requests: torch.Tensor
    first: Sequence[int]
    ends: Sequence[int]
    alignment: int = ALIGNMENT  # of planned addresses

    @classmethod
    def of(cls, run: _C.StepRun, device: torch.device | None = None) -> StepProfile:
        """From a step that was run with its profile, on ``device``."""
        on_gpu = device is not None and device.type == "cuda"
        requests, first, ends = run.requests()
        return cls(run.profile(), requests, first, ends, CUDA_ALIGNMENT if on_gpu else ALIGNMENT)

    def same_requests(self, other: StepProfile) -> bool:
        """Whether both steps asked for the same memory in the same order, and gave it back when the other did."""
        return torch.equal(self.requests, other.requests) and self.first == other.first and self.ends == other.ends

    def memory(self, predicted: Sequence[OperationMemory]) -> tuple[list[OperationMemory], list[float]]:
        """Bytes held and seconds of each operation, as they were."""
        held = 0
        memory, seconds = [], []
        for (peak, net, nanoseconds, _), before in zip(self.table.tolist(), predicted):
            top = held + max(peak, net, 0)
            held = max(0, held + net)
            memory.append(OperationMemory(max(top, held), held, before.traffic))
            seconds.append(nanoseconds * 1e-9)
        return memory, seconds

    def place(self, predicted: Sequence[OperationMemory]) -> tuple[list[OperationMemory], PlannedRequests]:
        """A place for every request that dies within the step; and the heights of each operation that follow.

        What outlives the step has none, and counts on top of the heights.
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
        births_, deaths_ = tuple(births), tuple(max(b, d) for b, d in zip(births, deaths))
        rows = tuple(sizes), tuple(offsets), births_, deaths_, tuple(self.first), tuple(self.ends)
        return memory, PlannedRequests(*rows, unit)


def _placed(lives: list[tuple[int, int, int]], ends: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets of lives in ticks, and the furthest byte at each tick.

    The search does not find the best of all. Where it stays above the bytes that are live, lives are also placed as the
    graph knows them, by whole operations, which is how the step was planned before it ran: the lower of both is taken.
    """
    ticks = ends[-1] + 1
    made = _C.place(lives, ticks, MOST_WORK)
    change = [0] * (ticks + 1)
    for birth, death, size in lives:
        change[birth] += size
        change[death + 1] -= size
    if max(made.heights, default=0) > max(itertools.accumulate(change)):
        coarse = [(bisect_left(ends, birth), bisect_left(ends, death), size) for birth, death, size in lives]
        other = _C.place(coarse, len(ends), MOST_WORK)
        if max(other.heights) < max(made.heights):
            return other.offsets, _C.walk_offsets(lives, other.offsets, ticks).during
    return made.offsets, made.heights
