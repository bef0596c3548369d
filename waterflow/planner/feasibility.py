"""Does it fit? Which jobs train together, each with the batch that it has; bytes throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.executor.memory_limit import Need as Need
from waterflow.executor.memory_limit import needed as needed


@dataclass(frozen=True)
class Feasibility:
    """Which jobs train together in ``room`` bytes: ``turns`` are sets of them, by their places, one after the other.

    A job that is in none of them does not fit alone, or has no need that is known.
    """

    room: int
    needs: tuple[Need | None, ...]
    turns: tuple[tuple[int, ...], ...]

    @property
    def together(self) -> tuple[Need, ...]:
        """The jobs that train first."""
        return self.of(self.turns[0]) if self.turns else ()

    @property
    def fits(self) -> bool:
        """Whether all jobs train together."""
        return len(self.together) == len(self.needs)

    def of(self, turn: Sequence[int]) -> tuple[Need, ...]:
        """The needs of the jobs at these places."""
        return tuple(need for i in turn if (need := self.needs[i]) is not None)


def largest_set(jobs: Sequence[Need], memory: int) -> tuple[int, ...]:
    """As many jobs as fit together into ``memory`` bytes, by their places in ``jobs``; of equal sets the smallest one.

    Jobs train together as long as each step fits beside what all of them hold; steps that do not fit side by side take
    turns, group by group. So a set fits when all that it holds and its highest step do. For each height, those that hold
    least among the jobs that are no higher are the most that fit: looking at each gives the largest set there is.
    """
    best: tuple[int, ...] = ()
    least = 0
    for height in sorted({job.height for job in jobs}):
        candidates = sorted((job.held, i) for i, job in enumerate(jobs) if job.height <= height)
        taken: list[int] = []
        held = 0
        for more, i in candidates:
            if held + more + height > memory:
                break
            held += more
            taken.append(i)
        if len(taken) > len(best) or (len(taken) == len(best) and held < least):
            best, least = tuple(sorted(taken)), held
    return best


def feasible(jobs: Sequence[Need | None], room: int) -> Feasibility:
    """All jobs that fit alone, in sets that train one after the other, each the largest of those that are left."""
    left = {i: job for i, job in enumerate(jobs) if job is not None and job.peak <= room}
    turns = []
    while left:
        places = list(left)
        turns.append(tuple(places[i] for i in largest_set([*left.values()], room)))
        left = {i: job for i, job in left.items() if i not in turns[-1]}
    return Feasibility(room, tuple(jobs), tuple(turns))
