"""Many random programs, counted by kind of state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.program_runs import Comparison
from tests.random_programs import KINDS, OPTIMIZERS, Program, modes_of, programs, single
from waterflow.executor.program.capture_cache import captures


def singles(kind: str) -> Iterator[Program]:
    """Each state of a kind alone, in each way in which it can change."""
    for state in KINDS[kind]:
        for mode in dict.fromkeys(modes_of(state)):
            for optimizer in OPTIMIZERS[1:3] if kind.startswith("optimizer") else OPTIMIZERS[:1]:
                yield single(kind, state, mode, optimizer=optimizer)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them."""
    for number in range(len(program.pieces)):
        if len(program.pieces) > 1:
            yield replace(program, pieces=program.pieces[:number] + program.pieces[number + 1 :])
    for number, piece in enumerate(program.pieces):
        simpler = [
            replace(piece, way="plain"), replace(piece, use="factor"), replace(piece, in_function=False),
            replace(piece, scope=piece.state.scope or "closure"), replace(piece, changes=piece.changes[:1]),
        ]  # fmt: skip
        for one in simpler:
            if one != piece:
                yield replace(program, pieces=(*program.pieces[:number], one, *program.pieces[number + 1 :]))
    for simple in (replace(program, accumulate=1), replace(program, optimizer=OPTIMIZERS[0]), replace(program, by_closure=False)):
        if simple != program:
            yield simple


def shrunk(program: Program) -> Program:
    """The smallest program near one that differs which still does."""
    for one in smaller(program):
        if one.compare("shrunk").differences:
            return shrunk(one)
    return program


def forget() -> None:
    """Let go of all captures of this process."""
    captures.clear()


@dataclass
class Tally:
    """What became of programs with one kind of state."""

    programs: int = 0
    changed: int = 0  # programs that change it
    steps: int = 0
    captured: int = 0
    opaque: int = 0
    differences: int = 0  # programs

    def count(self, comparison: Comparison, changing: bool) -> None:
        """One more program."""
        self.programs += 1
        self.changed += changing
        self.steps += comparison.steps
        self.captured += comparison.captured
        self.opaque += comparison.steps - comparison.captured
        self.differences += bool(comparison.differences)


@dataclass
class Campaign:
    """Many random programs, counted by kind; ``differing`` are those that differ."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    ways: dict[str, Tally] = field(default_factory=dict)
    total: Tally = field(default_factory=Tally)
    differing: list[Program] = field(default_factory=list)
    failing: list[tuple[Program, str]] = field(default_factory=list)  # eagerly, though they mean to work

    def run(self, count: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> None:
        """Run ``count`` programs both ways."""
        gc.collect()
        gc.freeze()  # else each capture's look through all objects takes longer than its program
        for number, program in enumerate(programs(count, seed, kinds)):
            comparison = program.compare(f"program_{number % 100}")
            self.total.count(comparison, any(p.changing for p in program.pieces))
            for piece in program.pieces:
                self.tallies.setdefault(piece.kind, Tally()).count(comparison, piece.changing)
                self.ways.setdefault(piece.way, Tally()).count(comparison, piece.changing)
            if comparison.differences:
                self.differing.append(program)
            if comparison.errors and not any(p.state.raises for p in program.pieces):
                self.failing.append((program, comparison.errors[0]))
            if number % 200 == 199:
                forget()
        forget()
        gc.unfreeze()
