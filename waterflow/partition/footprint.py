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
    and optimizer state, ``batch`` one batch. Where the batch is among the lives, ``batch`` is 0 and ``copied`` counts what
    has to come with each step. The first ``forward`` operations are the forward pass. ``lines`` has the user's line behind
    each operation, as ``file:line``.
    """

    lives: tuple[Lifetime, ...]
    costs: tuple[Cost, ...]
    persistent: int
    batch: int
    copied: int = 0
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

    def distance(self, other: Footprint) -> int:
        """Bytes by which the pieces of two footprints of one shape differ, summed up."""
        pairs = zip(self.lives, other.lives, strict=True)
        return sum(abs(one.size - another.size) for one, another in pairs) + abs(self.held - other.held)

    @property
    def held(self) -> int:
        """What the job holds all the time."""
        return self.persistent + self.batch

    def on_line(self, size: int, other: Footprint, other_size: int, wanted: int) -> Footprint | None:
        """With batches of ``wanted``, where all bytes grow along lines through this one, of ``size``, and the other.

        None where the two differ in more than bytes.
        """
        if not self.same_shape(other):
            return None
        values = zip(_bytes(self), _bytes(other), strict=True)
        given = iter([_line(size, one, other_size, another, wanted) for one, another in values])
        lives = tuple(replace(life, size=next(given)) for life in self.lives)
        costs = tuple(Cost(next(given), next(given), next(given)) for _ in self.costs)
        return Footprint(lives, costs, next(given), next(given), next(given), self.forward, self.lines)


def _form(life: Lifetime) -> tuple[object, ...]:
    return life.birth, life.death, life.kept, life.reads, life.writes


def _bytes(footprint: Footprint) -> Iterator[int]:
    yield from (life.size for life in footprint.lives)
    for cost in footprint.costs:
        yield from (cost.bytes, cost.flops, cost.launches)
    yield footprint.persistent
    yield footprint.batch
    yield footprint.copied


def _line(at: int, value: int, other: int, other_value: int, wanted: int) -> int:
    return max(0, value + (other_value - value) * (wanted - at) // (other - at))
