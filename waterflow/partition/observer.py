"""Observing what the user's own Python code reads, calls and writes while a step is traced.

Every instruction of the user's frames is seen before it runs, with the objects that it works on. Nothing is judged here, and no
code of the user's runs that would not run otherwise. Frames of libraries run as they are; those that they call are seen again.
"""

from __future__ import annotations

import linecache
import sys
import types
import weakref
from collections.abc import Callable
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

IsUsers = Callable[[types.CodeType, dict[str, Any]], bool]


class CannotObserve(NotImplementedError):
    """No way to see what a step does: by this Python, or by what else watches it."""


class observing:
    """Within, what the calling thread's user code does is seen: ``with observing(is_users) as seen``.

    ``is_users(code, globals)`` is asked once for each code object, and says whether it is the user's. Frames that run already when
    the observation begins are not seen, nor are other threads. Raises CannotObserve where there is no way to see, and RuntimeError
    where the thread is observed already.

    After the block ``events`` has what was seen, in order. They hold the objects: let go of them with ``drop``.
    """

    def __init__(self, is_users: IsUsers) -> None:
        self.events: list[Event] = []
        self._is_users = is_users
        self._observation = _C.Observation(self._plan, Kind.ENTER, Kind.CELLS)

    @property
    def why_not(self) -> str:
        """Why not everything was seen; empty where it was."""
        return self._observation.why_not

    @property
    def complete(self) -> bool:
        """Whether everything was seen."""
        return not self.why_not

    def __enter__(self) -> observing:
        if not _C.observes_this_python:
            raise CannotObserve(f"Python {sys.version.split()[0]} is not one whose frames can be observed")
        _monitoring.begin()
        try:
            self._observation.start()
        except BaseException:
            _monitoring.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._observation.stop()
        _monitoring.end()
        self.events = self._observation.take_events()

    def drop(self) -> list[str]:
        """Let go of what was seen. Returns what user code that ran: finalizers, which a step would have run itself."""
        with observing(self._is_users) as last:
            self.events = []
        return [last.line(event) for event in last.events if event.kind is Kind.ENTER]

    def line(self, event: Event) -> str:
        """``file:line, in function: code``."""
        return line_of(event)

    def _plan(self, code: types.CodeType, space: dict[str, Any], variables: int) -> Plan | None:
        if space is globals() or not self._is_users(code, space):
            return None
        _monitoring.watch(code)
        plan = _plans.get(code)
        if plan is None:
            plan = _plans[code] = plan_of(code, variables)
        return plan


_plans: weakref.WeakKeyDictionary[types.CodeType, Plan] = weakref.WeakKeyDictionary()


def line_of(event: Event) -> str:
    """``file:line, in function: code``, where an event was seen."""
    code = event.code
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= event.offset < end and line is not None:
            number = line
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}, in {code.co_name}: {text}"


class _Tracing:
    """Python 3.11: frames tell of their instructions by themselves."""

    def begin(self) -> None:
        """Nothing to be done."""

    end = begin

    def watch(self, code: types.CodeType) -> None:
        """Nothing to be done."""


class _Monitoring:
    """Later versions: sys.monitoring tells of instructions, for the code objects that it is asked to."""

    def __init__(self) -> None:
        self._observations = 0
        self._tool = 0
        self._watched: list[types.CodeType] = []

    def begin(self) -> None:
        """Take a tool's place, unless an observation has it."""
        tools: Any = sys.monitoring  # type: ignore[attr-defined]
        if not self._observations:
            free = [number for number in (4, 3, 5, 1, 2, 0) if tools.get_tool(number) is None]
            if not free:
                raise CannotObserve("all places for tools that monitor Python's code are taken (sys.monitoring)")
            self._tool = free[0]
            tools.use_tool_id(self._tool, "waterflow")
            tools.register_callback(self._tool, tools.events.INSTRUCTION, _C.observed_instruction)
        self._observations += 1

    def end(self) -> None:
        """Leave it, with the last observation."""
        self._observations -= 1
        if self._observations:
            return
        tools: Any = sys.monitoring  # type: ignore[attr-defined]
        for code in self._watched:
            tools.set_local_events(self._tool, code, 0)
        self._watched = []
        tools.register_callback(self._tool, tools.events.INSTRUCTION, None)
        tools.free_tool_id(self._tool)

    def watch(self, code: types.CodeType) -> None:
        """Have the instructions of a code object told."""
        tools: Any = sys.monitoring  # type: ignore[attr-defined]
        tools.set_local_events(self._tool, code, tools.events.INSTRUCTION)
        self._watched.append(code)


_monitoring = _Monitoring() if sys.version_info >= (3, 12) else _Tracing()
