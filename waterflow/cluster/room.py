"""A full disk: whoever has something to write waits until there is room."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("waterflow")

AGAIN_SECONDS = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

T = TypeVar("T")


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one from which it comes, says that there is no room for what was written."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def when_there_is_room(what: str, write: Callable[[], T], given_up: Callable[[], bool] = lambda: False) -> T:
    """Call ``write`` until it does not fail for want of room; returns what it does. Raises its other errors.

    ``given_up``: whether nobody wants it any more; then the error is raised.
    """
    said = False
    while True:
        try:
            return write()
        except Exception as error:
            if not is_full(error) or given_up():
                raise
            if not said:
                logger.warning("%s cannot be written, and waits until there is room: %s", what, error)
            said = True
        time.sleep(AGAIN_SECONDS)
