"""What an engine tells of its lanes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineFigures:
    """What an engine's lanes did: counts, seconds summed over lanes, and the most bytes that steps held at once.

    ``scheduling_seconds`` is the time inside admission and barriers, waiting for the engine's lock included. ``graphs``
    counts device graphs: captured, launched, dropped as something had changed; and the bytes that they hold.
    """

    steps: int
    groups: int
    busy_seconds: float
    busy_by_lane: tuple[float, ...]
    scheduling_seconds: float
    peak_held: int
    graphs: dict[str, int]
