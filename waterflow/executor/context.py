"""Which engine, and which worker of its clock, the work of a thread belongs to."""

from __future__ import annotations

import threading
from typing import Any


class _Belonging(threading.local):
    engine: Any = None
    worker: int | None = None


here = _Belonging()


def current_worker() -> int | None:
    """The number under which the calling thread's work is known to its engine's virtual clock."""
    return here.worker
