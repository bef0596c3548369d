"""The steps that were made inside an engine, by thread for whoever ends its work, and all of them for those who count."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Protocol


class Closable(Protocol):
    """What is kept here of a step."""

    def close(self) -> None:
        """Leave the engine."""


class _Made(threading.local):
    """The steps of the calling thread that are still alive."""

    def __init__(self) -> None:
        self.steps: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, step: Closable) -> None:
        """Keep a step that the calling thread has made, as long as it lives."""
        self.steps.add(step)
        with _guard:
            _all.add(step)

    def discard(self, step: Closable) -> None:
        """It is closed, by whichever thread."""
        self.steps.discard(step)
        with _guard:
            _all.discard(step)


_guard = threading.Lock()
_all: weakref.WeakSet[Any] = weakref.WeakSet()
made_here = _Made()


def steps_of(engine: object) -> list[Any]:
    """The steps that are alive in an engine, whoever made them."""
    with _guard:
        return [step for step in _all if step.engine is engine]


def cancel_steps(steps: weakref.WeakSet[Any], reason: str) -> None:
    """End the steps of another thread at their next group boundary; what is called of them from then on raises JobCancelled."""
    for step in _copied(steps):
        if step.engine is not None and step.job is not None:
            with contextlib.suppress(ValueError):  # it has left already
                step.engine.native.cancel(step.job, reason)


def _copied(steps: weakref.WeakSet[Any]) -> list[Any]:
    while True:
        with contextlib.suppress(RuntimeError):  # its thread has made another one meanwhile
            return list(steps)


def close_steps_of_thread() -> None:
    """Close every step that the calling thread made inside an engine: a trial's end gives all its memory back."""
    for step in list(made_here.steps):
        step.close()
    made_here.steps.clear()
