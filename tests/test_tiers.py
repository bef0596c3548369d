"""Which tests run when: what needs time is seen, and a change leads to the tests that it concerns."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests import changed, tiers


@pytest.mark.needs_time("it tells what sleeps, and does not")
@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("time.sleep(1)", {"sleeps"}),
        ("for _ in range(3): sleep(0.1)", {"sleeps"}),
        ("while True: time.sleep(0.1)", {"sleeps"}),
        ("while not done and time.monotonic() < until: time.sleep(0.01)", set()),
        ("PROGRAM = 'import time; time.sleep(1)'", {"sleeps"}),
        ("assert time.perf_counter() - began < 1", {"measures a duration"}),
        ("until = time.monotonic() + 5", set()),
        ("await asyncio.sleep(0)", set()),
    ],
)
def test_what_needs_time_is_seen(source: str, found: set[str]) -> None:
    assert tiers._habits(ast.parse(source)) == found


def sleeper(pytestconfig: Any) -> None:
    """Stands for a test of the cluster whose fixture leads to a helper that sleeps in another file."""
    from tests.cluster.jobs import jobs

    jobs()


@pytest.mark.needs_time("it tells what sleeps, and does not")
def test_helpers_and_fixtures_are_followed(request: pytest.FixtureRequest) -> None:
    class Item:
        path = Path(__file__)
        function = staticmethod(sleeper)

    assert tiers.habits_of(Item()) == {"sleeps"}  # type: ignore[arg-type]


@pytest.mark.needs_time("the first one here parses all files")
@pytest.mark.parametrize(
    ("path", "concerned"),
    [
        ("waterflow/partition/plan/liveness.py", {"tests/partition", "tests/test_bitwise.py", "tests/test_architecture.py"}),
        ("waterflow/executor/csrc/engine/engine.cpp", {"tests/executor"}),
        ("waterflow/training/checkpoint_dir.py", {"tests/training"}),
        ("benchmarks/goals.py", {"tests/test_throughput.py"}),
        ("tests/planted_programs.py", {"tests/test_planted_leaks.py", "tests/test_planted_faults.py"}),
        ("tests/test_step.py", {"tests/test_step.py"}),
        ("docs/howto.md", {"tests/test_pages.py"}),
    ],
)
def test_a_change_leads_to_its_tests(path: str, concerned: set[str]) -> None:
    assert concerned <= {str(each) for each in changed.concerned([Path(path)])}


def test_a_commit_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="git knows no commit 'nowhere'"):
        changed.changed("nowhere")
