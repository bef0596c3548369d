"""What others ask of a running job, which it does when no step of it is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any

from waterflow.errors import CheckpointError

LOOK_AGAIN = 0.05  # seconds


class JobEnded(CheckpointError):
    """There is no state between two steps any more."""


@dataclass(eq=False)
class Wish:
    """Something to do between two steps: a copy of the job's state, and with ``suspend`` to stand still behind it."""

    suspend: bool
    made: Future[Any] = field(default_factory=Future)


class Boundary:
    """Wishes of other threads, and the job's thread that fulfils them. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._wishes: list[Wish] = []
        self._over = False
        self._going = threading.Event()
        self._going.set()

    @property
    def wished(self) -> bool:
        """Whether anything waits."""
        return bool(self._wishes)

    @property
    def suspended(self) -> bool:
        """Whether the job stands still, or is about to."""
        return not self._going.is_set()

    def ask(self, suspend: bool) -> Future[Any]:
        """For the job's state at its next boundary; a CheckpointError where none comes."""
        wish = Wish(suspend)
        with self._lock:
            if self._over:
                wish.made.set_exception(self._ended())
            else:
                self._wishes.append(wish)
        return wish.made

    def await_answer(self, made: Future[Any], timeout: float | None) -> Any:
        """What was asked for. Raises CheckpointError where it does not come in time, and takes the wish back."""
        try:
            return made.result(timeout)
        except Late:
            with self._lock:
                before, self._wishes = self._wishes, [wish for wish in self._wishes if wish.made is not made]
            if len(before) == len(self._wishes):
                return made.result()  # it is being made
            raise CheckpointError(
                f"job {self._name!r} did not come to the end of a step within {timeout} s; wait longer, or ask again"
            ) from None

    def answer(self, make: Callable[[], Any], stand: Callable[[Any, Callable[[], None]], None] | None = None) -> None:
        """Give what ``make`` makes to all who ask for a copy; with ``stand`` to those who want the job suspended.

        That is then called with it, and with a function that tells them that the job stands.
        """
        with self._lock:
            mine = [wish for wish in self._wishes if wish.suspend == (stand is not None)]
            self._wishes = [wish for wish in self._wishes if wish not in mine]
        if not mine:
            return
        try:
            made = make()
        except Exception as error:  # theirs, not the job's
            for wish in mine:
                wish.made.set_exception(error)
            return

        def tell() -> None:
            self._going.clear()
            for wish in mine:
                wish.made.set_result(made)

        if stand is None:
            for wish in mine:
                wish.made.set_result(made)
            return
        try:
            stand(made, tell)
        except BaseException as error:
            for wish in mine:
                if not wish.made.done():
                    wish.made.set_exception(error)
            raise

    def go(self) -> None:
        """It goes on. Raises CheckpointError where it does not stand."""
        if self._going.is_set():
            raise CheckpointError(f"job {self._name!r} is not suspended; only a suspended job can be resumed")
        self._going.set()

    def await_go(self, check: Callable[[], None], state: Any) -> None:
        """Until it is to go on, or ``check`` raises. Who asks meanwhile is given ``state``."""
        try:
            while not self._going.wait(timeout=LOOK_AGAIN):
                check()
                for wish in self._wishes_now():
                    wish.made.set_result(state)
        finally:
            self._going.set()

    def end(self) -> None:
        """The job comes to no boundary any more."""
        self._over = True
        for wish in self._wishes_now():
            wish.made.set_exception(self._ended())

    def _wishes_now(self) -> list[Wish]:
        with self._lock:
            now, self._wishes = self._wishes, []
        return now

    def _ended(self) -> JobEnded:
        return JobEnded(f"job {self._name!r} has ended: its result has what it trained")
