"""Devices: memory behind addresses, and order between streams."""

from __future__ import annotations

from waterflow import _C

# Two accesses to one byte, one of them a write, with nothing that orders them.
Race = _C.Race


class SimulatedDevice(_C.SimulatedDevice):
    """A device without memory: addresses, streams with logical clocks, and a check of every access. Thread-safe.

    ``capacity`` and ``granularity`` are bytes; terabytes cost nothing. Work takes no time and completes only when it is
    told to (``advance(event)``, ``advance_stream(stream)``, ``finish_all()``), so any stream can be stalled.
    ``access(stream, at, bytes, write=True)`` says that work issued now touches these bytes: it raises ``Race`` where
    nothing orders that after the last accesses that it conflicts with, and IndexError where no memory is behind them.
    """
