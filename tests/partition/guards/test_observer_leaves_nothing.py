"""Whose frames are seen, and that nothing of an observation stays behind. Needs neither torch nor pytest."""

# What is written is what is observed, useless or not.
# ruff: noqa: B018

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from waterflow.partition.guards.observer import Kind, observing

OWN = __file__


class Thing:
    def __init__(self) -> None:
        self.table = {"a": 1}

    def __getitem__(self, key: Any) -> Any:
        return key

    @property
    def size(self) -> int:
        return len(self.table)

    def each(self) -> Iterator[int]:
        yield 1


THING = Thing()


def is_users(code: types.CodeType, space: dict[str, Any]) -> bool:
    return code.co_filename == OWN and not code.co_name.startswith("test_")


def library(source: str) -> dict[str, Any]:
    """Functions whose file is not the user's."""
    space: dict[str, Any] = {}
    exec(compile(source, "library.py", "exec"), space)
    return space


def entered(seen: observing) -> list[str]:
    return [event.code.co_name for event in seen.events if event.kind is Kind.ENTER]


def _interpreter() -> ctypes.c_void_p:
    current = ctypes.pythonapi.PyInterpreterState_Get
    current.restype = ctypes.c_void_p
    return ctypes.c_void_p(current())


def evaluator() -> int:
    get = ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return get(_interpreter())


def set_evaluator(function: int) -> None:
    put = ctypes.pythonapi._PyInterpreterState_SetEvalFrameFunc
    put.restype, put.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    put(_interpreter(), ctypes.c_void_p(function))


@contextlib.contextmanager
def nothing_stays() -> Iterator[None]:
    before = evaluator(), sys.gettrace(), sys.getprofile()
    yield
    assert (evaluator(), sys.gettrace(), sys.getprofile()) == before
    if sys.version_info >= (3, 12):
        assert all(sys.monitoring.get_tool(number) != "waterflow" for number in range(6))


# -- whose frames


def test_libraries_are_not_seen_and_whom_they_call_is() -> None:
    through = library("""
def calls(function):
    table = {}
    for n in range(3):
        table[n] = function(n)
    return table
""")["calls"]

    def hook(n: int) -> Any:
        return THING.table

    def step() -> None:
        through(hook)
        sorted([2, 1], key=hook and (lambda n: n))

    asked: list[str] = []

    def whose(code: types.CodeType, space: dict[str, Any]) -> bool:
        asked.append(code.co_name)
        return is_users(code, space)

    with nothing_stays(), observing(whose) as seen:
        step()
    assert entered(seen) == ["step", "hook", "hook", "hook", "<lambda>", "<lambda>"]
    assert {event.code.co_filename for event in seen.events} == {OWN}
    assert len([event for event in seen.events if event.kind is Kind.ATTRIBUTE]) == 3
    assert sorted(asked) == sorted({*asked})


def test_frames_that_specialized_code_calls_are_seen() -> None:
    """The interpreter runs properties, __getitem__ and generators without a call, once it knows them."""
    space = library("def get(a):\n for _ in range(9):\n  a[1]\n  a.size\n  for _ in a.each(): pass\n")
    for _ in range(100):
        space["get"](THING)

    def step() -> None:
        space["get"](THING)

    with observing(is_users) as seen:
        step()
    assert {name: entered(seen).count(name) for name in ("__getitem__", "size", "each")} == {
        "__getitem__": 9, "size": 9, "each": 27,
    }  # fmt: skip


def test_recursion_and_its_limit() -> None:
    def deep(n: int) -> int:
        return 0 if n == 0 else 1 + deep(n - 1)

    with nothing_stays(), observing(is_users) as seen:
        assert deep(50) == 50
        with contextlib.suppress(RecursionError):
            deep(1_000_000)
    assert seen.complete and entered(seen).count("deep") > 100


def test_other_threads_are_not_seen_and_may_observe_themselves() -> None:
    def step(name: str) -> str:
        return THING.table and name

    started, done = threading.Barrier(3), threading.Barrier(3)
    seen: list[list[str]] = []

    def run(watch: bool) -> None:
        with observing(is_users) if watch else contextlib.nullcontext() as found:
            started.wait(10)
            for _ in range(200):
                step(threading.current_thread().name)
            done.wait(10)
        if found is not None:
            seen.append(entered(found))

    with nothing_stays():
        threads = [threading.Thread(target=run, args=(watch,)) for watch in (True, True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [names.count("step") for names in seen] == [200, 200]


def test_an_observation_inside_of_another_is_refused() -> None:
    with nothing_stays(), observing(is_users) as seen:
        try:
            with observing(is_users):
                raise AssertionError
        except RuntimeError as error:
            assert "already" in str(error)
    assert seen.complete


def test_generators_go_on_outside() -> None:
    def numbers() -> Iterator[Any]:
        yield THING.table
        yield THING.size

    running = numbers()
    early = numbers()
    next(early)
    with observing(is_users) as seen:
        next(running)
        next(early)
    frame: Any = running.gi_frame  # type: ignore[attr-defined]
    assert frame.f_trace_lines and not frame.f_trace_opcodes
    assert next(running) == 1 and list(early) == []
    assert entered(seen) == ["numbers", "numbers", "size"]
    with observing(is_users) as seen, contextlib.suppress(KeyError):
        running.throw(KeyError)
    assert entered(seen) == ["numbers"] and seen.complete


# -- nothing stays


def test_references_are_let_go_of() -> None:
    values = [object() for _ in range(3)]

    def step() -> list[Any]:
        return [value for value in values if value is not THING.table] + values[:1]

    step()
    with observing(is_users) as seen:
        pass
    before = [sys.getrefcount(value) for value in (*values, values, THING.table)]
    for _ in range(3):
        with observing(is_users) as seen:
            step()
        assert sys.getrefcount(values) > before[3] and seen.drop() == []
    del seen
    assert [sys.getrefcount(value) for value in (*values, values, THING.table)] == before


def test_an_observation_that_holds_itself_is_collected() -> None:
    held: list[Any] = []

    def step() -> Any:
        return held[0]

    with observing(is_users) as seen:
        held.append(seen)
        step()
    gone = weakref.ref(seen)
    del seen
    held.clear()
    gc.collect()
    assert gone() is None


def test_finalizers_that_run_late_are_told() -> None:
    class Late:
        def __del__(self) -> None:
            THING.table

    def step() -> None:
        Late()

    with observing(is_users) as seen:
        step()
    told = seen.drop()
    assert len(told) == 1 and "in __del__" in told[0] and OWN in told[0]


def test_generators_that_are_left_behind_close_late_and_say_nothing() -> None:
    def careful() -> Iterator[Any]:
        try:
            yield 1
        finally:
            THING.table

    def step(generator: Any = None) -> None:
        next(value for value in [THING])
        any(value for value in [THING])
        if generator is not None:
            next(generator())

    with observing(is_users) as seen:
        step()
    assert seen.drop() == []
    with observing(is_users) as seen:
        step(careful)
    assert [line.split(", ")[1] for line in seen.drop()] == ["in careful: THING.table"]


def test_errors_leave_nothing() -> None:
    def step() -> None:
        raise KeyError

    with nothing_stays(), contextlib.suppress(KeyError), observing(is_users) as seen:
        step()
    assert entered(seen) == ["step"]

    def unsure(code: types.CodeType, space: dict[str, Any]) -> bool:
        raise ValueError

    with nothing_stays(), contextlib.suppress(KeyError), observing(unsure) as seen:
        step()
    assert not seen.complete and "user's" in seen.why_not


def test_an_interrupt_in_an_observed_frame() -> None:
    def step() -> None:
        THING.table
        signal.raise_signal(signal.SIGINT)
        for _ in range(1000):
            THING.table

    with nothing_stays(), contextlib.suppress(KeyboardInterrupt), observing(is_users) as seen:
        step()
    assert 1 <= len([event for event in seen.events if event.operands[-1:] == ("table",)]) <= 3


def test_interrupts_at_any_time() -> None:
    """Also in the middle of what begins and ends an observation."""

    def step() -> None:
        for _ in range(20):
            sorted([THING.size], key=lambda n: n)

    def interrupt() -> None:
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(0.0005)

    over = threading.Event()
    main = threading.get_ident()
    struck = 0
    with nothing_stays():
        thread = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        thread.start()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for _ in range(300):
                try:
                    with observing(is_users):
                        step()
                except KeyboardInterrupt:
                    struck += 1
        except KeyboardInterrupt:
            struck += 1
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            over.set()
            thread.join()
            signal.signal(signal.SIGINT, before)
    assert struck
    with observing(is_users) as seen:
        step()
    assert seen.complete and entered(seen).count("step") == 1


def test_collections_meanwhile() -> None:
    class Knot:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            THING.table

    def step() -> None:
        for _ in range(5):
            Knot()
        gc.collect()

    with nothing_stays(), observing(is_users) as seen:
        step()
    assert seen.complete
    seen.drop()


# -- others who watch


def traced_lines(step: Callable[[], Any], watch: bool) -> list[tuple[str, str, int]]:
    lines: list[tuple[str, str, int]] = []

    def tracer(frame: types.FrameType, what: str, _: Any) -> Any:
        if frame.f_code.co_filename in (OWN, "library.py") and frame.f_code.co_name in ("step", "calls", "hook", "each"):
            lines.append((what, frame.f_code.co_name, frame.f_lineno))
        return tracer

    with nothing_stays(), observing(is_users) if watch else contextlib.nullcontext():
        sys.settrace(tracer)
        try:
            step()
        finally:
            sys.settrace(None)
    return lines


def test_tracers_see_what_they_saw_before() -> None:
    calls = library("def calls(f):\n  f()\n  return f()\n")["calls"]

    def hook() -> int:
        try:
            raise KeyError
        except KeyError:
            return sum(THING.each())

    def step() -> None:
        for _ in range(2):
            calls(hook)

    alone = traced_lines(step, False)
    assert len(alone) > 20 and traced_lines(step, True) == alone


def test_profilers_see_what_they_saw_before() -> None:
    def step() -> None:
        len(json.dumps(THING.table))

    def profiled(watch: bool) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        context: Any = observing(is_users) if watch else contextlib.nullcontext()
        with context:
            sys.setprofile(lambda frame, what, _: found.append((what, frame.f_code.co_name)))
            try:
                step()
            finally:
                sys.setprofile(None)
        return found

    profiled(False)
    assert profiled(True) == profiled(False)


def test_a_step_that_sets_a_trace_function() -> None:
    def step() -> None:
        sys.settrace(lambda *_: None)

    try:
        with observing(is_users) as seen:
            step()
        assert seen.complete == (sys.version_info >= (3, 12))  # where the observer does not trace
        assert sys.gettrace() is not None
    finally:
        sys.settrace(None)


def test_another_evaluator_is_told_of() -> None:
    before = evaluator()

    def step() -> None:
        set_evaluator(before)
        THING.table

    with nothing_stays(), observing(is_users) as seen:
        step()
    assert not seen.complete and "evaluates" in seen.why_not
    with observing(is_users) as seen:
        THING.each()
    assert seen.complete
