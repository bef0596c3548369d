"""What a call must not leave behind: threads, and other numbers of threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch


def count() -> tuple[int, int]:
    """Threads of the process, and those that Python knows."""
    return len(os.listdir("/proc/self/task")), threading.active_count()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Neither threads nor changed thread counts stay behind."""
    before = count()
    yield
    until = time.monotonic() + 2
    # Torch starts one of its own for the first backward pass.
    allowed = before[0] + 1, before[1]
    while any(now > most for now, most in zip(count(), allowed)):
        assert time.monotonic() < until, f"threads were {before} and are {count()}: {threading.enumerate()}"
        time.sleep(0.01)
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == 1 and fresh == [1]
