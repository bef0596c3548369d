"""The steps that each thread has made inside an engine, for whoever ends its work."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Closable(Protocol):
    """What is kept here of a step."""

    def close(self) -> None:
        """Leave the engine."""


class _Made(threading.local):
    """The steps of the calling thread that are still alive."""

    def __init__(self) -> None:
        self.steps: weakref.WeakSet[Closable] = weakref.WeakSet()


made_here = _Made()


def close_steps_of_thread() -> None:
    """Close every step that the calling thread made inside an engine: a trial's end gives all its memory back."""
    for step in list(made_here.steps):
        step.close()
    made_here.steps.clear()
