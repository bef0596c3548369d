"""Which engine the work of a thread belongs to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from waterflow.executor.engine import Engine

_local = threading.local()


def current_engine() -> Engine | None:
    """The engine that work of the calling thread belongs to; None outside of any."""
    return getattr(_local, "engine", None)


@contextlib.contextmanager
def within(engine: Engine, worker: int | None = None) -> Iterator[None]:
    """Steps that the calling thread makes inside belong to ``engine``, and to its clock as ``worker``."""
    before = current_engine(), current_worker()
    _local.engine, _local.worker = engine, worker
    try:
        yield
    finally:
        _local.engine, _local.worker = before


def current_worker() -> int | None:
    """The number under which the calling thread's work is known to its engine's virtual clock."""
    return getattr(_local, "worker", None)


def current_device() -> torch.device:
    """The device of the engine that the calling thread belongs to; ``cpu`` outside of any."""
    engine = current_engine()
    return engine.device if engine is not None else torch.device("cpu")
