"""Where a thread stands: in code of the user's, and in which line, or in our own."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = (sysconfig.get_paths()["stdlib"] + os.sep, str(Path(torch.__file__).parent) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
_TO_THE_END = ("<frozen importlib", _OURS + "partition" + os.sep)
_BETWEEN = ("data.py", "breakable_lock.py")  # ours, where it reads a library's data, or waits for another's code
_WHAT = {
    "data.py": "reading its data", "shared_data.py": "reading its data", "evaluation.py": "evaluating",
    "eager.py": "in a step", "capture.py": "capturing its step", "building.py": "making its model or optimizer",
}  # fmt: skip


def _frames(thread: int) -> list[FrameType]:
    """The innermost first."""
    frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_library(frame: FrameType) -> bool:
    """Python's own, or torch's."""
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return True
    library, ours = _LIBRARIES
    return file.startswith(ours) or (file.startswith(library) and not any(name in file for name in _INSTALLED))


def must_go_on(thread: int) -> bool:
    """Whether breaking the thread off would harm others: it imports, or it captures a step.

    Python would keep the lock of a module for ever whose import ends there, and an exception that comes out of some of the
    Python functions that torch calls in a trace ends the process.
    """
    return any(frame.f_code.co_filename.startswith(_TO_THE_END) for frame in _frames(thread))


def in_user_code(thread: int) -> bool:
    """Whether the thread is in code of the user's, or in a library that this called, or that its data is.

    Not where it must go on.
    """
    if must_go_on(thread):
        return False
    frames = _frames(thread)
    for frame in frames:
        if not _is_library(frame):
            return not _is_ours(frame) or os.path.basename(frame.f_code.co_filename) in _BETWEEN
    return False


def where(thread: int) -> str:
    """What the thread does, with the line of the user's code, where there is one."""
    frames = _frames(thread)
    doing = next((_WHAT[name] for frame in frames if _is_ours(frame)
                  and (name := os.path.basename(frame.f_code.co_filename)) in _WHAT), None)  # fmt: skip
    if not in_user_code(thread):
        return doing or "waiting for its turn, or for memory"
    mine = next((frame for frame in frames if not _is_ours(frame) and not _is_library(frame)), None)
    if mine is None:
        return doing or "in code of a library"
    file, line = mine.f_code.co_filename, mine.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{doing or 'in its own code'}, at {file}:{line} in {mine.f_code.co_name}" + (f": {text}" if text else "")
