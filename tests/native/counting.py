"""Counting what torch's CPU allocator hands out: an independent witness for predictions of memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from tests.native.build import load
from waterflow import _C

_native = load()
_witness = ctypes.CDLL(_C.__file__).waterflow_witness  # allocator_chain.h
_witness.argtypes, _witness.restype = [ctypes.c_void_p], None


class MemoryCount:
    """Bytes held since counting began, of all threads. Blocks from before do not count."""

    @property
    def peak(self) -> int:
        """The most that was held at once since the beginning, or since ``restart``."""
        return int(_native.counted_peak())

    @property
    def current(self) -> int:
        """What is held now."""
        return int(_native.counted_now())

    def restart(self) -> None:
        """Forget the peak so far."""
        _native.restart_peak()


@contextlib.contextmanager
def count_memory() -> Iterator[MemoryCount]:
    """Count every CPU allocation of the process inside the block; one block at a time.

    Everything runs a little slower meanwhile. Memory that libraries take past torch's allocator (thread pools,
    scratch space inside oneDNN and MKL) is not seen.
    """
    _witness(_native.start_counting())
    try:
        yield MemoryCount()
    finally:
        _witness(None)
