"""When a step is captured: a capture takes as long as many steps, and is made where the steps to come are expected to pay for it."""

from __future__ import annotations

import contextlib
import statistics
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError
from waterflow.executor.stats import Account

# Captures of small steps took as long as they save in 35 to 65 steps (docs/experiments/capture.md): so many count where none was measured.
PAYS_AFTER = 50
NEWEST = 32  # captures, or lengths of trials, that are remembered
LEAST_SAVED, PRESUMED = 0.05, 0.5  # of an eager step: below the first lies noise
FREE_CAPTURES = 8  # kinds of step that are expected to last as long as their job
KINDS_REMEMBERED = 10_000


class NewKind(CaptureError):
    """A step is of a kind that is not captured now, as its capture is not expected to pay. Other kinds stay captured.

    The batch is of a new kind, or, where it has ``changed``, something that the step reads beside its batch. Without a message
    the step is of the job's first kinds.
    """

    def __init__(self, reason: str, changed: bool = False) -> None:
        self.changed = changed
        super().__init__(reason)


class CaptureCosts:
    """After how many steps the captures of this process have paid, by what audits measured. Thread-safe.

    What a capture takes and what it saves in a step both grow with the operations of the step: their ratio holds for other steps.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=NEWEST)
        self._measured = False

    def add(self, capture: float, eager: float, captured: float | None) -> None:
        """Add what one capture took, and the step both ways, all in seconds. None: it is presumed to save half until one is measured."""
        if eager <= 0 or (captured is None and self._measured):
            return
        if captured is not None and not self._measured:
            self._measured = True
            self._steps.clear()
        saved = PRESUMED * eager if captured is None else max(eager - captured, LEAST_SAVED * eager)
        self._steps.append(capture / saved)

    @property
    def pays_after(self) -> float | None:
        """The number of steps; None where no capture was measured."""
        steps = self._steps.copy()  # others may add
        return statistics.median(steps) if steps else None


costs = CaptureCosts()


class TrialLengths:
    """The steps that trials of a study had, those that ended and those that wait."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, int] = {}
        self._newest: list[int] = []

    def ended(self, whose: Hashable, account: Account) -> None:
        """Add the steps that ``account`` has counted of a trial that has ended, or stands aside."""
        if steps := int(account.get("steps", 0)):
            self._steps[whose] = steps + self._steps.pop(whose, 0)  # behind the others
            self._newest = sorted([*self._steps.values()][-NEWEST:])

    def of(self, whose: Hashable) -> int:
        """Return the steps of a trial, without those since it went on."""
        return self._steps.get(whose, 0)

    def best_wait(self, pays_after: float) -> float | None:
        """Return after how many eager steps a capture would have cost these trials least; None if there are none.

        For trials that outlast them all it is ``pays_after``: no rule that knows nothing of the future does better (Karlin, Manasse,
        Rudolph and Sleator 1988, for the rental of skis).
        """
        lengths = self._newest
        if not lengths:
            return None
        # The cost of trials no longer than the wait is their length; of others it is the wait, and the capture.
        before, waits = [0, *accumulate(lengths)], [0, *lengths]
        counts = [bisect_right(lengths, wait) for wait in waits]
        wasted = [before[ended] + (len(lengths) - ended) * (wait + pays_after) for wait, ended in zip(waits, counts)]
        best = waits[wasted.index(min(wasted))]
        return best if best < lengths[-1] else pays_after


@dataclass
class Horizon:
    """The steps that a job or trial is expected to train: those ``left``, if it knows, and the ``lengths`` of its study's trials.

    ``whose`` are the steps, which ``account`` counts. ``kinds`` counts the eager steps of all jobs by the kind of step.
    ``may_wait(leaves)`` is false where an eager step on such a batch may take more memory than it should.
    """

    account: Account
    whose: Hashable
    lengths: TrialLengths | None
    kinds: Counter[int]
    may_wait: Callable[[list[Any]], bool] = lambda leaves: True
    left: Callable[[], int | None] = lambda: None

    def done(self) -> int:
        """Return the steps so far, with those before the trial stood aside."""
        return int(self.account["steps"]) + (self.lengths.of(self.whose) if self.lengths is not None else 0)

    def lasts(self, pays_after: float) -> bool:
        """Return True if the steps to come are expected to pay for a capture."""
        left = self.left()
        if left is not None and left < pays_after:
            return False
        wait = self.lengths.best_wait(pays_after) if self.lengths is not None else None
        if wait is None:
            return left is not None or self.lengths is None or self.done() >= pays_after
        return self.done() >= wait


@dataclass
class _Seen:
    """A kind of step that is not captured."""

    calls: int = 0
    kind: int | None = None  # with all that it is made from, as last looked at


@dataclass
class CaptureBudget:
    """Decides which kinds of step of one job are captured, and when: where as many steps are to come as pay for the capture.

    The first eight kinds are expected to last as long as the job; others, and those of a job whose length nobody knows, once
    more as often as they have come. A kind is new by its batch, or by what else the step reads. Without a ``horizon`` the first
    eight kinds are captured at once. If ``own``, as in deterministic studies, only the job's own steps decide: no clock, and
    no other job. Counts and seconds are added to ``account``.
    """

    own: bool = False
    horizon: Horizon | None = None
    account: Account = field(default_factory=lambda: Account(""))
    captured: bool = False  # any kind of step
    _made: int = 0
    _last: dict[str, str] = field(default_factory=dict)
    _told_of_changes: bool = False
    _changes: int = 0  # that were captured
    _seen: dict[Hashable, _Seen] = field(default_factory=dict)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count a capture, and the time that it takes, inside the context."""
        began = time.monotonic()
        try:
            yield
            self._made += not self.own
        finally:
            self.account["capturing"] += time.monotonic() - began

    def add_kind(self, *keys: Hashable) -> None:
        """Count one more kind of step that is captured, by this job or another. What was counted by ``keys`` begins anew."""
        self.captured = True
        self._made += self.own
        for key in keys:
            self._seen.pop(hash(key), None)

    def count(self, key: Hashable, leaves: list[Any], there: Callable[[int | None], bool], batch: Callable[[], Any]) -> None:
        """Count a step on a kind of batch, ``key``, that is not captured for this job. Raises NewKind if it is not to be captured.

        It may be where another job's capture is ``there``, of this kind of step, or, where that is None, of this kind of batch; and
        where jobs like this one may have run eagerly. Then ``check`` decides. ``batch()`` returns the batch, with None for leaves
        that are no part of its kind.
        """
        seen = self._one(key)
        seen.calls += 1
        if self.horizon is not None and not self.horizon.may_wait(leaves):
            self.horizon = None
        if self.horizon is not None and seen.kind is not None:
            self.horizon.kinds[seen.kind] += 1
        # To look for the kind of step takes as long as a small step: it is done once.
        first = seen.kind is None and self.horizon is not None and len(self._seen) <= FREE_CAPTURES
        if not (first or self._pays(seen) or there(seen.kind)):
            raise NewKind(self._why(batch))

    def check(self, key: Hashable, kind: int, batch: Callable[[], Any]) -> None:
        """Raise NewKind if a step must not be captured now; ``kind`` is that of the step, with all that it is made from."""
        seen = self._one(key)
        if self.horizon is not None and seen.kind is None:
            self.horizon.kinds[kind] += seen.calls
        seen.kind = kind
        if not self._pays(seen):
            raise NewKind(self._why(batch))
        if self._made < FREE_CAPTURES:
            self._last = described(batch())

    def check_change(self, kind: int, changes: Callable[[], str]) -> None:
        """Raise NewKind if a step must not be captured now whose ``kind`` is new by what it reads beside its batch.

        ``changes()`` says what has changed.
        """
        seen = self._one(kind)
        seen.calls += 1
        if self._pays(seen):
            self._changes += 1
            return
        if self._told_of_changes or self._made < FREE_CAPTURES:
            raise NewKind("", changed=True)
        self._told_of_changes = True
        raise NewKind(
            f"{changes()}, and a capture takes longer than a step. What then stays as it is is captured by and by; for a number that "
            "never does, read a buffer in its place, and change that (model.weight.fill_(x)), or pass a tensor in the batch",
            changed=True,
        )

    def _one(self, key: Hashable) -> _Seen:
        seen = self._seen.get(hash(key))
        if seen is None:
            seen = self._seen[hash(key)] = _Seen()
            if len(self._seen) > KINDS_REMEMBERED:
                del self._seen[next(iter(self._seen))]
        return seen

    def _pays(self, seen: _Seen) -> bool:
        measured, horizon = None if self.own else costs.pays_after, self.horizon
        pays_after = PAYS_AFTER if measured is None else measured
        if self._made < FREE_CAPTURES and (horizon is None or measured is None or horizon.lasts(pays_after)):
            return True
        calls = horizon.kinds[seen.kind] if horizon is not None and seen.kind is not None else seen.calls
        return calls > pays_after

    def _why(self, batch: Callable[[], Any]) -> str:
        if self._made < FREE_CAPTURES or not self._last:
            return ""  # it has time; or said before
        if self._told_of_changes and 2 * self._changes >= FREE_CAPTURES:
            return ""  # not batches, but what changes beside them took the captures
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
    """Describe the leaves of a batch, by path: shapes of tensors, and other values as text."""
    with contextlib.suppress(ValueError):  # of a class that is registered without names for its parts
        return {pytree.keystr(path): _one(leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]}
    return {f"[{number}]": _one(leaf) for number, leaf in enumerate(pytree.tree_leaves(batch))}


def _one(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"of shape {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 40 else text[:37] + "..."
