"""One job on several devices: the bits of the job in one process, whoever joins, leaves or dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

import waterflow as wf
from tests.training.test_shards import OPTIMIZERS, normed, rows
from waterflow.training.runner import StopJob
from waterflow.training.shards.exchange import ranges_by_speed
from waterflow.training.shards.group import HOST, Group
from waterflow.training.shards.step import middle, nodes_of

Act = Callable[[Any], None]


class AtSteps(wf.Callback):
    """Acts on the job's runner once it has come to given steps, in their order."""

    def __init__(self, acts: list[tuple[int, Act]]) -> None:
        self.acts = acts
        self.seen: list[tuple[int, tuple[str, ...]]] = []

    def on_job_start(self, job: wf.Job, runner: Any) -> None:
        threading.Thread(target=self._act, args=(runner,), daemon=True).start()

    def _act(self, runner: Any) -> None:
        tick = threading.Event()
        for step, act in self.acts:
            while runner.steps < step:
                tick.wait(0.001)
            self.seen.append((runner.steps, runner.devices))
            act(runner)


def to(*devices: str) -> Act:
    """Set the devices, and wait until they train."""

    def act(runner: Any) -> None:
        runner.set_devices(list(devices))
        tick = threading.Event()
        while set(runner.devices) != set(devices):
            tick.wait(0.001)

    return act


def kill(*devices: str, by: signal.Signals = signal.SIGKILL) -> Act:
    def act(runner: Any) -> None:
        killed = {device: runner.pids[device] for device in devices}
        for pid in killed.values():
            os.kill(pid, by)
        tick = threading.Event()
        while killed.items() & runner.pids.items():
            tick.wait(0.001)

    return act


def job(epochs: int, **settings: Any) -> wf.Job:
    given = {"loss": F.cross_entropy, "shards": 4, "seed": 3, "clip_grad_norm": 1.0, "accumulate": 2, **settings}
    scheduler = {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 100, 0.9), "scheduler_interval": "step"}
    data = DataLoader(rows("normed", 300), 8, shuffle=True)
    return wf.Job(
        "job",
        normed,
        data,
        OPTIMIZERS["adamw"],
        epochs=epochs,
        evaluate=lambda model: float(model[1].bias.sum()),
        **given,
        **scheduler,
    )


def same(one: wf.JobResult, other: wf.JobResult) -> bool:
    assert one.state_dict is not None and other.state_dict is not None, (one.error, other.error)
    equal = all(torch.equal(value, other.state_dict[name]) for name, value in one.state_dict.items())
    return equal and one.losses == other.losses and one.metrics == other.metrics


BOTH = to("cpu:0", "cpu:1")
CHANGES = {"a death": (kill("cpu:0"), BOTH), "all": (to("cpu:1"), BOTH, kill("cpu:1"), BOTH, kill("cpu:0", "cpu:1"), BOTH)}


@pytest.mark.needs_time("processes start")
@pytest.mark.parametrize("changes", ["a death", pytest.param("all", marks=pytest.mark.slow)])
def test_joining_leaving_and_dying_change_no_bit(changes: str, tmp_path: Path) -> None:
    epochs: list[int] = []

    class Epochs(AtSteps):
        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            epochs.append(epoch)
            if len(self.seen) == len(self.acts):
                raise StopJob

    acts = Epochs([(20, act) for act in CHANGES[changes]])
    settings: dict[str, Any] = {"checkpoint": wf.Checkpoints(tmp_path, steps=100)} if changes == "all" else {}
    result = wf.train(job(1000), devices=["cpu:0", "cpu:1"], callbacks=[acts], memory="1GiB", **settings)[0]
    assert result.status == "pruned", result.error
    alone = wf.train(job(len(result.metrics)))[0]
    assert same(result, alone) and epochs == list(range(len(epochs)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_bits_do_not_depend_on_the_number_of_devices(devices: int) -> None:
    result = wf.train(job(3), devices=[f"cpu:{number}" for number in range(devices)], memory="1GiB")[0]
    assert same(result, wf.train(job(3))[0])


@pytest.mark.slow
def test_a_device_that_stands_still_is_left_out() -> None:
    acts = AtSteps([(50, kill("cpu:1", by=signal.SIGSTOP))])
    result = wf.train(job(40), devices=["cpu:0", "cpu:1"], callbacks=[acts], memory="1GiB")[0]
    assert acts.seen and same(result, wf.train(job(40))[0])


@pytest.mark.slow
def test_all_devices_change_at_once_and_one_comes_back_while_it_leaves() -> None:
    def there_and_back(runner: Any) -> None:
        runner.set_devices(["cpu:0"])
        tick = threading.Event()
        while "cpu:1" in runner.devices:
            tick.wait(0.0005)
        to("cpu:0", "cpu:1")(runner)

    class Acts(AtSteps):
        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            if len(self.seen) == len(self.acts):
                raise StopJob

    acts = Acts([(20, to("cpu:1")), (20, to("cpu:0", "cpu:1")), (20, there_and_back), (20, to("cpu:0"))])
    result = wf.train(job(1000), devices=["cpu:0"], callbacks=[acts], memory="1GiB")[0]
    assert result.status == "pruned" and same(result, wf.train(job(len(result.metrics)))[0])


@pytest.mark.slow
def test_a_death_before_the_first_step_and_a_callback_that_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(wf.Callback):
        def on_job_start(self, job: wf.Job, runner: Any) -> None:
            self.runner = runner
            threading.Thread(target=self._kill, daemon=True).start()

        def _kill(self) -> None:
            tick = threading.Event()
            while len(self.runner._members) < 2:
                tick.wait(0.001)
            first, second = self.runner._members
            second.process.send_signal(signal.SIGSTOP)
            while not first.warm:
                tick.wait(0.001)
            second.process.kill()

        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            tick = threading.Event()
            while self.runner._inbox.qsize() < 25:  # the process goes on to tell, for longer than one may be silent
                tick.wait(0.01)

    waits = Waits()
    result = wf.train(job(2), devices=["cpu:0", "cpu:1"], callbacks=[waits], memory="1GiB")[0]
    assert same(result, wf.train(job(2))[0]) and "stands still" not in caplog.text
    with pytest.raises(wf.CheckpointError, match="has ended"):
        waits.runner.ask_for_snapshot().result(timeout=0)


@pytest.mark.slow
def test_code_that_hangs_on_a_device_is_ended() -> None:
    def hangs(model: Any) -> float:
        while True:
            pass

    result = wf.train(replace(job(1), evaluate=hangs, timeout=4), devices=["cpu:0"], memory="1GiB", on_error="continue")[0]
    assert isinstance(result.error, wf.JobTimeoutError)


def in_groups(members: int, work: Callable[[Group], Any]) -> list[Any]:
    """What ``work`` returns in each of the members of one group, which are threads here."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(lambda rank: work(Group(store.port, 0, rank, members, torch.device("cpu"))), range(members)))


@pytest.mark.parametrize(("shards", "members"), [(4, 2), (4, 3), (5, 3), (6, 4)])
def test_sums_go_along_one_tree_whoever_has_the_shards(shards: int, members: int) -> None:
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(shard)) for shard in range(shards)]

    def node(low: int, high: int) -> torch.Tensor:
        return gradients[low] if high - low == 1 else node(low, middle(low, high)) + node(middle(low, high), high)

    ranges = ranges_by_speed(shards, [1.0] * members)
    nodes = [list(nodes_of(mine, 0, shards)) for mine in ranges]

    def work(group: Group) -> torch.Tensor:
        mine = [node(*one).clone() for one in nodes[group.rank]]
        group.sum_along_tree(mine[-1], mine, nodes, shards)
        return mine[-1]

    assert all(torch.equal(one, node(0, shards)) for one in in_groups(members, work))


def test_states_and_messages_arrive_as_they_were() -> None:
    state = {"a": [torch.arange(6).reshape(2, 3).t(), torch.tensor(True), torch.empty(0)], "b": (1, "two", None)}

    def work(group: Group) -> Any:
        assert group.gather(("x" * group.rank, group.rank)) == [("", 0), ("x", 1), ("xx", 2)]
        if group.rank == 0:
            group.send(state, 2)
        return group.receive(0) if group.rank == 2 else None

    got = in_groups(3, work)[2]
    assert got["b"] == state["b"] and all(torch.equal(one, other) for one, other in zip(got["a"], state["a"]))


def test_shards_go_to_fast_members() -> None:
    assert ranges_by_speed(6, [1.0, 2.0]) == [range(4), range(4, 6)]
    assert sorted(map(len, ranges_by_speed(4, [1.0, 1.0, 1.0]))) == [1, 1, 2]
    assert ranges_by_speed(2, [1.0, 9.0]) == [range(1), range(1, 2)]


def test_bad_devices_are_told() -> None:
    def train(devices: Any, **settings: Any) -> None:
        wf.train(job(1, **settings), devices=devices)

    with pytest.raises(wf.InvalidJobError, match="devices is a list of names"):
        train("cpu:0")
    with pytest.raises(wf.InvalidJobError, match="got 'cpu'"):
        train(["cpu"])
    with pytest.raises(wf.InvalidJobError, match="named once"):
        train(["cpu:0", "cpu:0"])
    with pytest.raises(wf.InvalidJobError, match="has 2 shards, and each of 3 devices needs one"):
        train(["cpu:0", "cpu:1", "cpu:2"], shards=2)
    with pytest.raises(wf.InvalidJobError, match="give them shards"):
        train(["cpu:0"], shards=1)
    with pytest.raises(wf.InvalidJobError, match="gives each batch only once"):
        wf.train(replace(job(1), data=iter([])), devices=["cpu:0"])
    with pytest.raises(wf.InvalidJobError, match="loss cannot be sent"):
        lock = threading.Lock()
        train(["cpu:0"], loss=lambda output, target: (lock, F.cross_entropy(output, target))[1])
    with pytest.raises(wf.InvalidJobError, match="pass devices= to train"):
        wf.JobRunner(job(1)).set_devices(["cpu:0"])


@pytest.mark.slow
def test_other_jobs_train_beside_it_with_their_bits() -> None:
    beside = [replace(job(20, shards=shards), name=f"beside-{shards}") for shards in (1, 4)]
    both = wf.train([job(20), *beside], devices=["cpu:0", "cpu:1"], memory="1GiB")
    alone = wf.train([job(20), *beside])
    assert all(same(one, other) for one, other in zip(both, alone))
