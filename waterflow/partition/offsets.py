"""Planned memory: an offset for everything that a step makes, counted from its lane's end of the arena.

Memory rises through the forward pass and falls through the backward pass, so a step is nearly a stack. How nearly is a
matter of the order in which its pieces are placed (``csrc/offsets.cpp``; ``docs/experiments/memory.md`` compares orders).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from waterflow import _C
from waterflow.partition.costs import Cost
from waterflow.partition.liveness import Lifetime

ALIGNMENT = 64  # bytes; what torch's CPU allocator gives
CUDA_ALIGNMENT = 512  # what torch's allocator on GPUs gives: matrix kernels are chosen by it
# Comparisons that the search for a better placement may make: about a third of a second. A step with more memory than
# that allows for is placed once by each order.
MOST_WORK = 300_000_000

Order = Literal["death", "life", "birth", "size", "area"]


@dataclass(frozen=True)
class Offsets:
    """Where a step's memory lies. ``heights`` has the furthest live byte of each operation, ``resident`` the live bytes.

    What outlives the step has no offset, and neither has what has no bytes. ``costs`` has what
    each operation asks of a device, where that is known.
    """

    lives: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    heights: tuple[int, ...]
    resident: tuple[int, ...]
    costs: tuple[Cost, ...] = field(default=(), compare=False)

    @property
    def height(self) -> int:
        """The furthest byte of the step."""
        return max(self.heights, default=0)

    @property
    def excess(self) -> float:
        """Height over the most bytes that are ever live at once; 1.0 is the floor."""
        return self.height / max((1, *self.resident))

    @property
    def area_excess(self) -> float:
        """Heights over live bytes, both summed over the operations."""
        return sum(self.heights) / max(1, sum(self.resident))

    def by(self, order: Order | None) -> Offsets:
        """The same memory, placed in one order without a search; None searches anew. For comparisons."""
        if order is None:
            return _place(self.lives, len(self.heights), MOST_WORK, self.costs)
        given = _plain(self.lives)
        ordered = _C.placement_order(given, getattr(_C.PlacementOrder, order))
        made = _C.place_in_order(given, ordered, len(self.heights))
        return Offsets(self.lives, tuple(made.offsets), tuple(made.heights), self.resident, self.costs)

    def after(self) -> tuple[int, ...]:
        """The furthest byte that is still live behind each operation. Walks the plan and raises as ``check`` does."""
        walk = _C.walk_offsets(_plain(self.lives), list(self.offsets), len(self.heights))
        if walk.overlap is not None:
            one, other, at, size = walk.overlap
            raise ValueError(
                f"two pieces of a step may not share a byte while both live: {one} ({self._piece(one)}) and {other} "
                f"({self._piece(other)}) share {size} from {at}; place the step again"
            )
        if tuple(walk.during) != self.heights:
            at = next(i for i, pair in enumerate(zip(walk.during, self.heights)) if pair[0] != pair[1])
            raise ValueError(
                f"heights must tell how far a step reaches: operation {at} reaches {walk.during[at]} bytes, the plan says "
                f"{self.heights[at]}; place the step again"
            )
        return tuple(walk.after)

    def check(self) -> None:
        """Walk the plan: raises ValueError where two pieces share a byte while both live, or a height is wrong."""
        self.after()

    def _piece(self, number: int) -> str:
        life, at = self.lives[number], self.offsets[number]
        return f"bytes {at} to {at + life.size}, operations {life.birth} to {life.death}"


def planned(lives: Iterable[Lifetime], alignment: int = ALIGNMENT) -> tuple[Lifetime, ...]:
    """What can be planned: all that dies with the step, its size rounded up to whole alignments."""
    return tuple(
        replace(life, size=-(-life.size // alignment) * alignment) for life in lives if life.size > 0 and not life.kept
    )


def place(
    lives: Iterable[Lifetime], operations: int, alignment: int = ALIGNMENT, work: int = MOST_WORK,
    costs: tuple[Cost, ...] = (),
) -> Offsets:  # fmt: skip
    """Place a step's memory so that its height, and its area, come near what is live.

    Raises ValueError for a life that does not lie within the step's ``operations``.
    """
    return _place(planned(lives, alignment), operations, work, costs)


def _place(lives: tuple[Lifetime, ...], operations: int, work: int, costs: tuple[Cost, ...]) -> Offsets:
    made = _C.place(_plain(lives), operations, work)
    return Offsets(lives, tuple(made.offsets), tuple(made.heights), tuple(resident(lives, operations)), costs)


def _plain(lives: Iterable[Lifetime]) -> list[tuple[int, int, int]]:
    return [(life.birth, life.death, life.size) for life in lives]


def resident(lives: Iterable[Lifetime], operations: int) -> list[int]:
    """Bytes that are live during each operation."""
    change = [0] * (operations + 1)
    for life in lives:
        change[life.birth] += life.size
        change[life.death + 1] -= life.size
    held, total = [], 0
    for step in change[:-1]:
        total += step
        held.append(total)
    return held
