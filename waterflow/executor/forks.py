"""Processes that several threads start, as loaders with workers do in each trial: one after the other."""

from __future__ import annotations

import os
import threading
from multiprocessing import popen_fork
from typing import Any

_one_at_a_time = threading.RLock()
_launch = popen_fork.Popen._launch  # type: ignore[attr-defined]


def fork_in_turns() -> None:
    """From now on no thread forks a process of multiprocessing's while another thread is about to.

    That a process has ended its parent sees by a pipe, whose other end it alone should have. One that is forked between the
    pipe's beginning and the parent's closing of that end has it, too, and who joins the first waits for both, or for the end
    of a time limit: torch's loaders 5 seconds for each worker.
    """
    if popen_fork.Popen._launch is _launch:  # type: ignore[attr-defined]
        popen_fork.Popen._launch = _launch_alone  # type: ignore[attr-defined]


def _launch_alone(process: Any, target: Any) -> None:
    with _one_at_a_time:
        _launch(process, target)


if hasattr(os, "register_at_fork"):  # in a child nobody else is about to
    os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]
