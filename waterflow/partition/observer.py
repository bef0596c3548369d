"""Observing what the user's own Python code reads, calls and writes while a step is traced.

Every instruction of the user's frames is seen before it runs, with the objects that it works on. Nothing is judged here, and no
code of the user's runs that would not run otherwise. Frames of libraries run as they are; those that they call are seen again.
"""

from __future__ import annotations

import functools
import linecache
import types
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from waterflow import _C
from waterflow.partition.bytecode import Plan, plan_of
from waterflow.partition.opcodes import Kind

if TYPE_CHECKING:

    class Event(NamedTuple):
        """Something that a user's frame did; what ``operands`` are is said at the kinds."""

        kind: Kind
        operands: tuple[Any, ...]
        result: Any  # MISSING where the instruction made none, or raised
        code: types.CodeType
        offset: int  # of the instruction in the code, in bytes; -1 for a frame as a whole
else:
    Event = _C.ObservedEvent

MISSING = _C.MISSING
CannotObserve = _C.CannotObserve  # a NotImplementedError: by this Python, or by what else watches it

IsUsers = Callable[[types.CodeType, dict[str, Any]], bool]
Check = Callable[["Event"], None]


class observing(_C.Observation):  # type: ignore[misc,name-defined]
    """Within, what the calling thread's user code does is seen: ``with observing(is_users) as seen``.

    ``is_users(code, globals)`` is asked once for each code object, and says whether it is the user's. Frames that run already when
    the observation begins are not seen, nor are other threads. Raises CannotObserve where there is no way to see, and RuntimeError
    where the thread is observed already.

    ``check`` is called with each event of the kinds ``checked`` before it happens, without its result. What it raises is raised
    in the user's frame, in the place of what would have happened.

    After the block ``events`` has what was seen, in order. They hold the objects: let go of them with ``drop``.
    """

    why_not: str  # why not everything was seen; empty where it was

    def __new__(  # noqa: D102
        cls, is_users: IsUsers, check: Check | None = None, checked: Collection[Kind] = ()
    ) -> observing:
        return super().__new__(cls, Kind.ENTER, Kind.CELLS, check, tuple(checked))

    def __init__(self, is_users: IsUsers, check: Check | None = None, checked: Collection[Kind] = ()) -> None:
        self.events: list[Event] = []
        self._is_users = is_users

    @property
    def complete(self) -> bool:
        """Whether everything was seen."""
        return not self.why_not

    def drop(self) -> list[str]:
        """Let go of what was seen. Returns the lines of user code that ran then, which would have run within the step.

        Finalizers, that is, and what generators do as they are closed.
        """
        with observing(self._is_users) as last:
            self.events = []
        lines = [last.line(event) for event in last.events if not _says_nothing(event)]
        return [*dict.fromkeys(lines if last.complete else [*lines, last.why_not])]

    def line(self, event: Event) -> str:
        """``file:line, in function: code``."""
        return line_of(event)

    def _end(self) -> None:
        """Called as the block ends."""
        self.events = self.take_events()

    def _plan(self, code: types.CodeType, space: dict[str, Any], variables: int) -> Plan | None:
        """Called for each code object that is met."""
        if space is globals() or not self._is_users(code, space):
            return None
        known = _plans.get(id(code))
        if known is not None and known[0]() is code:
            return known[1]
        plan = plan_of(code, variables)
        _plans[id(code)] = weakref.ref(code, functools.partial(_forget, id(code))), plan
        return plan


# By identity: code objects that are equal may hold constants whose comparison is somebody's code.
_plans: dict[int, tuple[weakref.ref[types.CodeType], Plan]] = {}


def _forget(key: int, _: object) -> None:
    _plans.pop(key, None)


def _says_nothing(event: Event) -> bool:
    """Whether an event is nothing but that a frame went on: as a generator's that is closed."""
    closed = event.kind is Kind.INTRINSIC and event.operands[1] == "INTRINSIC_STOPITERATION_ERROR"
    return closed or event.kind in (Kind.ENTER, Kind.CELLS)


def line_of(event: Event) -> str:
    """``file:line, in function: code``, where an event was seen."""
    code = event.code
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= event.offset < end and line is not None:
            number = line
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}, in {code.co_name}: {text}"
