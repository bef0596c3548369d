"""The lines of objectives in which a study's time goes: one thread looks ten times a second where the threads of trials are."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType

from waterflow.executor.cancel import READING, activity, is_users
from waterflow.executor.stats import BETWEEN
from waterflow.run_stats import OWN

LOOK_SECONDS = 0.1


class LineSampler:
    """Counts, inside the context, in which line of the user's each of ``threads()`` is: while it loads, and between steps.

    ``objective`` is the code that calls the objective: what is outside of that is not looked at.
    """

    def __init__(self, threads: Callable[[], Iterable[int]], objective: CodeType) -> None:
        self._threads, self._objective = threads, objective
        self._seen: dict[str, Counter[tuple[str, int]]] = {BETWEEN: Counter(), OWN: Counter()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="line-sampler", daemon=True)

    def __enter__(self) -> LineSampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def lines(self) -> Mapping[str, str]:
        """Return the line that was seen most often, for people, by what the thread did there."""
        found = {}
        for what, lines in self._seen.items():
            for (file, line), _ in lines.most_common(1):
                text = linecache.getline(file, line).strip()
                found[what] = f"{Path(file).name}:{line}" + (f" ({text})" if text else "")
        return found

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            frames = sys._current_frames()
            for thread in self._threads():
                self._count(frames.pop(thread, None))
            frames.clear()  # a frame that is held, by a name here too, keeps the user's tensors alive

    def _count(self, frame: FrameType | None) -> None:
        line, what, ours = None, OWN, False
        while frame is not None and frame.f_code is not self._objective:
            if line is None and frame.f_lineno is not None and is_users(frame):
                line = frame.f_code.co_filename, frame.f_lineno
            doing = activity(frame)
            if doing == READING:
                what = BETWEEN
            ours = ours or doing is not None
            frame = frame.f_back
        # Lines within a step or an evaluation are not the loop's.
        if frame is not None and line is not None and (what == BETWEEN or not ours):
            self._seen[what][line] += 1
