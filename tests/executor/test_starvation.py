"""Opportunistic jobs that are left no lane."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

import waterflow as wf
from tests.executor.test_policy import batches, job
from waterflow.executor import interference
from waterflow.executor.interference import Starvation

NAMES = {0: "a", 1: "b", 2: "late", 3: "other"}


class Lanes:
    """Jobs with steps that wait, at a time of the test's choosing."""

    def __init__(self) -> None:
        self.time = 100.0
        self.waiting: dict[int, int] = {2: 1, 3: 1}
        self.decisions: list[Any] = []
        self.starving = Starvation(self.decisions, self.queued, 2, lambda: self.time)

    def queued(self, number: int) -> int:
        if number not in self.waiting:
            raise ValueError("it has left")
        return self.waiting[number]

    def run(self, seconds: int, guaranteed: tuple[int, ...] = (0, 1), ends: tuple[int, ...] = ()) -> list[str]:
        """What is decided meanwhile; ``ends`` have a step each second."""
        before = len(self.decisions)
        for _ in range(seconds):
            self.time += 1.0
            for each in ends:
                self.starving.ended(each)
            self.starving.poll({2, 3}, guaranteed, NAMES)
        return [str(decision) for decision in self.decisions[before:]]


def test_a_job_without_a_step_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    lanes = Lanes()
    with caplog.at_level("WARNING", logger="waterflow"):
        assert lanes.run(30, ends=(3,)) == []
        (told,) = lanes.run(60, ends=(3,))
    assert told.startswith("opportunistic job 'late' has had no step for 30 s: guaranteed jobs ('a', 'b') keep all 2 lanes")
    assert "pass lanes=3" in told and [record.getMessage() for record in caplog.records] == [told]


def test_each_job_is_told_of() -> None:
    assert len(Lanes().run(60)) == 2


@pytest.mark.parametrize("guaranteed", [(), (0,)])
def test_who_has_a_lane_and_waits_for_something_else_is_not_told_of(guaranteed: tuple[int, ...]) -> None:
    assert Lanes().run(60, guaranteed) == []


def test_time_counts_from_where_the_lanes_are_kept() -> None:
    lanes = Lanes()
    lanes.run(25)
    lanes.run(2, (0,))
    assert lanes.run(25) == [] and len(lanes.run(10)) == 2


def test_who_asks_for_no_step_or_has_left_is_not_told_of() -> None:
    lanes = Lanes()
    lanes.waiting = {2: 0}
    assert lanes.run(60) == []


def test_a_run_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "STARVED_SECONDS", 0.2)
    monkeypatch.setattr(interference, "LOOK_SECONDS", 0.0)
    over = threading.Event()
    until = time.monotonic() + 120

    def until_told() -> Any:  # both: whoever had an end might reach it before the other comes
        for batch in itertools.cycle(batches()):
            yield batch
            if any("'late'" in str(decision) for decision in engine.decisions):
                over.set()
            if over.is_set() or time.monotonic() > until:
                return

    with wf.Engine(lanes=1, memory="1GiB", mode="lanes") as engine:
        jobs = [job("busy", data=until_told, epochs=1), job("late", data=until_told, epochs=1, priority="opportunistic")]
        results = wf.train(jobs, engine=engine)
    assert over.is_set() and all(result.status == "completed" for result in results)
    (told,) = results.decisions
    assert "guaranteed jobs ('busy') keep the one lane; pass lanes=2" in told
