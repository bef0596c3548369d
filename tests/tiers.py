"""Which tests run when, and which of the short tier need time.

Three tiers: what has no marker is the short one (``make test``); ``slow`` runs with ``--all`` (``make test-all``);
``campaign``, long random runs, with ``--full``. A test of the short tier that sleeps, measures a duration or takes over a
second says why in ``needs_time("reason")``. ``pytest --tiers`` lists those, and what has no reason; seconds are those of
each test's last run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.imports import ROOT

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"}
LAST_RUN = "waterflow/seconds"
LONG = 1.0  # seconds


def left_out(config: pytest.Config) -> set[str]:
    """The markers whose tests do not run now. A test that is named by itself runs whatever its tier."""
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return set()
    return {"campaign"} if config.getoption("--all") else {"campaign", "slow"}


def reason_of(item: pytest.Item) -> str:
    """Why a test of the short tier may need time; empty where it does not say."""
    marker = item.get_closest_marker("needs_time")
    return str(marker.args[0]) if marker and marker.args else ""


def habits_of(item: pytest.Item) -> set[str]:
    """How a test depends on time by its source: what it calls in the tests' own files, its fixtures included."""
    function = getattr(item, "function", None)
    return _habits_of(item.path.relative_to(ROOT), function.__qualname__.split(".")[0]) if function else set()


@functools.cache
def _habits_of(own: Path, test: str) -> set[str]:
    found: set[str] = set()
    ways = [(own, test)]
    seen = set(ways)
    while ways:
        path, name = ways.pop()
        found |= _facts(path).get(name, (set(), set()))[0]
        ways += _used(path, name) - seen
        seen |= _used(path, name)
    return found


@functools.cache
def _used(path: Path, name: str) -> set[tuple[Path, str]]:
    """Where the names are defined that something in a test file uses: there, where they are imported from, or in a conftest."""
    names = _facts(path).get(name, (set(), set()))[1]
    here, imported = names & _facts(path).keys(), (names - _facts(path).keys()) & _imported(path).keys()
    found = {(path, each) for each in here} | {_imported(path)[each] for each in imported}
    for folder in {path.parent, Path("tests")}:
        if (ROOT / folder / "conftest.py").exists():
            fixtures = _facts(folder / "conftest.py").keys()
            found |= {(folder / "conftest.py", each) for each in (names - here - imported) & fixtures}
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@functools.cache
def _imported(path: Path) -> dict[str, tuple[Path, str]]:
    found = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            file = Path(*cast(str, node.module).split(".")).with_suffix(".py")
            if (ROOT / file).exists() and ROOT / file != Path(__file__):  # which tells of what sleeps
                found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return found


@functools.cache
def _facts(path: Path) -> dict[str, tuple[set[str], set[str]]]:
    """For each name that a file defines at its top: how it depends on time, and the names that it uses."""
    found = {}
    for node in _tree(path).body:
        names = [getattr(node, "name", "")]
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        facts = (_habits(node), {name for each in ast.walk(node) if (name := _name(each))})
        found |= {name: facts for name in names if name}
    return found


def _habits(tree: ast.AST) -> set[str]:
    """Loops that poll ``while`` a condition may sleep in between, and clocks may bound them: neither is a habit."""
    found = set()
    nodes = [(tree, False)]
    while nodes:
        node, waits = nodes.pop()
        if _is_sleep(node) and not (waits and isinstance(node, ast.Call)):
            found.add("sleeps")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _is_clock(node.left):
            found.add("measures a duration")
        waits |= isinstance(node, ast.While) and ast.unparse(node.test) not in ("True", "1")
        nodes += [(child, waits) for child in ast.iter_child_nodes(node)]
    return found


def _is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):  # a program in a string
        return isinstance(node.value, str) and "sleep(" in node.value
    return _called(node) == "sleep" and ast.unparse(node) != "asyncio.sleep(0)"


def _is_clock(node: ast.AST) -> bool:
    return _called(node) in CLOCKS


def _called(node: ast.AST) -> str:
    """The last name of what a call calls; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def without_reason(items: Iterable[pytest.Item]) -> list[str]:
    """Tests of the short tier that sleep or measure a duration and do not say why, a line for each test function."""
    found = {}
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in ("slow", "campaign")) and not reason_of(item):
            habits = habits_of(item)
            if habits:
                found[item.nodeid.split("[")[0]] = " and ".join(sorted(habits))
    return [f"{name}: {what}" for name, what in found.items()]


def remember(config: pytest.Config, seconds: dict[str, float]) -> None:
    """Keep how long tests took, for ``--tiers``."""
    cache = cast(Any, getattr(config, "cache", None))
    if cache is None:  # switched off
        return
    cache.set(LAST_RUN, cache.get(LAST_RUN, {}) | {name: round(each, 2) for name, each in seconds.items()})


def report(config: pytest.Config, items: Iterable[pytest.Item]) -> str:
    """What ``--tiers`` prints."""
    items = [item for item in items if not any(item.get_closest_marker(tier) for tier in ("slow", "campaign"))]
    seconds = cast(Any, config.cache).get(LAST_RUN, {})
    reasons: dict[str, list[str]] = {}
    for item in items:
        if reason_of(item):
            reasons.setdefault(reason_of(item), []).append(item.nodeid)
    lines = []
    for reason, names in sorted(reasons.items()):
        lines.append(f"\n{reason}")
        lines += [f"  {seconds.get(name, 0):6.2f} s  {name}" for name in names]
    long = [i.nodeid for i in items if seconds.get(i.nodeid, 0) > LONG and not reason_of(i)]
    lines += ["\nwithout a reason"]
    lines += [f"  {seconds[name]:6.2f} s  {name}" for name in sorted(long, key=lambda name: -seconds[name])]
    lines += [f"  {line}" for line in without_reason(items)]
    total = sum(seconds.get(item.nodeid, 0) for item in items)
    return "\n".join([*lines, f"\n{len(items)} tests of the short tier, {total:.0f} s one after the other"])
