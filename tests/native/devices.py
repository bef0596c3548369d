"""Devices: memory behind addresses, and order between streams."""

from __future__ import annotations

from tests.native.build import load

_C = load()

# Two accesses to one byte, one of them a write, with nothing that orders them.
Race = _C.Race

# What every device does: ``granularity``, ``reserve``, ``unreserve``, ``grow``, ``shrink`` (memory, in bytes);
# ``add_stream``, ``remove_stream``, ``record``, ``wait``, ``complete``, ``synchronize``, ``forget`` (order). Thread-safe.
# ``waterflow/allocator/csrc/device.h`` is the contract. A class of Python may be one, too.
Device = _C.Device


class SimulatedDevice(_C.SimulatedDevice):
    """A device without memory: addresses, streams with logical clocks, and a check of every access. Thread-safe.

    ``capacity`` and ``granularity`` are bytes; terabytes cost nothing. Work takes no time and completes only when it is
    told to (``advance(event)``, ``advance_stream(stream)``, ``finish_all()``), so any stream can be stalled.
    ``access(stream, at, bytes, write=True)`` says that work issued now touches these bytes: it raises ``Race`` where
    nothing orders that after the last accesses that it conflicts with, and IndexError where no memory is behind them.
    """


class CpuDevice(_C.CpuDevice):
    """The CPU as a device: real memory, and a thread per stream that does the stream's work later. Thread-safe.

    ``capacity`` is bytes. ``seed``, ``stall_share`` and ``stall_us`` put random stalls before a share of all work, each
    of up to so many microseconds, so that no order comes about by itself; ``stall(stream, microseconds)`` adds one.
    ``fill(stream, at, bytes, value)`` writes; ``count_other(stream, at, bytes, value, told)`` reads, and calls
    ``told(count)`` with the number of bytes that are something else. ``finish(stream)`` and ``finish_all()`` wait.
    """
