"""How much of a job's time captures may take: batches of ever new kinds run eagerly from then on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError
from waterflow.executor.account import Account

FREE_CAPTURES = 8
MOST_OF_TIME = 0.1
KINDS_REMEMBERED = 10_000
STEPS_PER_CAPTURE = 400  # where no clock may decide, as in deterministic studies; a capture takes some 40 to 110 steps


class NewKind(CaptureError):
    """A batch of a kind that is not captured now, for captures have taken their share. Other kinds stay captured."""


class CaptureBudget:
    """The captures of one job: the first eight, and then those of kinds that come back, a tenth of its time at most.

    ``steps`` counts the job's steps, which stand for its time in deterministic studies, where all that counts is the job's own:
    kinds, also where another job has made the capture. None elsewhere. Time goes to ``account``.
    """

    def __init__(self, steps: Callable[[], int] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.own = steps is not None
        self.account = Account("")
        self._steps, self._now = steps, now
        self._began = now()
        self._made = 0
        self._last: dict[str, str] = {}
        self._seen: dict[int, None] = {}  # hashes of kinds that are not captured

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """A capture is made within."""
        before = self._now()
        try:
            yield
            self._made += not self.own
        finally:
            self.account["capturing"] += self._now() - before

    def add_kind(self) -> None:
        """Batches of one more kind are captured."""
        self._made += self.own

    def check(self, kind: Hashable, batch: Callable[[], Any]) -> None:
        """Raise NewKind where a batch of a new kind is not to be captured now. It has None for leaves that are no part of its kind."""
        if self._made < FREE_CAPTURES:
            self._last = described(batch())
            return
        if hash(kind) not in self._seen:
            self._seen[hash(kind)] = None
            if len(self._seen) > KINDS_REMEMBERED:
                del self._seen[next(iter(self._seen))]
            allowed = False
        elif self._steps is not None:
            allowed = self._made < FREE_CAPTURES + self._steps() // STEPS_PER_CAPTURE
        else:
            spent = self.account["capturing"]
            allowed = spent + spent / self._made <= MOST_OF_TIME * (self._now() - self._began)
        if not allowed:
            raise NewKind(self._why(batch))

    def _why(self, batch: Callable[[], Any]) -> str:
        if not self._last:
            return ""  # said before
        now, before, self._last = described(batch()), self._last, {}
        changed = next((path for path in now if before.get(path, now[path]) != now[path]), None)
        if changed is None:
            return "each would be captured anew"
        number = "make a number that the step reads a tensor, as torch.tensor(x) does"
        never = "pad batches to a few sizes" if "shape" in now[changed] else number
        return (
            f"batch{changed} was {before[changed]} and is {now[changed]}, and a capture takes longer than a step. Kinds that come "
            f"back are captured by and by; for those that never do, {never}"
        )


def described(batch: Any) -> dict[str, str]:
    """What tells kinds of batches apart, by the path of each leaf."""
    return {pytree.keystr(path): _one(leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]}


def _one(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"of shape {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 40 else text[:37] + "..."
