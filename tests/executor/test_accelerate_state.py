"""Trials side by side that use Accelerate, which has one state for the process, are told so once."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

import waterflow as wf
from waterflow.executor import accelerate_state

SHARED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in with the same places."""
    SHARED.clear()
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state=SHARED)))
    monkeypatch.setattr(accelerate_state, "_told", threading.Lock())
    yield


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("uses an Accelerator" in record.getMessage() for record in caplog.records)


def run(precisions: list[str], max_concurrent: int) -> None:
    together = threading.Barrier(max_concurrent)

    def objective(trial: optuna.Trial) -> float:
        together.wait()
        SHARED["_mixed_precision"] = precisions[trial.number]
        together.wait()
        return 0.0

    wf.optimize(optuna.create_study(), objective, n_trials=len(precisions), max_concurrent=max_concurrent)


def test_trials_side_by_side_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "waterflow")
    run(["no", "bf16", "no", "bf16"], max_concurrent=2)
    assert told(caplog) == 1 and "max_concurrent=1" in caplog.text


def test_one_at_a_time_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "waterflow")
    run(["no", "bf16"], max_concurrent=1)
    assert told(caplog) == 0


def test_a_state_that_nobody_changes_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "waterflow")
    SHARED["_mixed_precision"] = "no"
    run(["no"] * 4, max_concurrent=2)
    assert told(caplog) == 0


def test_who_has_not_imported_it_has_no_such_state(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state")
    run(["no", "bf16"], max_concurrent=2)
    assert told(caplog) == 0 and "accelerate.state" not in sys.modules
