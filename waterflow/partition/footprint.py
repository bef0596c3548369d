"""What a step asks of memory before any of it has a place, with batches of one size or, by lines through two, of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from waterflow.partition.costs import Cost
from waterflow.partition.liveness import Hidden, Lifetime, OperationMemory, held_by
from waterflow.partition.offsets import ALIGNMENT, Offsets, place, planned, resident
from waterflow.partition.probe import Question, answers, on_line


@dataclass(frozen=True)
class Footprint:
    """A captured step with batches of one size. Bytes.

    ``lives`` is all that the step makes, ``costs`` what each operation asks of the device; ``persistent`` counts parameters, buffers
    and optimizer state, ``batch`` one batch. The first ``forward`` operations are the forward pass. ``lines`` has what
    made each operation: the user's ``file:line``, or else its module or its own name.
    ``hidden`` names the lives whose sizes were ``asked``, as no shape tells them.
    """

    lives: tuple[Lifetime, ...]
    costs: tuple[Cost, ...]
    persistent: int
    batch: int
    forward: int | None = None
    lines: tuple[str, ...] = field(default=(), compare=False, repr=False)
    asked: tuple[Question, ...] = field(default=(), compare=False, repr=False)
    hidden: tuple[Hidden, ...] = field(default=(), compare=False, repr=False)

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
        parts = (self.operations, self.forward, self.hidden) == (other.operations, other.forward, other.hidden)
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

        None where the two differ in more than bytes. What was asked is rounded, and only near the line: see ``asking``.
        """
        if not self.same_shape(other):
            return None

        def line(one: int, another: int) -> int:
            return max(0, one + (another - one) * (wanted - size) // (other_size - size))

        asked = on_line(self.asked, other.asked, line)
        if asked is None:
            return None
        given = iter([line(one, another) for one, another in zip(_bytes(self), _bytes(other), strict=True)])
        lives = tuple(replace(life, size=next(given)) for life in self.lives)
        costs = tuple(Cost(next(given), next(given), next(given)) for _ in self.costs)
        held = next(given), next(given)
        return Footprint(lives, costs, *held, self.forward, self.lines, asked, self.hidden)

    def asking(self) -> Footprint:
        """The same with what the operators that hide memory say now. Runs them, unless the same has been asked before."""
        told = answers(self.asked)
        lives = list(self.lives)
        for hidden in self.hidden:
            answer = told[hidden.question]
            size = answer.temporary if hidden.result is None else answer.results[hidden.result]
            lives[hidden.life] = replace(lives[hidden.life], size=size)
        return replace(self, lives=tuple(lives))


def _form(life: Lifetime) -> tuple[object, ...]:
    return life.birth, life.death, life.kept, life.reads, life.writes


def _bytes(footprint: Footprint) -> Iterator[int]:
    yield from (life.size for life in footprint.lives)
    for cost in footprint.costs:
        yield from (cost.bytes, cost.flops, cost.launches)
    yield footprint.persistent
    yield footprint.batch
