"""Planned memory: an offset for each piece of memory that a step makes, counted from its lane's end of the arena.

Memory rises through the forward pass and falls through the backward pass, so a step is nearly a stack. The order in
which its pieces are placed decides how nearly (``csrc/offsets.cpp``; ``docs/experiments/memory.md`` compares orders).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from waterflow import _C
from waterflow.partition.plan.costs import Cost
from waterflow.partition.plan.liveness import Lifetime, OperationMemory, held_by

ALIGNMENT = 64  # bytes; what torch's CPU allocator gives
CUDA_ALIGNMENT = 512  # what torch's allocator on GPUs gives: matrix kernels are chosen by it
# Comparisons that the search for a better placement may make: about a third of a second. A step with more memory than
# that allows for is placed once by each order.
MOST_WORK = 300_000_000

Order = Literal["death", "life", "birth", "size", "area"]


@dataclass(frozen=True)
class Offsets:
    """The placement of a step's memory. ``heights`` has the furthest live byte of each operation, ``resident`` its live bytes.

    Memory that outlives the step has no offset, nor has an empty piece. ``costs`` has each operation's cost, or is
    empty.
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
        """The height over the most bytes that are ever live at once; 1.0 is the floor."""
        return self.height / max((1, *self.resident))

    @property
    def area_excess(self) -> float:
        """The sum of heights over the sum of live bytes, both over all operations."""
        return sum(self.heights) / max(1, sum(self.resident))

    def by(self, order: Order | None) -> Offsets:
        """Place the same memory in one order without a search; None searches anew. For comparisons."""
        if order is None:
            return _place(self.lives, len(self.heights), MOST_WORK, self.costs)
        given = _plain(self.lives)
        ordered = _C.placement_order(given, getattr(_C.PlacementOrder, order))
        made = _C.place_in_order(given, ordered, len(self.heights))
        return Offsets(self.lives, tuple(made.offsets), tuple(made.heights), self.resident, self.costs)

    def after(self) -> tuple[int, ...]:
        """Return the furthest byte that is live after each operation. Walks the plan, and raises ValueError as ``check`` does."""
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
        """Walk the plan. Raises ValueError where two pieces share a byte while both live, or a height is wrong."""
        self.after()

    def _piece(self, number: int) -> str:
        life, at = self.lives[number], self.offsets[number]
        return f"bytes {at} to {at + life.size}, operations {life.birth} to {life.death}"


def planned(lives: Iterable[Lifetime], alignment: int = ALIGNMENT) -> tuple[Lifetime, ...]:
    """Return the pieces that can be planned: all that die with the step, with their sizes rounded up to ``alignment``."""
    return tuple(replace(life, size=-(-life.size // alignment) * alignment) for life in lives if life.size > 0 and not life.kept)


def place(
    lives: Iterable[Lifetime], operations: int, alignment: int = ALIGNMENT, work: int = MOST_WORK, costs: tuple[Cost, ...] = ()
) -> Offsets:
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
    """Return the bytes that are live during each operation."""
    change = [0] * (operations + 1)
    for life in lives:
        change[life.birth] += life.size
        # A piece is live through the whole of its last operation.
        change[life.death + 1] -= life.size
    held, total = [], 0
    for step in change[:-1]:
        total += step
        held.append(total)
    return held


@dataclass(frozen=True)
class Footprint:
    """The memory and costs of a captured step with batches of one size. Bytes.

    ``lives`` has every piece of memory that the step makes, ``costs`` the cost of each operation; ``persistent`` counts
    parameters, buffers and optimizer state, ``batch`` one batch. The first ``forward`` operations are the forward pass.
    ``lines`` names the origin of each operation: the user's ``file:line``, or else its module or its own name.
    """

    lives: tuple[Lifetime, ...]
    costs: tuple[Cost, ...]
    persistent: int
    batch: int
    forward: int | None = None
    lines: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def operations(self) -> int:
        """The number of the step's operations."""
        return len(self.costs)

    def live(self, alignment: int = ALIGNMENT) -> int:
        """Return the most bytes that are live at once, of the memory that can be planned."""
        return max(resident(planned(self.lives, alignment), self.operations), default=0)

    def memory(self) -> list[OperationMemory]:
        """Return the step's memory, operation by operation."""
        return held_by(self.lives, [cost.bytes for cost in self.costs])

    def offsets(self) -> Offsets:
        """Place the step's memory, from one end of an arena."""
        return place(self.lives, self.operations, costs=self.costs)

    def same_shape(self, other: Footprint) -> bool:
        """Return whether both consist of the same pieces, which the same operations make, touch and release."""
        parts = (self.operations, self.forward) == (other.operations, other.forward)
        return parts and list(map(_form, self.lives)) == list(map(_form, other.lives))

    def on_line(self, size: int, other: Footprint, other_size: int, wanted: int) -> Footprint | None:
        """Return the footprint with batches of ``wanted``, by a line through this one (``size``) and the other (``other_size``).

        Returns None if the two differ in more than bytes. Sizes that operators round themselves are only near the line.
        """
        if not self.same_shape(other):
            return None

        def line(one: int, another: int) -> int:
            return max(0, one + (another - one) * (wanted - size) // (other_size - size))

        given = iter([line(one, another) for one, another in zip(_bytes(self), _bytes(other), strict=True)])
        lives = tuple(replace(life, size=next(given)) for life in self.lives)
        costs = tuple(Cost(next(given), next(given), next(given)) for _ in self.costs)
        return Footprint(lives, costs, next(given), next(given), self.forward, self.lines)


def _form(life: Lifetime) -> tuple[object, ...]:
    return life.birth, life.death, life.kept, life.reads, life.writes


def _bytes(footprint: Footprint) -> Iterator[int]:
    yield from (life.size for life in footprint.lives)
    for cost in footprint.costs:
        yield from (cost.bytes, cost.flops, cost.launches)
    yield footprint.persistent
    yield footprint.batch
