"""Operands and results are the right ones, over much code of Python's own. Needs neither torch nor pytest."""

from __future__ import annotations

import argparse
import ast
import asyncio
import collections
import dataclasses
import decimal
import difflib
import enum
import inspect
import json
import string
import sys
import textwrap
import tokenize
import types
from typing import Any

from waterflow.partition.guards.observer import MISSING, Event, Kind, observing

SOURCE = "class A:\n def f(self, *a, **k):\n  return [x for x in a if x] or {**k} or f'{a!r}'\n"


async def count(numbers: Any) -> int:
    total = 0
    async for number in numbers:
        await asyncio.sleep(0)
        total += number
    return total


async def each(most: int) -> Any:
    for number in range(most):
        yield number


def step() -> None:
    ast.unparse(ast.parse(SOURCE))
    list(tokenize.generate_tokens(iter(SOURCE.splitlines(True)).__next__))
    json.loads(json.dumps({"a": [1, 2.5, None, {"b": "c"}]}, indent=2))
    parser = argparse.ArgumentParser(prog="p")
    parser.add_argument("--size", type=int, choices=[1, 2])
    parser.parse_args(["--size", "2"])
    parser.format_help()
    dataclasses.make_dataclass("D", [("x", int), ("y", int, 3)], order=True)(1)
    enum.Enum("E", "a b")
    textwrap.fill("some words " * 30)
    inspect.signature(inspect.signature)
    list(difflib.unified_diff(SOURCE.splitlines(), SOURCE.upper().splitlines()))
    collections.namedtuple("N", "a b")(1, 2)._replace(a=3)
    string.Template("$a").substitute(a=1)
    decimal.Decimal("1.1").sqrt()
    assert asyncio.run(count(each(5))) == 10


def right(event: Event) -> bool:
    """Whether operands are of the kind that the event says, and the result is what the same operation has outside."""
    operands, result = event.operands, event.result
    if event.kind is Kind.CALL:
        return callable(operands[0]) and len(operands[1]) >= len(operands[2])
    if event.kind is Kind.CALL_UNPACKED:
        return callable(operands[0]) and (operands[2] is None or isinstance(operands[2], dict))
    if event.kind is Kind.ATTRIBUTE and isinstance(operands[0], types.ModuleType) and result is not MISSING:
        return vars(operands[0]).get(operands[1], result) is result
    if event.kind is Kind.GLOBAL and result is not MISSING:
        return operands[0].get(operands[1], result) is result or operands[0] is not vars(sys.modules["builtins"])
    if event.kind in (Kind.COMPARE, Kind.BINARY):
        return isinstance(operands[1], str)
    if event.kind is Kind.DEREF:
        return isinstance(operands[0], types.CellType)
    if event.kind is Kind.NEXT and hasattr(operands[0], "__anext__"):
        return True
    if event.kind is Kind.NEXT:
        return hasattr(operands[0], "__next__")
    if event.kind is Kind.ITERATE and result is not MISSING:
        return hasattr(result, "__next__") or hasattr(result, "__anext__")
    if event.kind is Kind.FUNCTION:
        return isinstance(result, types.FunctionType) and result.__code__ is operands[0]
    return event.kind is not Kind.UNKNOWN


def test_much_code() -> None:
    """3.11 tells how deep a frame's stack is, and an observation compares it with what the code says."""
    with observing(lambda code, space: True) as seen:
        step()
    assert seen.complete, seen.why_not
    assert len(seen.events) > 10_000
    wrong = [(seen.line(event), event) for event in seen.events if not right(event)]
    assert not wrong, wrong[0]


def test_functions_return_what_their_calls_have_for_a_result() -> None:
    """The last result of a frame that returns it is the result of the call."""
    made: list[Any] = []

    def leaf(number: int) -> Any:
        made.append(object())
        return made[-1]

    def middle(number: int) -> Any:
        if number % 3 == 0:
            raise KeyError(number)
        return leaf(number)

    def outer() -> None:
        for number in range(30):
            try:
                middle(number) if number % 2 else leaf(number)
            except KeyError:
                leaf(-1)

    with observing(lambda code, space: code.co_filename == __file__) as seen:
        outer()
    calls = [event for event in seen.events if event.kind is Kind.CALL and event.operands[0] in (leaf, middle)]
    leaves = [event.result for event in calls if event.operands[0] is leaf]
    assert len(leaves) == 30 and all(one is other for one, other in zip(leaves, made))
    returned = [event.result for event in calls if event.operands[0] is middle]
    assert returned.count(MISSING) == 5 and all(value in made for value in returned if value is not MISSING)
