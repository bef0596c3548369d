"""Counting what torch's CPU allocator hands out: an independent witness for predictions of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from waterflow import _C


class MemoryCount:
    """Bytes held since counting began, of all threads. Blocks from before do not count."""

    @property
    def peak(self) -> int:
        """The most that was held at once since the beginning, or since ``restart``."""
        return int(_C.CountingAllocator.peak())

    @property
    def current(self) -> int:
        """What is held now."""
        return int(_C.CountingAllocator.current())

    def restart(self) -> None:
        """Forget the peak so far."""
        _C.CountingAllocator.reset_peak()


@contextlib.contextmanager
def count_memory() -> Iterator[MemoryCount]:
    """Count every CPU allocation of the process inside the block; one block at a time.

    Everything runs a little slower meanwhile. Memory that libraries take past torch's allocator (thread pools,
    scratch space inside oneDNN and MKL) is not seen.
    """
    _C.CountingAllocator.start()
    try:
        yield MemoryCount()
    finally:
        _C.CountingAllocator.stop()
