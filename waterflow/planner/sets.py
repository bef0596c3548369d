"""Which jobs can train together, each with the batch that it has: the largest set, and why others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """What a job takes, in bytes: ``held`` all the time (state and batches), ``height`` more in the middle of a step."""

    name: str
    held: int
    height: int

    @property
    def peak(self) -> int:
        """All of it, alone."""
        return self.held + self.height


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


def in_turns(jobs: Sequence[Need], memory: int) -> list[tuple[int, ...]]:
    """All jobs that fit alone, in sets that train one after the other; those that do not are in none."""
    left = [i for i, job in enumerate(jobs) if job.peak <= memory]
    turns = []
    while left:
        chosen = largest_set([jobs[i] for i in left], memory)
        turns.append(tuple(left[i] for i in chosen))
        left = [i for i in left if i not in turns[-1]]
    return turns
