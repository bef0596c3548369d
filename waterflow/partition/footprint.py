"""What a step asks of memory before any of it has a place, with batches of one size or, by lines through two, of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from waterflow.partition.costs import Cost
from waterflow.partition.liveness import Lifetime, OperationMemory, held_by
from waterflow.partition.offsets import ALIGNMENT, Offsets, place, planned, resident


@dataclass(frozen=True)
class Footprint:
    """A captured step with batches of one size. Bytes.

    ``lives`` is all that the step makes, ``costs`` what each operation asks of the device; ``persistent`` counts parameters, buffers
    and optimizer state, ``batch`` one batch. The first ``forward`` operations are the forward pass. ``lines`` has what
    made each operation: the user's ``file:line``, or else its module or its own name.
    """

    lives: tuple[Lifetime, ...]
    costs: tuple[Cost, ...]
    persistent: int
    batch: int
    forward: int | None = None
    lines: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def operations(self) -> int:
        """How many operations the step has."""
        return len(self.costs)

    def live(self, alignment: int = ALIGNMENT) -> int:
        """The most bytes that are live at once, of what can be planned."""
        return max(resident(planned(self.lives, alignment), self.operations), default=0)

    def memory(self) -> list[OperationMemory]:
        """The step's memory operation by operation."""
        return held_by(self.lives, [cost.bytes for cost in self.costs])

    def offsets(self) -> Offsets:
        """Where the step's memory would lie, from one end of an arena."""
        return place(self.lives, self.operations, costs=self.costs)

    def same_shape(self, other: Footprint) -> bool:
        """Whether both consist of the same pieces, made, touched and let go by the same operations."""
        parts = (self.operations, self.forward) == (other.operations, other.forward)
        return parts and list(map(_form, self.lives)) == list(map(_form, other.lives))

    def on_line(self, size: int, other: Footprint, other_size: int, wanted: int) -> Footprint | None:
        """With batches of ``wanted``, where all bytes grow along lines through this one, of ``size``, and the other.

        None where the two differ in more than bytes. What operators round themselves is only near the line.
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
