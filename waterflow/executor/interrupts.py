"""Ctrl-C: deferred where it must not interrupt a block, and remembered where it must not be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[Callable[[], None]]:
    """Remember a Ctrl-C inside the context whose KeyboardInterrupt is swallowed on the way, by a finalizer for example.

    Yields a function that raises it again; the same thread calls it now and then. Does nothing outside of the main thread, or
    if the user has a handler for SIGINT.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def remember(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
