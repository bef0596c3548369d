"""What runs a study's trial on a device of a cluster: whatever the trial does, it can be ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import Trial
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import images
from waterflow.study.cluster_trials import TrialTask


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "loop"])
def test_a_trial_that_hangs_is_broken_off(kind: str, tmp_path: Path) -> None:
    hangs = threading.Event()

    def hang() -> None:
        hangs.set()
        while True:
            time.sleep(0.01)

    def data() -> Iterator[Any]:
        yield from images(2)
        hang()

    def objective(trial: Trial) -> Any:
        if kind == "loop":
            hang()
        return wf.Job("hangs", lambda: nn.Linear(6, 4), data, lambda p: torch.optim.SGD(p, lr=0.1), loss=F.cross_entropy, seed=1)

    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    number = study.ask().number
    with wf.Engine(memory="256MiB") as engine:
        runner = TrialTask(study, number, objective, seed=1).runner(engine, 1, None)
        results: list[wf.JobResult] = []
        thread = threading.Thread(target=lambda: results.append(runner.run()), daemon=True)
        thread.start()
        assert hangs.wait(60)
        until = time.monotonic() + 60
        while thread.is_alive() and time.monotonic() < until:
            runner.break_off()
            thread.join(0.1)
    assert [result.status for result in results] == ["cancelled"]
