"""Accelerate's state, of which a process has one, where trials or jobs side by side would each need their own."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("waterflow")

_told = threading.Lock()  # taken for good by the thread that logs the warning, so that it comes once in a process


@contextlib.contextmanager
def telling_of_accelerate(what: str, among_others: Callable[[], bool]) -> Iterator[None]:
    """Warn, once in a process, if Accelerate's state changes inside the context while ``what`` runs beside others."""
    if _told.locked():
        yield
        return
    before, beside = _state(), among_others()
    try:
        yield
    finally:
        now = _state()
        changed = now.keys() != before.keys() or any(value is not before[key] for key, value in now.items())
        if changed and (beside or among_others()) and _told.acquire(blocking=False):
            logger.warning(
                "%s, or another beside it, uses an Accelerator, whose settings and gradient state Accelerate keeps once for all "
                "threads of the process: what runs side by side changes each other's, or fails as it 'has already been "
                "initialized'. Leave the Accelerator out (Step(autocast=, accumulate=, clip_grad_norm=) do its work), run one at "
                "a time with max_concurrent=1, each behind AcceleratorState._reset_state(True) if settings differ, or each in a "
                "process of its own on a cluster (cluster=)",
                what,
            )


def _state() -> dict[tuple[str, str], Any]:
    # Not imported: who has not done so has no such state.
    module = sys.modules.get("accelerate.state")
    kept = ((name, getattr(module, name, None)) for name in ("PartialState", "AcceleratorState", "GradientState"))
    return {(name, key): value for name, kind in kept for key, value in [*getattr(kind, "_shared_state", {}).items()]}
