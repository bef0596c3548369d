"""Numbers of bytes, as people read them. Needs no torch."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """``412.0 MiB`` for people; exact below one KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{int(count)} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
