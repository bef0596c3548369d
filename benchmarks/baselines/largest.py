"""The largest batch under any policy, fragmenting ones included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.baselines.policy import Outcome, Policy
from waterflow.errors import InvalidJobError, MemoryLimitError
from waterflow.executor.memory_limit import parse_memory
from waterflow.partition.capture.substitution import no_collections
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.simulate import SimulatedJob
from waterflow.planner.step_sizes import StepSizes

_CONFIRMED = 4
_GRID = 32
_STEPS = 3
_MOST_BATCH = 1 << 24


@dataclass(frozen=True)
class LargestUnder:
    """The largest batch of each of ``copies`` equal jobs in ``memory`` bytes under a policy, as far as was looked.

    ``looked`` has every size that was tried, and whether it fitted.
    """

    policy: str
    copies: int
    memory: int
    size: int
    outcome: Outcome
    looked: tuple[tuple[int, bool], ...]


@no_collections()
def largest_batch_under(
    policy: Policy, sizes: StepSizes, *, memory: int | float | str, copies: int, most: int | None = None
) -> LargestUnder:
    """The largest batch with which ``copies`` jobs of this step train side by side under ``policy``.

    Where memory is fragmented, or groups are cut anew for each size, a batch may fit though a smaller one does not. The
    search goes in growing strides from a guess to a size that fits and a larger one that does not, and halves between
    them. With ``most``, above which nothing can fit (the largest batch alone), it also looks at 32 sizes evenly up to
    there. It ends where four sizes in a row above the best do not fit: the best of what was looked at.

    Raises MemoryLimitError where not even the smallest batch fits, CaptureError for a step that cannot be captured.
    """
    limit = parse_memory(memory)
    if copies < 1:
        raise InvalidJobError(f"at least one copy of a job has to be there; got copies={copies}")

    def jobs(size: int) -> list[SimulatedJob]:
        return [sizes.at(size).job(f"{sizes.step.name}-{i}", _STEPS) for i in range(copies)]

    looked: dict[int, bool] = {}

    def fits(size: int) -> bool:
        if size not in looked:
            looked[size] = policy.fits(jobs(size), limit)
        return looked[size]

    smallest = sizes.smallest().size
    if not fits(smallest):
        refused = policy.run(jobs(smallest), limit).refused
        step = sizes.at(smallest)
        raise MemoryLimitError(
            f"{copies} job(s) of step {sizes.step.name!r} with a batch of {smallest} do not fit into "
            f"{format_bytes(limit)} under {policy.name}: {refused}; train fewer at a time or raise memory=",
            needed=step.alone + (copies - 1) * (step.persistent + step.batch), limit=limit,
        )  # fmt: skip
    best = _search(fits, smallest, max(most * 9 // 10 if most else sizes.given, smallest), _CONFIRMED, most or 0)
    return LargestUnder(policy.name, copies, limit, best, policy.run(jobs(best), limit), tuple(sorted(looked.items())))


def _search(fits: Callable[[int], bool], smallest: int, guess: int, confirmed: int, most: int = 0) -> int:
    """A size that fits while the ``confirmed`` next ones do not; ``smallest`` fits."""
    stride = max(1, guess // 16)
    low = high = guess
    if fits(guess):
        while fits(high := low + stride):
            low, stride = high, 2 * stride
            if low > _MOST_BATCH:
                raise InvalidJobError(f"batches of {low} still fit: this step's memory does not grow with its batch")
    else:
        while not fits(low := max(smallest, high - stride)):
            high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    low = next((size for size in range(most, low, -max(1, most // _GRID)) if fits(size)), low)
    above = low + 1
    while above <= low + confirmed:
        if fits(above):
            low = above
        above += 1
    return low
