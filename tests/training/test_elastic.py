"""One job on several devices: the bits of the job in one process, whoever joins, leaves or dies."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset, default_collate

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
    state["a"].append(torch.eye(3).to_sparse())

    def work(group: Group) -> Any:
        assert group.gather(("x" * group.rank, group.rank)) == [("", 0), ("x", 1), ("xx", 2)]
        if group.rank == 0:
            group.send(state, 2)
        return group.receive(0) if group.rank == 2 else None

    got = in_groups(3, work)[2]
    assert (
        got["b"] == state["b"]
        and all(torch.equal(one, other) for one, other in zip(got["a"][:-1], state["a"]))
        and got["a"][-1].is_sparse
    )


def test_shards_go_to_fast_members() -> None:
    assert ranges_by_speed(6, [1.0, 2.0]) == [range(4), range(4, 6)]
    assert sorted(map(len, ranges_by_speed(4, [1.0, 1.0, 1.0]))) == [1, 1, 2]
    assert ranges_by_speed(2, [1.0, 9.0]) == [range(1), range(1, 2)]


# -- what each device has for itself

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


class Drawn(nn.Module):
    """Weights by NumPy, an attribute and a plain tensor by Python, batch norm, and a buffer that the output is shifted by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 4), nn.BatchNorm1d(4)
        self.linear.weight.data.copy_(torch.from_numpy(np.random.randn(4, 12)))
        self.scale, self.plain = random.random(), torch.tensor(random.random())
        self.register_buffer("mean", torch.zeros(4, 12))
        self.register_buffer("first", self.linear.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x) * self.scale + F.linear(x, self.mean)) + self.plain


def drawn_as(weight: torch.Tensor, scale: float, plain: float) -> nn.Module:
    model = Drawn()
    model.linear.weight.data.copy_(weight)
    model.first.copy_(weight)
    model.scale, model.plain = scale, torch.tensor(plain)
    return model


def tells(model: Any) -> dict[str, float]:
    return {"scale": model.scale, "plain": float(model.plain)}


def changes(model: Any) -> dict[str, float]:
    """Change all that an evaluation can; the metrics are those before."""
    told = {**tells(model), "weight": float(model.linear.weight.detach().sum())}
    model.mean.lerp_(model.linear.weight.detach(), 0.5)
    model.linear.weight.data.clamp_(-1, 1)
    model.linear.bias.requires_grad_(not model.linear.bias.requires_grad)
    model.norm.reset_running_stats()
    model.scale *= 0.9
    model.plain.mul_(0.9)
    return told


def changes_and_kills_others(model: Any) -> dict[str, float]:
    """On several devices: end the others, once, behind the changes."""
    told, mine = changes(model), os.getpid()
    others = [int(pid) for pid in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()]
    for pid in others if b"shards.member" in Path(f"/proc/{mine}/cmdline").read_bytes() else ():
        if pid != mine and b"shards.member" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    return told


def apart(**settings: Any) -> wf.Job:
    given: dict[str, Any] = {
        "model": Drawn, "data": DataLoader(rows("mlp", 60), 10, shuffle=True), "optimizer": OPTIMIZERS["adamw"], "epochs": 3, "seed": 3,
        "loss": F.cross_entropy, "shards": 2, "evaluate": tells, **settings,
    }  # fmt: skip
    return wf.Job("job", **given)


def on_two(job: wf.Job, **settings: Any) -> wf.JobResult:
    return wf.train(job, devices=["cpu:0", "cpu:1"], memory="1GiB", on_error="continue", **settings)[0]


@pytest.mark.needs_time("processes start")
@pytest.mark.parametrize(
    "evaluate",
    [changes, pytest.param(tells, marks=pytest.mark.slow), pytest.param(changes_and_kills_others, marks=pytest.mark.slow)],
)
def test_all_begin_with_the_leaders_state_and_have_what_its_evaluation_changes(evaluate: Callable[[Any], Any]) -> None:
    result = on_two(apart(evaluate=evaluate))
    assert result.state_dict is not None, result.error
    begun = partial(drawn_as, result.state_dict["first"], result.metrics[0]["scale"], result.metrics[0]["plain"])
    assert same(result, wf.train(apart(model=begun, evaluate=evaluate))[0])


class BySet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(12, 4) for name in set(NAMES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.parts[name](x) * number for number, name in enumerate(NAMES))


@pytest.mark.slow
def test_a_device_whose_model_is_another_one_does_not_join(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Joins(wf.Callback):
        def on_job_start(self, job: wf.Job, runner: Any) -> None:
            self.runner = runner

        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            if epoch == 0:
                self.runner.set_devices(["cpu:0", "cpu:1"])
            if len(self.runner._members) == 2 and not self.runner._members[1].alive:
                raise StopJob

    caplog.set_level("WARNING", logger="waterflow")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    given = apart(model=BySet, evaluate=None, epochs=100_000)
    result = wf.train(given, devices=["cpu:0"], callbacks=[Joins()], memory="1GiB", on_error="continue")[0]
    assert result.status == "pruned" and re.search("could not join .*: entry .* of the model", caplog.text), result.error


class ByPython(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(60), 60))


def labels_by_set() -> DataLoader[Any]:
    numbers = {name: number % 4 for number, name in enumerate(set(NAMES))}
    targets = torch.tensor([numbers[NAMES[row % 8]] for row in range(60)])
    return DataLoader(TensorDataset(rows("mlp", 60).tensors[0], targets), 10)


def noise_by_numpy() -> list[Any]:
    return [(torch.from_numpy(np.random.randn(10, 12)).float(), torch.zeros(10, dtype=torch.int64)) for _ in range(6)]


APART = {
    "names of parameters": (
        {"model": BySet, "evaluate": None},
        r"entry \d+ of the model is 'parts.\w+.weight, \[4, 12\] of float32' on cpu:0 and 'parts",
    ),
    "a sampler": (
        {"data": DataLoader(rows("mlp", 60), 10, sampler=ByPython())},
        r"entry \d of indices of the batch of step 1 is \d+ on",
    ),
    "labels": ({"data": labels_by_set}, r"of rows of the batch of step \d is \d on cpu:0 and \d on cpu:1"),
    "batches": ({"data": noise_by_numpy}, r"of rows of the batch of step 1 is"),
    "a scheduler": (
        {
            "scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: random.random()),
            "scheduler_interval": "step",
        },
        r"lr of group 0 of the optimizer of the state is",
    ),
}


@pytest.mark.needs_time("processes start")
@pytest.mark.parametrize("what", ["labels", *(pytest.param(what, marks=pytest.mark.slow) for what in APART if what != "labels")])
def test_what_differs_between_devices_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settings, told = APART[what]
    result = on_two(apart(**settings))
    assert result.status == "failed" and isinstance(result.error, wf.InvalidJobError), result
    assert re.search(told, str(result.error)), result.error


def fewer_for_the_first(path: Path) -> list[Any]:
    batch = [torch.zeros(10, 12), torch.zeros(10, dtype=torch.int64)]
    try:
        path.mkdir()
    except FileExistsError:
        return [batch] * 4
    return [batch] * 2


@pytest.mark.slow
def test_epochs_of_different_lengths_are_told(tmp_path: Path) -> None:
    result = on_two(apart(data=partial(fewer_for_the_first, tmp_path / "first")))
    assert "what comes next is 'a batch'" in str(result.error) or "next is 'the end of an epoch' on" in str(result.error), (
        result.error
    )


def in_fives(rows: list[Any]) -> Any:
    assert len(rows) % 5 == 0, f"{len(rows)} rows are no groups of 5"
    return default_collate(rows)


@pytest.mark.needs_time("processes start")
def test_a_collate_function_gets_the_parts_that_it_gets_alone() -> None:
    """Also where devices read rows to compare them."""
    settings = {
        "data": DataLoader(rows("mlp", 60), 20, collate_fn=in_fives),
        "model": partial(nn.Linear, 12, 4),
        "evaluate": None,
    }
    (alone,) = wf.train(apart(**settings))
    result = on_two(apart(**settings))
    assert result.status == "completed" and result.losses == alone.losses, result.error


class Odd(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def raises(output: Any, target: Any) -> Any:
    raise Odd("my", "message")


@pytest.mark.needs_time("processes start")
def test_an_error_that_cannot_be_read_again_is_told() -> None:
    result = on_two(apart(loss=raises))
    assert result.status == "failed" and str(result.error).startswith("Odd: my message") and "in raises" in str(result.error)


@pytest.mark.slow
def test_a_callback_that_changes_the_callers_model_is_told() -> None:
    class Clips(wf.Callback):
        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            model.linear.weight.data.clamp_(-0.01, 0.01)

    model = Drawn()
    result = on_two(apart(model=model), callbacks=[Clips()])
    assert "a callback has changed linear.weight of the model in this process" in str(result.error)


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
