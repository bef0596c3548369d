"""The multi-stream allocator: memory for all that is not planned (``stream_allocator.h``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.native.build import load
from waterflow.errors import MemoryLimitError

_C = load()
NO_LIMIT = 2**63 - 1
Fault = _C.Fault  # planted mistakes; for tests


@dataclass(frozen=True)
class AllocatorReport:
    """What an allocator holds and did; sizes are bytes.

    ``held`` is handed out, ``grown`` taken from the device. Free memory is ``synchronized`` (for every stream),
    ``unsynchronized`` (by stream: others must wait first) or ``apart`` (everyone must wait for somebody).
    ``fragmentation`` is 0 where all that is free is one piece, and near 1 where it is dust. ``tiers`` counts requests
    by where in the search they found memory.
    """

    held: int
    peak: int
    grown: int
    synchronized: int
    apart: int
    unsynchronized: dict[int, int]
    largest_free: int
    fragmentation: float
    waits: int
    events: int
    segments: int
    requests: int
    tiers: dict[str, int]


class StreamAllocator:
    """Memory of one device for many streams, handed out when the host asks, long before the device comes to it.

    Requests search, in this order: what the stream itself freed, what all streams have waited for, what another freed
    (behind an asynchronous wait), new memory from the device, all that is free put together.
    Thread-safe. What is wrong with a call (a foreign address, a second release, a removed stream, a limit below what is
    held) raises ValueError and changes nothing. All sizes are bytes.
    """

    def __init__(
        self,
        device: Any,
        *,
        limit: int | None = None,
        alignment: int = 64,
        small_segment: int = 2 << 20,
        medium_segment: int = 20 << 20,
        fault: Any = Fault.none,
    ) -> None:
        self.device = device
        self.native = _C.StreamAllocator(
            device, NO_LIMIT if limit is None else limit, alignment, small_segment, medium_segment, fault
        )

    def add_stream(self) -> int:
        """A new stream of the device; its number is never used again."""
        stream = int(self.device.add_stream())
        self.native.add_stream(stream)
        return stream

    def remove_stream(self, stream: int) -> None:
        """Its work may still run; memory that it used stays in order behind that."""
        self.native.remove_stream(stream)
        self.device.remove_stream(stream)

    def allocate(self, size: int, stream: int) -> int:
        """The address of ``size`` bytes for work that is issued on ``stream`` from now on.

        Raises MemoryLimitError with a map of the memory where there is no room.
        """
        try:
            return int(self.native.allocate(size, stream))
        except _C.OutOfMemory as error:
            raise MemoryLimitError(str(error), needed=error.needed, limit=error.limit) from None

    def release(self, address: int) -> None:
        """The block is free behind all that its streams were issued until now."""
        self.native.release(address)

    def use(self, address: int, stream: int) -> None:
        """``stream`` uses the block, too, until it is released or ``end_use`` says so. Orders nothing by itself."""
        self.native.use(address, stream)

    def end_use(self, address: int, stream: int) -> None:
        """What ``stream`` is issued from now on does not touch the block; also for the stream that asked for it."""
        self.native.end_use(address, stream)

    def mark(self, stream: int) -> int:
        """An event behind all that ``stream`` was issued; good for ever. Make one at the end of each group."""
        return int(self.native.mark(stream))

    def wait(self, stream: int, mark: int) -> None:
        """Let ``stream`` wait for a mark, on the device; the host does not."""
        self.native.wait(stream, mark)

    def waited(self, stream: int, mark: int) -> None:
        """``stream`` waits for a mark already, by other means."""
        self.native.waited(stream, mark)

    def trim(self) -> int:
        """Give what is wholly free, and complete, back to the device; returns bytes."""
        return int(self.native.trim())

    @property
    def limit(self) -> int | None:
        """The most that is ever taken from the device; None without a limit."""
        limit = int(self.native.limit())
        return None if limit == NO_LIMIT else limit

    def set_limit(self, limit: int | None) -> None:
        """Trims if need be; raises ValueError below what is in use."""
        self.native.set_limit(NO_LIMIT if limit is None else limit)

    def report(self) -> AllocatorReport:
        """Everything at once."""
        return AllocatorReport(**self.native.report())

    def map(self, width: int = 64) -> str:
        """A line of text per segment: # held, . free for all, a digit free for that stream, ? free and apart."""
        return str(self.native.map(width))

    def check(self) -> None:
        """Walk everything; raises RuntimeError at what cannot be."""
        self.native.check()
