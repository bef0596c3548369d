"""Processes that several threads start know of one another's end alone."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

import pytest

from waterflow.executor import engine
from waterflow.executor.engine import Engine

context = multiprocessing.get_context("fork") if sys.platform == "linux" else None


def _nothing() -> None: ...


def _starts_one_more() -> None:
    """From another thread: the lock that its parent held when it was forked is none of its own."""
    child = context.Process(target=_nothing)  # type: ignore[union-attr]
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.join()
    os._exit(7 if child.exitcode == 0 else 1)


@pytest.mark.skipif(context is None, reason="processes are not forked here")
def test_threads_fork_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(memory=64 << 20, lanes=1).close()
    fork, free = os.fork, []

    def watched() -> int:
        other = threading.Thread(target=lambda: free.append(engine._one_at_a_time.acquire(blocking=False)))
        other.start()
        other.join()
        return fork()

    monkeypatch.setattr(os, "fork", watched)
    child = context.Process(target=_starts_one_more)  # type: ignore[union-attr]
    child.start()
    child.join()
    assert free == [False] and child.exitcode == 7
