"""Exchange: the messages of one step among the members of a group, and the deal of shards by the measured speed of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from waterflow.executor.data.digest import digest
from waterflow.training.shards.agreement import DATA, STATE, check_alike
from waterflow.training.shards.group import Group
from waterflow.training.shards.step import Buffers, FlatSums, ShardedStep, nodes_of

WINDOW = 4  # steps by which the members' speeds are compared
SKIPPED = 2  # steps after a change, which may capture
GAIN = 0.9  # shards move if the slowest member's time then is at most this share


def ranges_by_speed(shards: int, seconds: Sequence[float]) -> list[range]:
    """Return the shards of members that take ``seconds`` for each, such that the slowest ends first; each has at least one."""
    counts = [1] * len(seconds)
    for _ in range(shards - len(seconds)):
        counts[min(range(len(seconds)), key=lambda rank: (counts[rank] + 1) * seconds[rank])] += 1
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends)]


class Exchange:
    """The ``Peers`` of a step in one group. ``dealt`` are the shards of its members from the next step on, if they change.

    ``wants_change`` of the leader, the member of rank 0, tells whether the next group can be entered; all of them see ``changes``
    at the same step. ``devices`` are the members' names, for messages about ``job``.
    """

    def __init__(self, group: Group, job: str, shards: int, devices: Sequence[str], wants_change: Callable[[], bool]) -> None:
        self.group = group
        self._job, self._devices = job, devices
        self.changes = False
        self.dealt: list[range] | None = None
        self.ranges = ranges_by_speed(shards, [1.0] * group.size)
        self._shards = shards
        self._wants_change = wants_change
        self._steps = 0
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(group.size)]

    def deal(self) -> range:
        """Between two steps: return the shards of this member from now on."""
        if self.dealt is not None:
            self.ranges, self.dealt, self._steps = self.dealt, None, 0
            for of_member in self._seconds:
                of_member.clear()
        return self.ranges[self.group.rank]

    def weights(self, mine: list[float]) -> list[float]:
        """Return the weights of all shards; those of others are 0 in ``mine``."""
        return [max(of_shard) for of_shard in zip(*self.gather("a batch", mine))]

    def gather(self, place: str, message: Any) -> list[Any]:
        """Return the messages of all members by rank. Raises InvalidJobError if one of them has come to another ``place``."""
        told = self.group.gather((place, message))
        if any(theirs != place for theirs, _ in told):
            check_alike(self._job, "what comes next", [theirs for theirs, _ in told], self._devices, DATA)
        return [one for _, one in told]

    def check_state(self, mine: dict[str, Any]) -> None:
        """Raise InvalidJobError if the state of other members is another one than ``mine``, which has digests by name."""
        if len(set(self.gather("the end of an epoch", digest(mine)))) > 1:
            check_alike(self._job, "the state", self.gather("its state", mine), self._devices, STATE)

    def exchange(
        self,
        step: ShardedStep,
        alike: dict[str, Any],
        losses: dict[int, float],
        reached: set[str],
        after: dict[int, Buffers],
        seconds: float,
    ) -> tuple[dict[int, float], set[str], dict[int, Buffers]]:
        """Return all shards' losses, the parameters that any of them reaches, and their buffers after the step.

        Raises InvalidJobError if what is to be ``alike`` of the batch is not the same on all members.
        """
        packed = {shard: (tuple(buffers), _packed(buffers)) for shard, buffers in after.items()}
        by_shard = seconds / len(losses) if losses else 0.0
        told = self.gather("a batch", (losses, reached, packed, by_shard, digest(alike), self._wants_change()))
        if len({one[-2] for one in told}) > 1:
            check_alike(self._job, f"the batch of step {step.calls + 1}", self.gather("its data", alike), self._devices, DATA)
        all_losses, all_reached, all_after = dict[int, float](), set[str](), dict[int, Buffers]()
        for other, more, buffers, *_ in told:
            all_losses |= other
            all_reached |= more
            all_after |= {shard: step.unpacked(names, data) for shard, (names, data) in buffers.items()}
        self.changes = told[0][-1]
        self._note([one[3] for one in told])
        return all_losses, all_reached, all_after

    def sum_up(self, sums: FlatSums, nodes: list[list[torch.Tensor]]) -> None:
        """Put the sum over all shards into ``sums``; ``nodes`` has the sums of this process's nodes of the tree."""
        if self.group.size > 1:
            of_members = [list(nodes_of(shards, 0, self._shards)) for shards in self.ranges]
            for number, flat in enumerate(sums.flat):
                self.group.sum_along_tree(flat, [node[number] for node in nodes], of_members, self._shards)
        sums.spare += nodes[:-1]

    def _note(self, seconds: Sequence[float]) -> None:
        # All members compute the same from the same numbers, so that nobody has to tell the others.
        self._steps += 1
        if self._steps <= SKIPPED or not all(seconds):
            return
        for of_member, one in zip(self._seconds, seconds):
            of_member.append(one)
        if len(self._seconds[0]) < WINDOW:
            return
        speeds = [median(one) for one in self._seconds]
        ranges = ranges_by_speed(self._shards, speeds)
        now, then = (max(len(shards) * one for shards, one in zip(deal, speeds)) for deal in (self.ranges, ranges))
        if then <= GAIN * now:
            self.dealt = ranges


def _packed(buffers: Buffers) -> bytes:
    pieces = [buffer.detach().cpu().reshape(-1).view(torch.uint8) for buffer in buffers.values()]
    return torch.cat(pieces).numpy().tobytes() if pieces else b""
