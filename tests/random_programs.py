"""Random training programs as users write them: a small model, a step, an optimizer, and state that changes between steps or in them.

A program is drawn as data (``Program``), so that one that fails can be made smaller; ``source()`` is its text.
"""

from __future__ import annotations

import inspect
import linecache
import os
import random
import re
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests import program_runs
from tests.program_runs import Comparison, compare
from tests.program_states import PYTHON, State
from tests.program_training import TRAINING

KINDS = {**PYTHON, **TRAINING}
STEPS = 5
VALUES = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)
OPTIMIZERS = (
    "torch.optim.SGD($p, lr=0.1, fused=True)",
    "torch.optim.SGD($p, lr=0.1, momentum=0.9, fused=True)",
    "torch.optim.AdamW($p, lr=0.01, fused=True)",
    "torch.optim.Adam($p, lr=0.01, fused=True)",
)
# How a number reaches the step. ``$r`` is the expression that reads it; with a second text, that is made beside the step.
WAYS: dict[str, tuple[str, str]] = {
    "plain": ("$r", ""),
    "list comprehension": ("sum([$r for _ in (0,)])", ""),
    "generator expression": ("sum($r for _ in (0,))", ""),
    "map": ("next(map(lambda _: $r, (0,)))", ""),
    "filter": ("len(list(filter(lambda _: $r > 0.6, (0, 1))))", ""),
    "sorted": ("sorted((0, 1), key=lambda k: k * ($r - 0.6))[0] + 1.0", ""),
    "max": ("max((0.5, 1.0), key=lambda k: k * ($r - 0.6))", ""),
    "reduce": ("functools.reduce(lambda one, _: one * $r, (0, 1), 1.0)", ""),
    "itemgetter": ("operator.itemgetter(0)([$r])", ""),
    "attrgetter": ('operator.attrgetter("w")(types.SimpleNamespace(w=$r))', ""),
    "star arguments": ("(lambda *given, **named: given[0] * named['one'])(*[$r], **{'one': 1.0})", ""),
    "walrus": ("(found$n if (found$n := $r) is not None else 1.0)", ""),
    "conditional": ("(1.0 if $r > 0.6 else 0.5)", ""),
    "format": ('float("{:.3f}".format(float($r)))', ""),
    "function": ("get$n()", "def get$n():\n    return $r"),
    "recursion": ("get$n(2)", "def get$n(depth):\n    return $r if depth == 0 else get$n(depth - 1)"),
    "raised and caught": (
        "get$n()", "def get$n():\n    try: raise LookupError($r)\n    except LookupError as error: return error.args[0]"),
    "finally": ("get$n()", "def get$n():\n    try: return $r\n    finally: pass"),
    "with": ("get$n()", "@contextlib.contextmanager\ndef scope$n(): yield $r\ndef get$n():\n    with scope$n() as w: return w"),
    "generator": ("next(get$n())", "def get$n():\n    yield $r"),
    "callable object": ("get$n()", "class Get$n:\n    def __call__(self): return $r\nget$n = Get$n()"),
    "property": ("get$n.w", "class Get$n:\n    @property\n    def w(self): return $r\nget$n = Get$n()"),
    "partial": ("get$n()", "get$n = functools.partial(lambda one: one * $r, 1.0)"),
    "wrapped": ("get$n()", "def wrap$n(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
                "@wrap$n\ndef get$n(): return $r"),
    "eval": ("eval('get$n()', {'get$n': get$n})", "def get$n(): return $r"),
}  # fmt: skip
# What the step does with a number.
USES = {
    "factor": "loss = loss * $r",
    "branch": "if $r > 0.6: loss = loss + 0.25 * out.pow(2).mean()",
    "loop": "for _ in range(int(4 * $r)): loss = loss * 1.125",
    "slice": "loss = loss + out[:, : int(1 + $r)].mean()",
    "exception": "try:\n    if $r > 0.6: raise ArithmeticError\n    loss = loss * 0.5\nexcept ArithmeticError: loss = loss * 1.5",
    "metric": 'metrics["w$n"] = loss.detach() * $r',
    "tensor": "loss = loss + torch.as_tensor($r).detach() * out.mean()",
    "head": 'head = "a" if $r > 0.6 else "b"',
    "body": "x = x * $r",
    "net": "h = h + $r",
}
MODES = ("between", "inside", "trials", "never")


@dataclass(frozen=True)
class Piece:
    """One state of a program: where it lies, when it changes, how it reaches the step and what is done with it."""

    kind: str
    state: State
    number: int
    mode: str
    first: float
    other: float  # of a second trial
    changes: tuple[tuple[int, float], ...] = ()  # (step, value)
    way: str = "plain"
    use: str = "factor"
    scope: str = "closure"
    model: str = "m"  # by argument or by closure
    in_function: bool = False  # whether the step's change is made by a function that it calls

    @property
    def changing(self) -> bool:
        """Whether the program changes this state."""
        return self.mode != "never" or not self.state.write

    @property
    def local(self) -> bool:
        """Whether it can be read in the step function alone."""
        return bool(self.state.unpack or self.state.batch or re.search(r"\b(x|y|batch)\b", self.state.read))

    def text(self, source: str, value: str = "1.0", model: str = "model") -> str:
        """Source code with this piece's names and values."""
        first = f"({self.first}, {self.other})[trial]" if self.mode == "trials" else str(self.first)
        word = "global" if self.scope == "global" else "nonlocal"
        bind = f"{word} {self.state.rebinds}" if self.state.rebinds else "pass"
        for mark, text in (("$bind", bind), ("$r", self.state.read), ("$v", value), ("$a", first), ("$m", model)):
            source = source.replace(mark, text)
        return source.replace("$n", str(self.number))

    def read(self, model: str) -> str:
        """The expression by which the step has the number."""
        return self.text(WAYS[self.way][0], model=model)

    def globals(self) -> list[str]:
        """Names that it makes, if they are global ones."""
        made = f"{self.state.define}\n{self.state.late}\n{WAYS[self.way][1]}"
        return sorted(set(re.findall(r"(?<![.\w])(\w*?)\$n\b", made))) if self.scope == "global" else []


@dataclass(frozen=True)
class Program:
    """A whole training program."""

    pieces: tuple[Piece, ...]
    optimizer: str = OPTIMIZERS[0]
    accumulate: int = 1
    by_closure: bool = False
    rich: bool = False  # whether the model has layers for normalization and dropout

    @property
    def trials(self) -> int:
        """How many are run one after the other: with other values, or with equal ones, for then they share a capture."""
        return 2 if any(piece.mode in ("trials", "never") for piece in self.pieces) else 1

    def source(self) -> str:
        """The text of ``program(make, trial)``."""
        return _Text(self).program()

    def script(self) -> str:
        """A file that runs the program both ways and prints what differs."""
        runs = inspect.getsource(program_runs)
        end = f'if __name__ == "__main__":\n    quiet()\n    print(*compare(program, {self.trials}).differences, sep="\\n")\n'
        return f"{runs}\n\n# -- the program\n{HEAD}\n\n{self.source()}\n\n{end}"

    def compare(self, name: str = "program") -> Comparison:
        """Run it both ways in this process, as a module of its own."""
        return compare(self.load(name), self.trials)

    def load(self, name: str) -> Any:
        """Its function, in a module that is there as long as the function is."""
        file, text = os.path.join(tempfile.gettempdir(), "waterflow_programs", f"{name}.py"), f"{HEAD}\n{self.source()}"
        module = types.ModuleType(name)
        module.__dict__.update(attempt=program_runs.attempt, __file__=file)
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        exec(compile(text, file, "exec"), module.__dict__)
        sys.modules[name] = module
        return module.program  # type: ignore[attr-defined]


HEAD = textwrap.dedent("""\
    import argparse, array, builtins, collections, concurrent.futures, contextlib, contextvars, copy, ctypes, dataclasses
    import decimal, enum, functools, importlib, io, itertools, logging, math, operator, os, pathlib, queue, random, sys
    import tempfile, threading, time, types, weakref
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    """)


class _Text:
    """Puts a program's pieces in their places."""

    def __init__(self, program: Program) -> None:
        self.program_ = program
        self.pieces = program.pieces

    def _reads(self, *uses: str) -> Iterator[str]:
        """Statements of pieces with one of the uses."""
        for piece in self.pieces:
            if piece.use in uses and piece.state.read:
                model = "model" if piece.use in ("body", "net") else piece.model
                yield USES[piece.use].replace("$r", piece.read(model)).replace("$n", str(piece.number))

    def program(self) -> str:
        """The whole function."""
        names = sorted({name + str(p.number) for p in self.pieces for name in p.globals() if name})
        before = [f"global {', '.join(names)}"] if names else []
        before += [p.text(p.state.define) for p in self.pieces if p.state.define]
        ends = [p.text(p.state.restore) for p in self.pieces if p.state.restore]
        inner = [*before, *self._model(), *self._step(), *self._loop()]
        if ends:
            guarded = ["try:", _indent([*inner[len(before) :]]), "finally:", _indent(ends)]
            inner = [*before, *guarded]
        return f"def program(make, trial=0):\n{_indent(inner)}\n"

    def _model(self) -> list[str]:
        body = [*self._reads("body"), "return self.drop(self.norm(self.linear(x)))"]
        net = [
            "h = self.act(self.body(x))", "for one in self.extra: h = one(h)", *self._reads("net"), "return self.heads[head](h)",
        ]  # fmt: skip
        optimizer = next((p.state.optimizer for p in self.pieces if p.state.optimizer), self.program_.optimizer)
        rich = self.program_.rich or any(".norm" in p.state.write or ".drop" in p.state.write for p in self.pieces)
        layers = ("nn.BatchNorm1d(4)", "nn.Dropout(0.25)") if rich else ("nn.Identity()", "nn.Identity()")
        return [
            "class Body(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.linear = nn.Linear(4, 4)\n"
            f"        self.norm = {layers[0]}\n        self.drop = {layers[1]}",
            _indent(["def forward(self, x):", _indent(body)]),
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = Body()\n"
            "        self.act = nn.Tanh()\n        self.extra = nn.ModuleList()\n"
            '        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})',
            _indent(['def forward(self, x, head="a"):', _indent(net)]),
            "model = Net()",
            f"optimizer = {optimizer.replace('$p', 'model.parameters()')}",
            "after = []",
            *(p.text(p.state.late) for p in self.pieces if p.state.late),
        ]

    def _step(self) -> list[str]:
        helpers = [p.text(WAYS[p.way][1]) for p in self.pieces if WAYS[p.way][1] and p.state.read]
        inside, bound = [], []
        for p in self.pieces:
            if p.mode != "inside":
                continue
            value = f"(0.25 + 0.5 * float({p.text(p.state.read)}))" if p.state.read and not p.local else str(p.other)
            write = p.text(p.state.write, value)
            if p.in_function:
                helpers.append(f"def bump{p.number}():\n{_indent([p.text('$bind'), write])}")
                inside.append(f"bump{p.number}()")
            else:
                inside.append(write)
                bound += [p.text("$bind")] if p.state.rebinds else []
        unpack = next((p.text(p.state.unpack) for p in self.pieces if p.state.unpack), "")
        metrics = any(p.use == "metric" and p.state.read for p in self.pieces)
        lines = [
            *bound,
            "metrics = {}",
            *self._unpacked(unpack),
            'head = "a"',
            *self._reads("head"),
            f"out = {'model' if self.program_.by_closure else 'm'}(x, head)",
            "loss = F.cross_entropy(out, y)",
            *self._reads("factor", "branch", "loop", "slice", "exception", "metric", "tensor"),
            "for one in after: one(loss)",
            *inside,
            f"return {'loss, metrics' if metrics else 'loss'}",
        ]
        lasts = [p.text(p.state.last) for p in self.pieces if p.state.last]
        return [*helpers, "def step(m, batch):", _indent(lines), *lasts]

    def _unpacked(self, unpack: str) -> list[str]:
        """How the step finds x and y: as the batch's own state says, or as the first two of it."""
        whole = unpack.startswith("x, y")
        return [unpack] if whole else ["x, y = batch[0], batch[1]", *([unpack] if unpack else [])]

    def _loop(self) -> list[str]:
        accumulate = f", accumulate={self.program_.accumulate}" if self.program_.accumulate > 1 else ""
        changes = [
            f"if i == {step}:\n{_indent([p.text(p.state.write, str(value))])}"
            for p in self.pieces if p.mode == "between" for step, value in p.changes
        ]  # fmt: skip
        batch = next((p.text(p.state.batch) for p in self.pieces if p.state.batch), "(x, y)")
        around = [p.text(p.state.around) for p in self.pieces if p.state.around]
        call = "losses.append(attempt(train, batch))"
        kept = ", ".join(f"attempt(lambda: {self._kept(p)})" for p in self.pieces)
        return [
            "data = torch.Generator().manual_seed(3)",
            f"train = make(model, optimizer=optimizer, step=step{accumulate})",
            "losses = []",
            f"for i in range({STEPS}):",
            _indent([
                *changes,
                "x, y = torch.randn(4, 4, generator=data, dtype=torch.float32), torch.randint(0, 3, (4,), generator=data)",
                f"batch = {batch}",
                f"with {', '.join(around)}: {call}" if around else call,
            ]),
            f"return dict(losses=losses, model=model, optimizer=optimizer, kept=[{kept}])",
        ]  # fmt: skip

    def _kept(self, piece: Piece) -> str:
        state = piece.state
        expression = state.keep or ("None" if piece.local or not state.read else state.read)
        if piece.local and not state.keep and "x$n" in state.define:
            expression = "x$n"
        return piece.text(expression)


def _indent(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


# -- drawing


@dataclass
class Deck:
    """Deals kinds so that all come equally often, and each kind's states one after the other."""

    draw: random.Random
    kinds: tuple[str, ...]
    _left: list[str] = field(default_factory=list)
    _states: dict[str, list[State]] = field(default_factory=dict)

    def kind(self) -> str:
        """The next kind."""
        if not self._left:
            self._left = self.draw.sample(self.kinds, len(self.kinds))
        return self._left.pop()

    def state(self, kind: str) -> State:
        """The next state of a kind."""
        if not self._states.get(kind):
            self._states[kind] = self.draw.sample(KINDS[kind], len(KINDS[kind]))
        return self._states[kind].pop()


def modes_of(state: State) -> list[str]:
    """When a state can change."""
    if state.modes:
        return list(state.modes)
    found = ["between"] * (state.between and bool(state.write)) + ["inside"] * (state.inside and bool(state.write))
    text = state.define + state.late + state.last + state.read
    return found + ["trials"] * ("$a" in text) or ["never"]


def drawn_piece(draw: random.Random, kind: str, state: State, number: int, mode: str | None = None) -> Piece:
    """A state with all that can be chosen about it."""
    mode = mode or draw.choice(modes_of(state) + ["between"] * (2 * ("between" in modes_of(state))))
    first, other, *values = draw.sample(VALUES, 5)
    steps = sorted(draw.sample(range(1, STEPS), draw.choice((1, 1, 1, 2))))
    piece = Piece(
        kind, state, number, mode, first, other,
        changes=tuple(zip(steps, values)), scope=state.scope or draw.choice(("closure", "global")),
        model=draw.choice(("m", "model")), in_function=draw.random() < 0.5,
    )  # fmt: skip
    ways = [name for name, (_, beside) in WAYS.items() if not (piece.local and beside)]
    uses = [use for use in USES if not (piece.local and use in ("body", "net"))]
    way = draw.choice(ways) if draw.random() < 0.6 else "plain"
    use = draw.choice([use for use in uses if use != "head" or not state.optimizer])
    if use in ("body", "net"):  # evaluated where the model is not called m
        piece = replace(piece, model="model")
    if WAYS[way][1]:
        piece = replace(piece, model="model")
    return replace(piece, way=way, use=use)


def drawn(draw: random.Random, deck: Deck) -> Program:
    """A program with one to three states."""
    pieces: list[Piece] = []
    for number in range(1, 1 + draw.choice((1, 2, 2, 3))):
        kind = deck.kind()
        piece = drawn_piece(draw, kind, deck.state(kind), number)
        taken = [p.state for p in pieces]
        one_of_a_kind = [any(getattr(s, slot) for s in taken) for slot in ("batch", "optimizer", "unpack")]
        if any(clash and getattr(piece.state, slot) for clash, slot in zip(one_of_a_kind, ("batch", "optimizer", "unpack"))):
            continue
        pieces.append(piece)
    accumulate = 2 if draw.random() < 0.1 and not any(p.state.raises for p in pieces) else 1
    program = Program(tuple(pieces), draw.choice(OPTIMIZERS), accumulate, draw.random() < 0.3, draw.random() < 0.15)
    return program if not _newly_reached(program) else replace(program, optimizer=OPTIMIZERS[0])


def _newly_reached(program: Program) -> bool:
    """Whether parameters may get their first gradient late, which torch's fused SGD with momentum does not take."""
    return any(piece.use == "head" for piece in program.pieces)


def programs(count: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Program]:
    """``count`` programs; equal seeds give equal ones."""
    draw = random.Random(seed)
    deck = Deck(draw, kinds)
    for _ in range(count):
        yield drawn(draw, deck)


def single(kind: str, state: State, mode: str, seed: int = 0, optimizer: str = OPTIMIZERS[2]) -> Program:
    """The smallest program with one state that changes in one way."""
    piece = drawn_piece(random.Random(seed), kind, state, 1, mode)
    return Program((replace(piece, way="plain", use="factor"),), optimizer)
