"""The line in which a trial's thread is, while it loads and between its steps."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import waterflow as wf
from waterflow.run_stats import OWN
from waterflow.study.coordinator import StudyRunner
from waterflow.study.lines import LineSampler


class Gate:
    """Where a trial stands until it was looked at."""

    def __init__(self) -> None:
        self.there, self.seen = threading.Event(), queue.Queue[Any]()

    def pause(self) -> Any:
        self.there.set()
        return self.seen.get(timeout=60)


def seen_in(objective: Callable[[Gate], Any]) -> dict[str, str]:
    """The lines of a trial that was looked at once, at its gate."""
    gate = Gate()

    def run(trial: optuna.Trial) -> float:
        objective(gate)
        return 0.0

    def study() -> None:
        wf.optimize(optuna.create_study(), run, n_trials=1, lanes=1)

    thread = threading.Thread(target=study)
    thread.start()
    assert gate.there.wait(60)
    sampler = LineSampler(list, StudyRunner._value.__code__)
    for other in threading.enumerate():
        if other.name.startswith("trial-"):
            sampler._count(sys._current_frames()[other.ident or 0])
    gate.seen.put(None)
    thread.join()
    return dict(sampler.lines())


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_lines.py:{lines.index(next(line for line in lines if line.strip() == text)) + 1} ({text})"


class Slow(Dataset[Any]):
    """Rows that the user makes."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.gate.pause()  # in a row
        return torch.zeros(2)


def test_code_between_steps() -> None:
    def objective(gate: Gate) -> None:
        gate.pause()  # between steps

    assert seen_in(objective) == {OWN: line_of("return self.seen.get(timeout=60)")}


def test_a_library_in_between_is_not_the_users_line() -> None:
    def objective(gate: Gate) -> None:
        gate.there.set()
        for _ in tqdm(iter(gate.seen.get, None), disable=True):
            pass

    assert seen_in(objective) == {OWN: line_of("for _ in tqdm(iter(gate.seen.get, None), disable=True):")}


@pytest.mark.parametrize("kind", [DataLoader, wf.DataLoader])
def test_rows_that_the_user_makes(kind: Any) -> None:
    assert seen_in(lambda gate: list(kind(Slow(gate)))) == {"loading": line_of("return self.seen.get(timeout=60)")}


class Waits(nn.Module):
    """A model that cannot be captured."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate, self.layer = gate, nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() >= 0.0:
            self.gate.pause()
        return self.layer(x).mean()


def test_lines_within_a_step_are_not_the_loops() -> None:
    def objective(gate: Gate) -> None:
        model = Waits(gate)
        step = wf.Step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.zeros(3, 2))

    assert seen_in(objective) == {}


def test_nothing_is_kept_alive() -> None:
    with LineSampler(lambda: [threading.get_ident()], StudyRunner._value.__code__) as sampler:
        pass
    assert sampler.lines() == {} and not sampler._thread.is_alive()


def test_what_a_trial_held_is_let_go() -> None:
    """A thread that was looked at has ended: nothing here names its frames any longer."""
    held: list[Any] = []
    there, ended = threading.Event(), threading.Event()

    def objective() -> None:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        there.set()
        ended.wait(60)

    looked = threading.Semaphore(0)
    count = LineSampler._count

    class Looks(LineSampler):
        def _count(self, frame: Any) -> None:
            count(self, frame)
            looked.release()

    thread = threading.Thread(target=objective)
    thread.start()
    assert there.wait(60)
    with Looks(lambda: [thread.ident or 0], objective.__code__):
        assert looked.acquire(timeout=60)
        ended.set()
        thread.join()
        while looked.acquire(blocking=False):  # looks from before
            pass
        for _ in range(2):  # one look may have begun before the thread ended
            assert looked.acquire(timeout=60)
        assert held[0]() is None
