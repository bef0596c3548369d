"""Turns and packings on real devices: bits, rates, and what is undone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import waterflow as wf
from tests.cluster.live_jobs import job, same_bits, undisturbed
from tests.cluster.watched import Watched
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.payload import pack
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.service import Service
from waterflow.cluster.store import Store
from waterflow.cluster.worker import WorkerSettings
from waterflow.study.cluster_trials import TrialTask

pytestmark = pytest.mark.slow

SETTINGS = WorkerSettings(memory="256MiB", lanes=2, checkpoint_seconds=0.2, report_seconds=0.1)
SECONDS = 90.0


@pytest.mark.parametrize("seed", range(2))
def test_jobs_held_and_moved_at_any_moment_have_their_bits(tmp_path: Path, seed: int) -> None:
    numbers, names = random.Random(seed), ("a", "b", "c")
    made = {name: job(name, seconds=1.5, steps=150, seed=n) for n, name in enumerate(names)}
    with LocalBackend(2, tmp_path, settings=SETTINGS) as backend:
        there = Watched(backend)
        for name in names:
            there.start(name, pack(made[name]), numbers.choice(["device-0", "device-1"]))
            there.until(name, lambda part: part.phase == "training", SECONDS)
        for _ in range(12):
            name = numbers.choice(names)
            what = numbers.choice(["hold", "hold", "go on", "move"])
            if what == "move":
                there.ask(name, "stop", suspend=True)
                if there.until(name, lambda part: part.phase == "ended").how != "suspended":
                    continue
                there.ask(name, "forget")
                there.start(name, pack(made[name]), numbers.choice(["device-0", "device-1"]))
                there.until(name, lambda part: part.phase != "beginning", SECONDS)
            else:
                held = what == "hold"
                there.ask(name, "set", held=held)
                there.until(name, lambda part: part.held == held or part.phase == "ended")  # noqa: B023
        for name in names:
            there.ask(name, "set")
            assert there.end(name, SECONDS).how == "completed"
            same_bits(there.results(name)[0], undisturbed(made[name]))


def test_time_in_which_a_group_is_held_is_not_its_own(tmp_path: Path) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS) as backend:
        there = Watched(backend)
        there.start("a", pack(job("a", seconds=60.0, steps=6000)), "device-0")
        there.until("a", lambda part: part.pace > 0, SECONDS)
        there.ask("a", "set", held=True)
        held = there.until("a", lambda part: part.held)
        first = there.until("a", lambda part: part.steps == there.of("a")[-2].steps)
        saves = [part.saved for part in there.of("a")]
        told = len(there.of("a"))
        later = there.until("a", lambda _: len(there.of("a")) > told + 8)  # two seconds
        assert later.steps == first.steps and later.seconds < held.seconds + 0.5
        assert later.saved in (saves[-1], later.steps)  # it is saved once, not again and again
        there.ask("a", "stop")
        there.end("a")


def trial_in_a_loop(trial: Any) -> float:
    model = torch.nn.Linear(4, 4)
    step = wf.Step(model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(100_000):
        loss = step((torch.ones(2, 4), torch.zeros(2, 4)))
        time.sleep(1e-3)
    return float(loss)


def test_a_trial_with_a_loop_of_its_own_is_held_and_counted(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    task = TrialTask(study, study.ask().number, trial_in_a_loop, seed=0)
    with LocalBackend(1, tmp_path / "work", settings=SETTINGS) as backend:
        there = Watched(backend)
        there.start("a", pack(task), "device-0", priority="opportunistic")
        there.until("a", lambda part: part.pace > 0 and part.steps > 10, SECONDS)
        there.ask("a", "set", held=True, priority="opportunistic")
        there.until("a", lambda part: part.held)
        steps = there.until("a", lambda part: part.steps == there.of("a")[-2].steps).steps
        there.ask("a", "set", priority="opportunistic")
        there.until("a", lambda part: part.steps > steps + 10)
        there.ask("a", "stop")
        assert there.end("a").how == "cancelled"


def in_turn(seconds: float, lost: float) -> Callable[[], Iterator[Any]]:
    """Batches that are made under a lock; whoever has to wait for it loses time."""

    def batches() -> Iterator[Any]:
        lock = vars(threading).setdefault("of_this_test", threading.Lock())  # one for all jobs of a device
        for _ in range(100_000):
            waits = not lock.acquire(blocking=False)
            if waits:
                lock.acquire()
            time.sleep(seconds + lost * waits)
            lock.release()
            yield torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)

    return batches


def test_a_packing_that_hurts_is_undone(tmp_path: Path) -> None:
    policy = Gandiva(quantum=1.0)
    backend = LocalBackend(1, tmp_path / "work", settings=SETTINGS)
    service = Service(Store(tmp_path / "cluster.db"), backend, policy)
    service.start()
    try:
        for id in ("a", "b"):
            made = job(id)
            made.data = in_turn(0.01, 0.02)
            service.submit({"id": id, "memory": 1 << 20}, pack(made))

        def counts() -> tuple[int, int]:
            now = service.scheduler.policy
            assert isinstance(now, Gandiva)
            return now.packed, now.unpacked

        deadline = time.monotonic() + SECONDS
        while counts() != (1, 1):
            assert time.monotonic() < deadline, (counts(), service.status()["jobs"], service.store.log("a"))
            time.sleep(0.05)
        turns = {id: len(service.store.log(id)) for id in ("a", "b")}
        while min(len(service.store.log(id)) - turns[id] for id in turns) < 4:  # two turns more of each
            assert time.monotonic() < deadline, service.status()
            time.sleep(0.05)
        assert counts() == (1, 1) and [job.attempts for job in service.store.jobs()] == [1, 1]
    finally:
        service.down(5.0)
