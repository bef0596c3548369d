"""What user code does is seen, with its objects; and nothing of the observer stays. Needs neither torch nor pytest."""

# What is written is what is observed, useless or not.
# ruff: noqa: B018, B023, C416, C420, PIE800, PIE804, RUF012, SIM105

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from waterflow.partition.guards.observer import MISSING, Event, Kind, observing, treatment

OWN = __file__


def is_users(code: types.CodeType, space: dict[str, Any]) -> bool:
    return code.co_filename == OWN and not code.co_name.startswith("test_")


def seen_of(step: Callable[[], Any], whose: Callable[..., bool] = is_users) -> list[Event]:
    with observing(whose) as seen:
        step()
    assert seen.complete, seen.why_not
    assert not [event for event in seen.events if event.kind is Kind.UNKNOWN]
    return seen.events


def of_kind(events: list[Event], kind: Kind) -> list[tuple[Any, ...]]:
    return [event.operands for event in events if event.kind is kind]


def only(events: list[Event], kind: Kind) -> Event:
    found = [event for event in events if event.kind is kind]
    assert len(found) == 1, found
    return found[0]


def entered(events: list[Event]) -> list[str]:
    return [event.code.co_name for event in events if event.kind is Kind.ENTER]


def library(source: str, **names: Any) -> dict[str, Any]:
    """Functions whose file is not the user's."""
    space: dict[str, Any] = dict(names)
    exec(compile(source, "library.py", "exec"), space)
    return space


def evaluator() -> int:
    get = ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return get(ctypes.c_void_p(interpreter()))


def interpreter() -> int:
    current = ctypes.pythonapi.PyInterpreterState_Get
    current.restype = ctypes.c_void_p
    return current()


class Thing:
    shared = [1, 2, 3]

    def __init__(self) -> None:
        self.value: Any = [3, 4]
        self.table = {"a": 1}

    def method(self, *arguments: Any, **names: Any) -> int:
        return len(arguments) + len(names)

    @property
    def doubled(self) -> int:
        return len(self.value) * 2

    def __getitem__(self, key: Any) -> Any:
        return key

    def __enter__(self) -> str:
        return "inside"

    def __exit__(self, *_: object) -> bool:
        return True


THING = Thing()
COUNT = 0


# -- the tables


def test_every_opcode_is_known() -> None:
    assert [name for name in dis.opmap if treatment(name) == "unknown"] == []


# -- kinds


def test_attributes() -> None:
    thing = Thing()
    value = thing.value

    def step() -> None:
        found = thing.value
        thing.other = found
        del thing.other  # type: ignore[attr-defined]

    events = seen_of(step)
    read = only(events, Kind.ATTRIBUTE)
    assert read.operands == (thing, "value") and read.result is value
    assert of_kind(events, Kind.SET_ATTRIBUTE) == [(thing, "other", value)]
    assert of_kind(events, Kind.DELETE_ATTRIBUTE) == [(thing, "other")]


def test_methods_and_calls() -> None:
    thing = Thing()

    def step() -> None:
        thing.method(1, name=2)
        thing.method(*(1, 2), **{"name": 3})
        bound = thing.method
        bound(4)

    events = seen_of(step)
    reads = [event for event in events if event.kind is Kind.ATTRIBUTE]
    assert all(event.operands == (thing, "method") for event in reads) and len(reads) == 3
    calls = [event for event in events if event.kind is Kind.CALL and event.code.co_name == "step"]
    assert calls[0].operands == (Thing.method, (thing, 1, 2), ("name",)) and calls[0].result == 2
    assert calls[1].operands == (Thing.method, (thing, 4), ()) and calls[1].result == 1
    unpacked = only(events, Kind.CALL_UNPACKED)
    assert unpacked.operands == (Thing.method, (1, 2), {"name": 3}, thing) and unpacked.result == 3
    assert entered(events) == ["step", "method", "method", "method"]
    assert events[0].operands[0] is step


def test_items_and_slices() -> None:
    values = [1, 2, 3]
    table: dict[str, int] = {}

    def step() -> None:
        values[0]
        values[1:2]
        values[0] = 7
        values[2:3] = [8]
        table["a"] = 1
        del table["a"]

    events = seen_of(step)
    new = sys.version_info >= (3, 12)
    assert (values, 0) in of_kind(events, Kind.ITEM)
    assert next(e for e in events if e.kind is Kind.ITEM).result == 1
    assert of_kind(events, Kind.SLICE) == ([(values, 1, 2)] if new else [])
    assert ((values, slice(1, 2)) in of_kind(events, Kind.ITEM)) != new
    assert of_kind(events, Kind.SET_ITEM)[0] == (values, 0, 7)
    assert of_kind(events, Kind.DELETE_ITEM) == [(table, "a")]


def test_globals() -> None:
    def step() -> None:
        global COUNT
        COUNT = len(THING.table)

    events = seen_of(step)
    found = {event.operands[1]: (event.operands[0], event.result) for event in events if event.kind is Kind.GLOBAL}
    assert found["len"][0] is vars(sys.modules["builtins"]) and found["len"][1] is len
    assert found["THING"][0] is globals() and found["THING"][1] is THING
    assert of_kind(events, Kind.SET_GLOBAL) == [(globals(), "COUNT", 1)]


def test_variables_of_outer_functions() -> None:
    outer = [1]

    def step() -> None:
        nonlocal outer
        own = outer

        def inner() -> None:
            nonlocal own
            own = [2]

        inner()
        outer = own

    cell = step.__closure__[0]  # type: ignore[index]
    events = seen_of(step)
    read = next(event for event in events if event.kind is Kind.DEREF)
    assert read.operands == (cell, "outer") and read.result == [1]
    made = only(events, Kind.CELLS).operands[0]
    assert [(event.operands[0], event.operands[1]) for event in events if event.kind is Kind.SET_DEREF] == [
        (made, "own"), (cell, "outer"),
    ]  # fmt: skip


def test_arithmetic_comparisons_and_truth() -> None:
    values, other = [1], [2]

    def step() -> int:
        total = values + other
        total += other
        number = 1 + 2 * len(total)
        if total and total != values and 1 in total and number < 100 and not values:
            return 1
        return -number

    events = seen_of(step)
    assert [(left, sign) for left, sign, _ in of_kind(events, Kind.BINARY)] == [(values, "+"), ([1, 2, 2], "+=")]
    assert next(e for e in events if e.kind is Kind.BINARY).result is not MISSING
    assert [sign for _, sign, _ in of_kind(events, Kind.COMPARE)] == ["!="]
    assert of_kind(events, Kind.CONTAINS) == [([1, 2, 2], 1)]
    assert [1] in [operands[0] for operands in of_kind(events, Kind.TEST)]
    assert of_kind(events, Kind.UNARY) == []  # of a number


def test_which_object_it_is() -> None:
    values, other = [1], [2]

    def step() -> bool:
        same = values is other or values is not other
        return same and values is not None and None is not other and values is not list and (values is True) is False

    assert of_kind(seen_of(step), Kind.IDENTITY) == [(values, other), (values, other)]


def test_loops_and_unpacking() -> None:
    def step() -> None:
        for left, right in [(1, 2), (3, 4)]:
            left + right
        first, *rest = [1, 2, 3]
        [*rest, first]
        {**{"a": 1}}

    events = seen_of(step)
    steps = [event.result for event in events if event.kind is Kind.NEXT]
    assert steps == [(1, 2), (3, 4), MISSING]
    assert len(of_kind(events, Kind.UNPACK)) == 3 and len(of_kind(events, Kind.EXTEND)) >= 2


def test_comprehensions_and_generators() -> None:
    def numbers() -> Iterator[int]:
        got = yield 1
        yield got
        yield from [5, 6]

    def step() -> list[Any]:
        running = numbers()
        next(running)
        running.send(7)
        return [*[n for n in running], *sorted(n for n in {2, 1}), {n: THING for n in range(2)}]

    events = seen_of(step)
    assert entered(events).count("numbers") == 6  # it is made, and goes on five times
    sent = [event for event in events if event.kind is Kind.SEND]
    assert [event.result for event in sent] == [5, 6, None]


def test_cells_of_comprehensions() -> None:
    """From 3.12 on, comprehensions make their cells in the frame around them."""

    def step() -> list[Any]:
        return [lambda: value for value in [THING]]

    events = seen_of(step)
    kind = Kind.CELL if sys.version_info >= (3, 12) else Kind.CELLS
    made = [event.result if kind is Kind.CELL else event.operands[0] for event in events if event.kind is kind]
    assert len(made) == 1 and made[0].cell_contents is THING


def test_exceptions_have_no_results() -> None:
    def fails() -> None:
        raise KeyError("no")

    def step() -> None:
        try:
            THING.nothing  # type: ignore[attr-defined]
        except AttributeError:
            pass
        with contextlib.suppress(KeyError):
            fails()
        for _ in range(3):
            try:
                THING.table["b"]
            except KeyError as error:
                str(error)
            finally:
                THING.value

    events = seen_of(step)
    assert all(
        (event.result is MISSING) == (event.operands[1] == "nothing")
        for event in events if event.kind is Kind.ATTRIBUTE
    )  # fmt: skip
    assert [event.result for event in events if event.kind is Kind.ITEM] == [MISSING] * 3
    assert len(of_kind(events, Kind.RAISE)) == 1
    call = next(event for event in events if event.kind is Kind.CALL and event.operands[0].__name__ == "fails")
    assert call.result is MISSING


def test_with_match_and_imports() -> None:
    def step() -> None:
        with THING as name:
            raise ValueError(name)
        import collections.abc as place
        from functools import reduce

        match THING.table:
            case {"a": number}:
                f"{place}{reduce!r:>3}{number}"
        match 3:
            case int(value):
                value

    events = seen_of(step)
    entry = only(events, Kind.WITH)
    assert entry.operands == (THING,) and entry.result == "inside"
    exit_function, error = only(events, Kind.LEAVE).operands
    assert exit_function.__self__ is THING and isinstance(error, ValueError)
    assert [(name, names) for _, name, names in of_kind(events, Kind.IMPORT)] == [
        ("collections.abc", None), ("functools", ("reduce",)),
    ]  # fmt: skip
    assert next(e for e in events if e.kind is Kind.IMPORT_FROM and e.operands[1] == "reduce").result is functools.reduce
    assert THING.table in [operands[0] for operands in of_kind(events, Kind.MATCH)]
    assert of_kind(events, Kind.FORMAT)


def test_classes_exec_and_lambdas_without_source() -> None:
    bare = eval("lambda x: x.table")

    def step() -> Any:
        class Made(Thing):
            size = THING.table

            def method(self, *arguments: Any, **names: Any) -> int:
                return super().method(*arguments, **names)

        made = Made()
        made.method(1)
        exec("total = 0\nfor n in (1, 2):\n    total += n\n", {"__name__": "user"})
        return bare(made)

    def whose(code: types.CodeType, space: dict[str, Any]) -> bool:
        return is_users(code, space) or code.co_filename == "<string>"

    events = seen_of(step, whose)
    assert "Made" in entered(events) and "<lambda>" in entered(events) and "<module>" in entered(events)
    assert "size" in [name for _, name, _ in of_kind(events, Kind.SET_NAME)]
    assert only(events, Kind.BUILD_CLASS).result is __builtins__["__build_class__"]
    if sys.version_info >= (3, 12):
        assert only(events, Kind.SUPER).operands[1] == "method"
    assert of_kind(events, Kind.NAME) and of_kind(events, Kind.FUNCTION)


def test_coroutines() -> None:
    class Door:
        async def __aenter__(self) -> int:
            return 1

        async def __aexit__(self, *_: object) -> None:
            await asyncio.sleep(0)

    async def numbers() -> Any:
        yield 1
        await asyncio.sleep(0)
        yield 2

    async def walk() -> list[int]:
        async with Door() as first:
            return [first, *[n async for n in numbers()]]

    def step() -> None:
        assert asyncio.run(walk()) == [1, 1, 2]

    events = seen_of(step)
    assert {"walk", "__aenter__", "__aexit__", "numbers"} <= {*entered(events)}
    assert of_kind(events, Kind.AWAIT) and of_kind(events, Kind.SEND)


def test_long_code() -> None:
    """With prefixes to opcodes, whose arguments do not fit."""
    lines = [f"    x{n} = thing.a{n}" for n in range(400)] + ["    for n in (1, 2):"] + [f"        x{n}" for n in range(400)]
    space: dict[str, Any] = {}
    exec(compile("def step(thing):\n" + "\n".join(lines), OWN, "exec"), space)
    thing = types.SimpleNamespace(**{f"a{n}": [n] for n in range(400)})
    events = seen_of(lambda: space["step"](thing))
    reads = [event for event in events if event.kind is Kind.ATTRIBUTE and event.operands[0] is thing]
    assert [event.operands[1] for event in reads] == [f"a{n}" for n in range(400)]
    assert [event.result for event in reads] == [[n] for n in range(400)]
    assert [event.result for event in events if event.kind is Kind.NEXT] == [1, 2, MISSING]
