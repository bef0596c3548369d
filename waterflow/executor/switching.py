"""How often threads hand the interpreter over while engines are open."""

from __future__ import annotations

import sys
import threading

_open_engines = 0
_open_lock = threading.Lock()
_interval_before = 0.0
# Threads that feed lanes hand the interpreter over often: at Python's 5 ms a lane of short steps would run dry.
SWITCH_SECONDS = 1e-3


def shorten_switches(change: int) -> None:
    """An engine opens (+1) or closes (-1)."""
    global _open_engines, _interval_before
    with _open_lock:
        if _open_engines == 0 and change > 0:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_SECONDS, _interval_before))
        _open_engines += change
        if _open_engines == 0:
            sys.setswitchinterval(_interval_before)
