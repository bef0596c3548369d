"""Requests of a real run, and running them again on any device at any capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.native.build import load
from tests.native.stream_allocator import StreamAllocator
from waterflow.errors import MemoryLimitError

_C = load()

# The columns of a table are kind, id, stream and bytes; these are the kinds.
REQUEST, RELEASE, USE, END_USE, MARK, WAIT = range(6)


class RequestLog:
    """A table of requests that was checked. Raises ValueError for a row that names what is not there."""

    def __init__(self, table: npt.ArrayLike) -> None:
        self.table = np.ascontiguousarray(np.asarray(table, dtype=np.int64).reshape(-1, 4))
        self._native = _C.RequestLog(self.table)

    @property
    def requests(self) -> int:
        """How many there are."""
        return int(self._native.requests)

    @property
    def peak(self) -> int:
        """The most bytes asked for and not released."""
        return int(self._native.peak)

    def replay(self, allocator: StreamAllocator, repeats: int = 1, streams: Sequence[int] = ()) -> float:
        """Make the requests again; returns seconds per replay.

        The log's streams are, in the order in which it names them, ``streams``; without them some are added, and removed
        after it. What the log leaves is released. Raises MemoryLimitError where they do not fit.
        """
        try:
            taken = self._native.replay(allocator.native, allocator.device, repeats, list(streams))
        except _C.OutOfMemory as error:
            raise MemoryLimitError(str(error), needed=error.needed, limit=error.limit) from None
        return float(taken) * 1e-9

    def replay_malloc(self, repeats: int = 1) -> float:
        """The requests and releases with the C library's malloc and free; returns seconds per replay."""
        return float(self._native.replay_malloc(repeats)) * 1e-9

    def save(self, path: Path | str) -> None:
        """Write the table as a compressed file of numpy."""
        np.savez_compressed(path, table=self.table)

    @classmethod
    def load(cls, path: Path | str) -> RequestLog:
        """What ``save`` wrote."""
        with np.load(path) as file:
            return cls(file["table"])


def record_requests(work: Callable[[], Any]) -> tuple[Any, RequestLog]:
    """Call ``work()``; returns its result, and what this thread asked torch's allocators for meanwhile.

    One stream. Blocks from before are not known, so their release does not show.
    """
    result, table = _C.record_requests(work)
    return result, RequestLog(table)
