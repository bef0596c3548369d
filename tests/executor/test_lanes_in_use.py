"""How many lanes are in use: tried, and undone where it brings nothing."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import waterflow as wf
from waterflow.executor.engine import Engine
from waterflow.executor.stats import Account
from waterflow.executor.tuning import FIRST_SECONDS, WINDOW_SECONDS, Decision, InPython, LanesInUse

BATCHES = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(6)]


@dataclass
class Machine:
    """Lanes that do as much work as ``speeds`` says for each number of them."""

    speeds: dict[int, float]
    lanes: int = 4
    in_use: int = 4
    seconds: float = 0.0
    steps_done: int = 0
    progress_ns: int = 0
    used: list[int] = field(default_factory=list)
    lane_busy_ns: list[int] = field(default_factory=lambda: [0])
    with_fewer: float = 0.0  # seconds of work
    working: int = 64  # lanes at most, as jobs or memory allow
    waiting_for_room: int = 0
    worked: float = 0.0

    def set_active_lanes(self, count: int) -> None:
        self.in_use = count
        self.used.append(count)

    def work(self, seconds: float, looker: LanesInUse, jobs: int, steps: int = 10) -> None:
        """``steps`` in each hundredth of a second."""
        for _ in range(round(seconds / 0.01)):
            self.seconds += 0.01
            self.steps_done += steps
            working = min(self.in_use, self.working)
            self.progress_ns += int(self.speeds[working] * 0.01e9)
            self.lane_busy_ns[0] += int(working * 0.0095e9)
            self.worked += 0.01
            self.with_fewer += 0.01 * (self.in_use < self.lanes)
            looker.poll(jobs)


def lanes_of(machine: Machine) -> tuple[LanesInUse, list[Decision]]:
    decisions: list[Decision] = []
    return LanesInUse(machine, decisions, lambda: machine.seconds), decisions


@pytest.mark.parametrize(
    ("speeds", "best"),
    [({1: 1.0, 2: 2.0, 4: 3.9}, 4), ({1: 1.0, 2: 1.6, 4: 1.2}, 2), ({1: 1.0, 2: 0.8, 4: 0.5}, 1), ({1: 1.0, 2: 1.0, 4: 1.0}, 4)],
)  # fmt: skip
def test_the_number_that_gets_the_most_done_is_kept(speeds: dict[int, float], best: int) -> None:
    machine = Machine(speeds)
    looker, decisions = lanes_of(machine)
    machine.work(120, looker, jobs=8)
    assert looker.count == best and machine.in_use == best
    assert any(decision.kept for decision in decisions) == (best != 4)


@pytest.mark.parametrize("lanes", [8, 16, 64])
@pytest.mark.parametrize("memory", [False, True], ids=["few jobs", "little memory"])
@pytest.mark.parametrize(
    ("speeds", "best"), [({1: 1.0, 2: 2.0, 4: 3.9}, 4), ({1: 1.0, 2: 1.6, 4: 1.2}, 2), ({1: 1.0, 2: 0.8, 4: 0.5}, 1)]
)
def test_lanes_that_cannot_work_do_not_end_the_search(lanes: int, memory: bool, speeds: dict[int, float], best: int) -> None:
    """Four of many lanes have work: for want of jobs, or of memory."""
    machine = Machine(speeds, lanes=lanes, in_use=lanes, working=4, waiting_for_room=4 if memory else 0)
    looker, decisions = lanes_of(machine)
    machine.work(120, looker, jobs=8 if memory else 4)
    assert decisions and min(looker.count, 4) == best


def test_more_memory_is_used_again() -> None:
    machine = Machine({1: 1.0, 2: 1.6, 4: 1.2, 8: 8.0}, lanes=8, in_use=8, working=4, waiting_for_room=4)
    looker, _ = lanes_of(machine)
    machine.work(120, looker, jobs=8)
    assert looker.count == 2
    machine.speeds, machine.working, machine.waiting_for_room = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 8, 0
    machine.work(600, looker, jobs=8)
    assert looker.count == 8


def test_lanes_that_wait_for_data_are_no_trial() -> None:
    machine = Machine({1: 9.0, 2: 1.0, 4: 1.0}, working=2)
    looker, decisions = lanes_of(machine)
    machine.work(60, looker, jobs=8)
    assert not decisions and machine.in_use == 4


def test_trials_that_bring_nothing_become_rare() -> None:
    machine = Machine({1: 1.0, 2: 2.0, 4: 4.0})
    looker, decisions = lanes_of(machine)
    machine.work(600, looker, jobs=8)
    assert 4 <= len(decisions) <= 9
    assert 0 < machine.with_fewer < 0.01 * 600


def test_a_trial_ends_where_a_job_comes_or_goes() -> None:
    machine = Machine({1: 9.0, 2: 9.0, 4: 1.0})
    looker, decisions = lanes_of(machine)
    machine.work(FIRST_SECONDS + WINDOW_SECONDS, looker, jobs=8)
    while machine.in_use == 4:
        machine.work(0.02, looker, jobs=8)
    machine.work(0.3, looker, jobs=7)
    assert machine.in_use == 4 and not decisions


def test_pauses_are_not_work() -> None:
    """Short rounds with long pauses between them, as in somebody's notebook: the least work is in the windows with a pause."""
    machine = Machine({1: 1.0, 2: 2.0, 4: 4.0})
    looker, decisions = lanes_of(machine)
    rounds = random.Random(0)
    for _ in range(300):
        machine.work(rounds.uniform(0.05, 0.6), looker, jobs=8)
        machine.seconds += 20
    assert looker.count == 4 and not any(decision.kept for decision in decisions)
    assert machine.with_fewer < 0.1 * machine.worked


def test_a_job_alone_is_left_alone() -> None:
    machine = Machine({1: 9.0, 2: 9.0, 4: 1.0})
    looker, decisions = lanes_of(machine)
    machine.work(60, looker, jobs=1)
    assert not decisions and machine.in_use == 4


def test_a_decision_in_words() -> None:
    told = str(Decision(1.0, "taking turns on one lane", False, (1.9, 1.0, 2.0)))
    assert told == "taking turns on one lane: not kept (speed 1, 1.9 before, then 2)"


def jobs(count: int) -> list[wf.Job]:
    return [
        wf.Job(name=str(n), model=lambda: nn.Linear(8, 2), data=BATCHES, loss=nn.functional.mse_loss, epochs=3, seed=n,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        for n in range(count)
    ]  # fmt: skip


def test_taking_turns_gives_the_same_bits() -> None:
    both = [wf.train(jobs(3), lanes=2, mode=mode, memory="1GiB") for mode in ("turns", "lanes")]
    assert [r.losses for r in both[0]] == [r.losses for r in both[1]]


def test_one_lane_runs_one_step_at_a_time() -> None:
    with Engine(lanes=2, mode="turns", memory="1GiB") as engine:
        engine.native.record_spans(True)
        wf.train(jobs(4), engine=engine)
        spans = engine.native.take_spans()
    order = spans[spans[:, 4].argsort()]
    assert set(order[:, 3].tolist()) == {0}
    assert bool((order[1:, 4] >= order[:-1, 5]).all())


def test_lanes_in_use_are_between_one_and_all() -> None:
    with Engine(lanes=2, memory="1GiB") as engine:
        for count in (0, 3):
            with pytest.raises(ValueError, match="between 1 and 2"):
                engine.native.set_active_lanes(count)
        engine.native.set_active_lanes(1)
        assert engine.native.active_lanes == 1


def test_fewer_and_more_lanes_while_jobs_run() -> None:
    """Lanes that are taken out of use end their steps; none is lost when they come back."""
    with Engine(lanes=4, memory="1GiB") as engine:

        def change(result: wf.JobResult) -> None:
            engine.native.set_active_lanes(1 + int(result.name) % 4)

        results = wf.train(jobs(12), engine=engine, callbacks=[change], max_concurrent=8)
    alone = [wf.train([job], lanes=1, memory="1GiB")[0] for job in jobs(12)]
    assert [r.losses for r in results] == [r.losses for r in alone]


@pytest.mark.parametrize(("speeds", "best"), [({1: 1.0, 2: 1.0, 4: 1.0}, 1), ({1: 1.0, 2: 2.0, 4: 3.9}, 4)])
def test_jobs_that_run_eagerly_take_turns_until_more_lanes_have_proved_better(speeds: dict[int, float], best: int) -> None:
    machine = Machine(speeds)
    looker, decisions = lanes_of(machine)
    looker.begin(True)
    assert machine.in_use == 1 and not decisions
    machine.work(60, looker, jobs=3)
    looker.begin(True)
    assert looker.count == best and decisions


def test_where_most_jobs_are_captured_all_lanes_are_in_use() -> None:
    machine = Machine({1: 1.0, 4: 1.0})
    looker, _ = lanes_of(machine)
    looker.begin(True)
    looker.begin(False)
    assert machine.in_use == 4


def test_a_study_of_eager_steps_has_one_lane_and_its_bits() -> None:
    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(trial.number)
        model = nn.Linear(8, 2)
        step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.RMSprop(model.parameters()))
        losses = [step(batch).item() for batch in BATCHES * 3]
        assert step.engine is not None and step.opaque_reason is not None
        trial.set_user_attr("losses", losses)
        return losses[-1]

    together, alone = optuna.create_study(), optuna.create_study()
    wf.optimize(together, objective, n_trials=4, lanes=2, max_concurrent=2)
    alone.optimize(plain_objective, n_trials=4)
    assert [t.user_attrs["losses"] for t in together.trials] == [t.user_attrs["losses"] for t in alone.trials]


def plain_objective(trial: optuna.Trial) -> float:
    torch.manual_seed(trial.number)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.RMSprop(model.parameters())
    losses = []
    for x, y in BATCHES * 3:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trial.set_user_attr("losses", losses)
    return losses[-1]


def test_jobs_that_are_mostly_in_python_begin_on_one_lane() -> None:
    looked = InPython()
    assert not looked.update(0.05, 0.01, 0, 2), "too little to tell"
    assert looked.update(0.75, 0.2, 0, 2)
    assert looked.update(0.5, 0.7, 0, 2), "half of the time is no change"
    assert not looked.update(0.1, 1.7, 0, 2)
    assert looked.update(0.0, 1.7, 2, 2) and not looked.update(0.0, 1.7, 1, 2), "eager ones"


def test_what_is_computed_between_calls_is_counted_once_whatever_is_called() -> None:
    """Two Steps of one thread called in turn, with nothing between the calls, and in another thread."""
    accounts = [Account("one"), Account("other")]

    def calls() -> None:
        for _ in range(5):
            for account in accounts:
                began = account.begin_call()
                sum(range(200_000))
                account.end_call(began)

    for _ in range(2):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    for account in accounts:
        assert account.computed["between calls"] < 0.2 * account.computed["calls"]
        assert account.in_python() == account.computed["between calls"] and account.in_python() == 0.0


class Rows(Dataset[Any]):
    """Rows that take a while in Python."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass
        return torch.zeros(8), torch.zeros(2)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_study_whose_loader_takes_the_time_runs_on_one_lane(at_once: bool) -> None:
    seen: set[int] = set()

    def objective(trial: optuna.Trial) -> float:
        model = nn.Linear(8, 2)
        step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        rows = Rows() if not at_once else TensorDataset(torch.zeros(9600, 8), torch.zeros(9600, 2))
        for batch in wf.DataLoader(rows, 16 if not at_once else 2400):
            for _ in range(1 if not at_once else 100):
                step(batch)
        assert step.engine is not None
        seen.add(step.engine.lanes_in_use)
        return 0.0

    wf.optimize(optuna.create_study(), objective, n_trials=16, lanes=2)
    assert (1 in seen) is not at_once
