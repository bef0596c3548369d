"""Plans: a step cut into node groups, always at its peak, and evenly elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from waterflow.partition.plan.liveness import OperationMemory
from waterflow.partition.plan.profile import PlannedRequests
from waterflow.units import format_bytes as format_bytes

DEFAULT_GROUPS = 32
# A group shorter than this costs more to admit than it can win.
FEWEST_OPERATIONS = 8
SHORTEST_SECONDS = 40e-6


def cut(peaks: Sequence[int], afters: Sequence[int], weights: Sequence[float], groups: int = DEFAULT_GROUPS) -> list[int]:
    """Return where the groups end (exclusive), given each operation's peak and its height afterwards, in bytes.

    ``weights`` is the quantity to divide evenly among groups: seconds where they were measured, else bytes moved. Where
    heights change fast, groups are finer: half of the weight is the change of height. One group ends after the
    operation with the highest peak, so that every group either gains memory or gives it back.
    """
    count = len(peaks)
    if count == 0:
        return []
    groups = max(1, min(groups, count // FEWEST_OPERATIONS or 1))
    top = max(range(count), key=lambda i: (peaks[i], -i))
    # The peak's operation closes the rise only if it keeps what it took.
    summit = top + 1 if top + 1 < count else count
    if groups == 1:
        return [count] if summit == count else [summit, count]
    total = sum(weights) or 1.0
    steps = [abs(afters[i] - (afters[i - 1] if i else 0)) for i in range(count)]
    climb = sum(steps) or 1
    # The small constant keeps every share above zero.
    mixed = [w / total + s / climb + 1e-9 for w, s in zip(weights, steps)]
    ends: list[int] = []
    for begin, end in ((0, summit), (summit, count)):
        if begin == end:
            continue
        share = sum(mixed[begin:end])
        pieces = max(1, round(groups * share / sum(mixed)))
        pieces = min(pieces, max(1, (end - begin) // (FEWEST_OPERATIONS // 2)))
        ends.extend(_even(mixed, begin, end, pieces))
    return ends


def _even(weights: Sequence[float], begin: int, end: int, pieces: int) -> list[int]:
    share = sum(weights[begin:end]) / pieces
    ends: list[int] = []
    gathered = 0.0
    for i in range(begin, end):
        gathered += weights[i]
        if gathered >= share * (len(ends) + 1) - 1e-12 and len(ends) < pieces - 1 and i + 1 < end:
            ends.append(i + 1)
    ends.append(end)
    return ends


@dataclass(frozen=True)
class NodeGroup:
    """Operations [begin, end) of a step, the unit of scheduling.

    ``before``, ``peak`` and ``after`` are heights in bytes above the step's beginning; ``traffic`` is in bytes.
    """

    index: int
    begin: int
    end: int
    before: int
    peak: int
    after: int
    traffic: int
    seconds: float

    @property
    def kind(self) -> Literal["allocation", "deallocation"]:
        """``allocation`` if the group ends with more memory than it began with, else ``deallocation``."""
        return "allocation" if self.after > self.before else "deallocation"


@dataclass(frozen=True)
class Plan:
    """The plan of one job's step: its memory, group by group.

    ``persistent`` counts the bytes of parameters, buffers and optimizer state; ``batch`` those of one batch on the
    device. ``measured`` is True if heights come from a profiled step, kernels' temporaries included, and False if they
    come from the graph alone. A step that asks for the same memory every time has ``requests``: the place of each
    request in an arena. ``forward`` counts the operations before the backward pass; 0 where that is not known. At most
    ``offloaded`` bytes of activations are in host memory; heights do not count them.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    operations: int
    persistent: int
    batch: int
    measured: bool
    requests: PlannedRequests | None = field(default=None, repr=False)
    forward: int = 0
    offloaded: int = 0

    @functools.cached_property
    def height(self) -> int:
        """The highest point of the step, in bytes above what persists."""
        return max((group.peak for group in self.groups), default=0)

    @property
    def peak(self) -> int:
        """All that the job holds at its highest: persistent state, one batch, and the step's height."""
        return self.persistent + self.batch + self.height

    @functools.cached_property
    def seconds(self) -> float:
        """The measured time of one step alone; 0 before it was profiled."""
        return sum(group.seconds for group in self.groups)

    def renamed(self, name: str) -> Plan:
        """Return the same plan under another job's name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        source = "measured in a profiled step" if self.measured else "predicted from the graph"
        lines = [
            f"plan of {self.name}: {self.operations} operations in {len(self.groups)} groups, {source}",
            f"  persistent {format_bytes(self.persistent)}, batch {format_bytes(self.batch)}, "
            f"height {format_bytes(self.height)}, peak {format_bytes(self.peak)}",
            f"  {'group':>5} {'operations':>12} {'kind':>13} {'before':>11} {'peak':>11} {'after':>11} {'time':>9}",
        ]
        for g in self.groups:
            time = f"{g.seconds * 1e3:.3f} ms" if g.seconds else "-"
            lines.append(
                f"  {g.index:>5} {f'{g.begin}..{g.end - 1}':>12} {g.kind:>13} {format_bytes(g.before):>11} "
                f"{format_bytes(g.peak):>11} {format_bytes(g.after):>11} {time:>9}"
            )
        return "\n".join(lines)


def make_plan(
    name: str,
    memory: Sequence[OperationMemory],
    *,
    persistent: int,
    batch: int,
    seconds: Sequence[float] | None = None,
    groups: int = DEFAULT_GROUPS,
    requests: PlannedRequests | None = None,
    forward: int = 0,
    offloaded: int = 0,
) -> Plan:
    """Cut operations into about ``groups`` node groups. ``seconds`` has each operation's time if a profile measured it."""
    peaks = [m.peak for m in memory]
    afters = [m.after for m in memory]
    # Before a profile the bytes that an operation moves stand for its time.
    weights = list(seconds) if seconds is not None else [float(m.traffic) for m in memory]
    if seconds is not None:
        groups = min(groups, max(2, int(sum(seconds) / SHORTEST_SECONDS)))
    ends = cut(peaks, afters, weights, groups)
    made: list[NodeGroup] = []
    begin = before = 0
    for index, end in enumerate(ends):
        after = afters[end - 1]
        if index == len(ends) - 1:
            after = 0  # the step is over: outputs are ordinary tensors, everything else is released
        made.append(
            NodeGroup(
                index=index,
                begin=begin,
                end=end,
                before=before,
                peak=max(before, after, *peaks[begin:end]),
                after=after,
                traffic=sum(m.traffic for m in memory[begin:end]),
                seconds=sum(seconds[begin:end]) if seconds is not None else 0.0,
            )
        )
        begin, before = end, after
    return Plan(name, tuple(made), len(memory), persistent, batch, seconds is not None, requests, forward, offloaded)


def opaque_plan(name: str, height: int, *, persistent: int, batch: int, seconds: float = 0.0) -> Plan:
    """Return a plan of one group for a step that runs eagerly, with the height that was measured or allowed for it."""
    group = NodeGroup(0, 0, 1, 0, height, 0, 0, seconds)
    return Plan(name, (group,), 1, persistent, batch, seconds > 0)
