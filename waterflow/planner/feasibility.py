"""Find which jobs train together, each with its given batch. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.executor.memory_limit import Need as Need, needed as needed


@dataclass(frozen=True)
class Feasibility:
    """Sets of jobs that train together in ``room`` bytes.

    ``turns`` lists sets of jobs, as indices into ``needs``; the sets train one after the other. A job in no set does not fit
    alone, or its need is None (not known).
    """

    room: int
    needs: tuple[Need | None, ...]
    turns: tuple[tuple[int, ...], ...]

    @property
    def together(self) -> tuple[Need, ...]:
        """The needs of the jobs in the first set."""
        return self.of(self.turns[0]) if self.turns else ()

    @property
    def fits(self) -> bool:
        """Return True if all jobs train together, in one set."""
        return len(self.together) == len(self.needs)

    def of(self, turn: Sequence[int]) -> tuple[Need, ...]:
        """Return the needs of the jobs with the given indices."""
        return tuple(need for i in turn if (need := self.needs[i]) is not None)


def largest_set(jobs: Sequence[Need], memory: int) -> tuple[int, ...]:
    """Return the indices of as many jobs as fit together into ``memory`` bytes; of equally large sets the one that holds least.

    A set fits if the sum of what its jobs hold, plus the highest step among them, is at most ``memory``: steps that do not fit
    side by side take turns, group by group.
    """
    # For a fixed highest step, taking the jobs that hold least gives the most jobs. So one pass over the distinct
    # heights finds the largest set there is; no search over subsets is needed.
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
    """Split the jobs that fit alone into sets that train one after the other, each the largest of the jobs still left."""
    left = {i: job for i, job in enumerate(jobs) if job is not None and job.peak <= room}
    turns = []
    while left:
        places = list(left)
        turns.append(tuple(places[i] for i in largest_set([*left.values()], room)))
        left = {i: job for i, job in left.items() if i not in turns[-1]}
    return Feasibility(room, tuple(jobs), tuple(turns))
