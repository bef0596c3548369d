"""Jobs that run as one: close to what they are alone, whoever comes, goes, waits or fails beside them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import images
from waterflow import _C
from waterflow.executor import fused_group, fusing
from waterflow.executor.engine import Engine
from waterflow.executor.fused_group import Group
from waterflow.partition.plan import opaque_plan

pytestmark = pytest.mark.slow

BATCHES = images(8)
TOLERANCE = {
    "rtol": 1e-4,
    "atol": 1e-5,
}  # float32, a few steps; Adam divides by small numbers, and is compared by losses
FUSED: dict[str, Any] = {"exact": False, "mode": "fused", "lanes": 2, "memory": "1GiB"}


def network(dropout: float = 0.2, norm: bool = False) -> nn.Module:
    side = BATCHES[0][0][0].numel()
    middle: list[nn.Module] = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(side, 32), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))


def job(number: int, **changes: Any) -> wf.Job:
    """Jobs that differ in all that equal captures may differ in."""
    settings: dict[str, Any] = {
        "model": lambda: network(0.1 + 0.1 * (number % 5)), "data": BATCHES, "loss": F.cross_entropy, "epochs": 6,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.02 * (1 + number), momentum=0.9, weight_decay=1e-3 * number),
        "seed": number,
    }  # fmt: skip
    return wf.Job(name=f"job-{number}", **(settings | changes))


def alone(jobs: list[wf.Job]) -> list[wf.JobResult]:
    return [wf.train([one], lanes=1, memory="1GiB", on_error="continue")[0] for one in jobs]


def check(jobs: list[wf.Job], results: wf.Results, least: int = 1) -> None:
    """As alone, but for rounding, and each fused for at least so many steps."""
    for mine, reference in zip(results, alone(jobs), strict=True):
        assert mine.status == reference.status, mine.traceback
        assert mine.fused_steps >= least, mine.name
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), **TOLERANCE)
        assert mine.state_dict is not None and reference.state_dict is not None
        for name, tensor in mine.state_dict.items():
            torch.testing.assert_close(tensor, reference.state_dict[name], rtol=1e-3, atol=1e-4)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # its own memory


OPTIMIZERS: dict[str, Callable[[int], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": lambda n: lambda p: torch.optim.SGD(p, lr=0.02 * (1 + n), weight_decay=1e-3 * n),
    "momentum": lambda n: lambda p: torch.optim.SGD(p, lr=0.02 * (1 + n), momentum=0.5 + 0.1 * n),
    "adam": lambda n: lambda p: torch.optim.Adam(p, lr=1e-3 * (1 + n), betas=(0.9 - 0.1 * n, 0.99)),
    "adamw": lambda n: lambda p: torch.optim.AdamW(p, lr=1e-3 * (1 + n), weight_decay=0.01 * n),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_job_has_its_own_numbers(name: str) -> None:
    jobs = [job(n, optimizer=OPTIMIZERS[name](n)) for n in range(4)]
    check(jobs, wf.train(jobs, **FUSED))


def test_running_statistics() -> None:
    jobs = [job(n, model=lambda: network(norm=True)) for n in range(3)]
    check(jobs, wf.train(jobs, **FUSED))


def test_convolutions() -> None:
    def made() -> nn.Module:
        body = [
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 4))

    jobs = [job(n, model=made) for n in range(2)]
    check(jobs, wf.train(jobs, **FUSED))


def test_schedulers_and_metrics() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]), {"largest": output.max()}

    jobs = [
        job(n, loss=None, step=step, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            scheduler_interval="step")
        for n in range(3)
    ]  # fmt: skip
    check(jobs, wf.train(jobs, **FUSED))


def test_jobs_come_and_go() -> None:
    jobs = [job(n, epochs=40 if n < 2 else 2) for n in range(7)]
    results = wf.train(jobs, max_concurrent=3, **FUSED)
    check(jobs[2:], wf.Results(results[2:]))  # each took the seat that another had left
    assert all(result.status == "completed" for result in results)


def test_batches_of_another_size_go_alone() -> None:
    x, y = BATCHES[0]
    jobs = [job(n, data=[*BATCHES, (x[:3], y[:3])], epochs=4) for n in range(3)]
    results = wf.train(jobs, **FUSED)
    check(jobs, results)
    assert all(result.fused_steps <= result.steps - 4 for result in results)


def test_a_slow_job_keeps_nobody() -> None:
    def evaluate(model: nn.Module) -> float:
        time.sleep(0.5)
        return 0.0

    jobs = [job(n, model=lambda: network(norm=True), epochs=8) for n in range(3)]
    jobs.append(job(3, model=lambda: network(norm=True), evaluate=evaluate, epochs=2))
    ended: list[str] = []
    results = wf.train(jobs, callbacks=[lambda result: ended.append(result.name)], **FUSED)
    check(jobs, results)
    assert ended[-1] == "job-3"


def test_a_late_job_is_waited_for() -> None:
    def train(number: int) -> int:
        model = network(norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        step.plan_for(BATCHES[0])
        captured.wait()
        time.sleep(2.0 if number == 2 else 0.0)
        for batch in BATCHES:
            step(batch)
        return step.fused_steps

    captured = threading.Barrier(3)
    with Engine(lanes=2, memory="1GiB", exact=False, mode="fused") as engine:
        fusing.expect(engine, 3)
        with ThreadPoolExecutor(3) as pool:
            assert min(pool.map(train, range(3))) > 0


def test_nobody_waits_for_who_does_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "FORCED_SECONDS", 300.0)

    def opaque(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (1.0 if float(batch[0].sum()) < 1e9 else 2.0)

    others = [job(2, loss=None, step=opaque, epochs=200), job(3, accumulate=2, epochs=200)]
    jobs = [job(0), job(1)]
    began = time.perf_counter()
    results = wf.train([*others, *jobs], max_concurrent=4, **FUSED)
    assert time.perf_counter() - began < 60
    check(jobs, wf.Results(results[2:]))
    assert [result.fused_steps for result in results[:2]] == [0, 0]


def test_a_failure_is_one_jobs_own() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield from BATCHES[:6]
            raise OSError("the disk is gone")

    jobs = [job(n) for n in range(3)]
    broken = job(3, data=Broken())
    wild = job(4, optimizer=lambda p: torch.optim.SGD(p, lr=1e30, momentum=0.9), allow_non_finite=True)
    results = wf.train([*jobs, broken, wild], on_error="continue", max_concurrent=5, **FUSED)
    check(jobs, wf.Results(results[:3]))
    assert results[3].status == "failed" and "the disk is gone" in str(results[3].error)
    assert results[4].status == "completed" and results[4].losses[-1] != results[4].losses[-1]


def test_what_is_replaced_in_between_is_seen() -> None:
    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            last = model[-1]
            last.weight = nn.Parameter(last.weight.detach().clone())  # another object: the optimizer's goes its own way
        return 0.0

    jobs = [job(0, evaluate=evaluate), job(1), job(2)]
    results = wf.train(jobs, **FUSED)
    check(jobs, results)


def test_a_group_that_is_slower_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "WORTH", 0.0)
    monkeypatch.setattr(fusing, "SHORT_SECONDS", 1.0)
    monkeypatch.setattr(fusing, "PAID_BACK", 0.0)
    monkeypatch.setattr(fused_group, "TRIED_SECONDS", 0.001)
    jobs = [job(n, epochs=12) for n in range(3)]
    results = wf.train(jobs, exact=False, lanes=1, max_concurrent=3, memory="1GiB")
    check(jobs, results)
    assert all(result.fused_steps < result.steps / 2 for result in results)


@pytest.mark.parametrize(("share", "kept"), [(0.9, False), (1.2, True)])
def test_a_group_is_weighed_against_its_jobs_beside_each_other(
    monkeypatch: pytest.MonkeyPatch, share: float, kept: bool
) -> None:
    """What counts is the sum of their steps a second, before and after."""
    judge = fusing.Fusing.judge

    def paced(self: fusing.Fusing, group: Group) -> None:
        group.tried.per_second = share * sum(seat.member.alone.per_second for seat in group.live()) / len(group.live())
        judge(self, group)
        over.append(group.over)

    over: list[bool] = []
    monkeypatch.setattr(fusing.Fusing, "judge", paced)
    monkeypatch.setattr(fused_group, "TRIED_SECONDS", 0.001)
    monkeypatch.setattr(fusing, "PAID_BACK", 0.0)
    monkeypatch.setattr(fusing, "SHORT_SECONDS", 1.0)
    wf.train([job(n, epochs=30) for n in range(2)], exact=False, max_concurrent=2, memory="1GiB")
    assert over == [not kept]


@pytest.mark.parametrize(("paid_back", "fused"), [(0.0, True), (1e6, False)])
def test_no_group_is_made_for_jobs_that_are_over_before_it_pays(
    monkeypatch: pytest.MonkeyPatch, paid_back: float, fused: bool
) -> None:
    monkeypatch.setattr(fused_group, "TRIED_SECONDS", 0.001)
    monkeypatch.setattr(fusing, "PAID_BACK", paid_back)
    monkeypatch.setattr(fusing, "SHORT_SECONDS", 1.0)
    monkeypatch.setattr(fusing, "WORTH", 1e6)
    results = wf.train([job(n, epochs=30) for n in range(2)], exact=False, max_concurrent=2, memory="1GiB")
    assert [result.fused_steps > 0 for result in results] == [fused] * 2


def test_a_free_seat_of_a_group_is_taken_by_a_job_that_is_soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_group, "TRIED_SECONDS", 0.001)
    monkeypatch.setattr(fusing, "SHORT_SECONDS", 1.0)
    monkeypatch.setattr(fusing, "WORTH", 1e6)
    monkeypatch.setattr(fusing, "PAID_BACK", 0.0)
    form = fusing.Fusing._form

    def no_other(self: fusing.Fusing, key: int) -> None:
        form(self, key)
        monkeypatch.setattr(fusing, "PAID_BACK", 1e6)

    monkeypatch.setattr(fusing.Fusing, "_form", no_other)
    jobs = [job(0, epochs=20), *(job(n, epochs=200) for n in range(1, 3)), job(3, epochs=20)]
    results = wf.train(jobs, exact=False, max_concurrent=3, memory="1GiB")
    assert all(result.fused_steps > 0 for result in results)


def test_jobs_that_cannot_share_operations_run_side_by_side() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0] + 0.01 * torch.randn_like(batch[0])), batch[1])

    jobs = [job(n, loss=None, step=noisy) for n in range(3)]
    results = wf.train(jobs, **FUSED)
    assert [result.fused_steps for result in results] == [0, 0, 0]
    assert [result.losses for result in results] == [result.losses for result in alone(jobs)]


def test_a_shared_backbone_is_left_where_it_is() -> None:
    backbone = nn.Linear(BATCHES[0][0][0].numel(), 32).requires_grad_(False)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), backbone, nn.ReLU(), nn.Linear(32, 4))

    jobs = [job(n, model=build) for n in range(3)]
    before = backbone.weight.data_ptr()
    results = wf.train(jobs, **FUSED)
    assert backbone.weight.data_ptr() == before
    assert [r.status for r in results] == ["completed"] * 3
    for mine, reference in zip(results, alone(jobs)):
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), **TOLERANCE)


def test_an_operation_that_fails_leaves_the_jobs_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Group.begin
    calls = 0

    def failing(group: Group) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("no such luck")
        begun(group)

    monkeypatch.setattr(Group, "begin", failing)
    jobs = [job(n) for n in range(3)]
    check(jobs, wf.train(jobs, **FUSED))


def test_a_step_that_fails_leaves_the_others_their_random_numbers() -> None:
    x, y = BATCHES[0]
    jobs = [job(n, data=[*BATCHES, *BATCHES, *BATCHES, (x, torch.full_like(y, 99 if n == 1 else 0))]) for n in range(3)]
    results = wf.train(jobs, on_error="continue", **FUSED)
    check(jobs, results)
    assert [result.status for result in results] == ["completed", "failed", "completed"]


def test_an_order_to_break_off_behind_a_round_that_was_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[_C.StepRun] = []

    class Interrupted:
        """An engine whose caller is interrupted once behind a submission to ``group``."""

        def __init__(self, native: _C.Engine) -> None:
            self.native, self.group = native, -1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.native, name)

        def submit(self, number: int, run: _C.StepRun, before: _C.StepRun | None = None) -> None:
            self.native.submit(number, run, before)
            if number == self.group and not calls:
                calls.append(run)
                self.native.wait(run)  # the lane was faster
                raise KeyboardInterrupt

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def made(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(number)
        model = network(0.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    with Engine(lanes=1, exact=False, mode="fused", memory="1GiB") as engine:
        engine.native = interrupted = Interrupted(engine.native)  # type: ignore[assignment]
        pairs = [made(number) for number in range(2)]
        steps = [wf.Step(m, optimizer=o, step=compute, engine=engine) for m, o in pairs]
        fusing.expect(engine, 2)
        with ThreadPoolExecutor(2) as pool:
            while not engine.fusing._groups:  # type: ignore[union-attr]
                list(pool.map(lambda step: step(BATCHES[0]), steps))
        before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model, _ in pairs]
        interrupted.group = engine.fusing._groups[0].job  # type: ignore[union-attr]
        first = steps[0].submit(BATCHES[1])
        with pytest.raises(KeyboardInterrupt):
            steps[1].submit(BATCHES[1])
        loss = first.result()
        for step in steps:
            step.close()
    model, optimizer = made(0)
    model.load_state_dict(before[0])
    expected = compute(model, BATCHES[1])
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(loss, expected.detach(), **TOLERANCE)
    for name, tensor in pairs[0][0].state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], **TOLERANCE)


def test_own_loops_of_a_study() -> None:
    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(trial.number)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=generator)
        for _ in range(4):
            for batch in BATCHES:
                loss = step(batch)
        fused.append(step.fused_steps)
        return loss.item()

    fused: list[int] = []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    wf.optimize(study, objective, n_trials=8, max_concurrent=4, **FUSED)
    assert len(study.trials) == 8 and all(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)
    assert sum(fused) > 0


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(wf.InvalidJobError, match="exact=False"):
        wf.train([job(0)], mode="fused")
    with pytest.raises(wf.InvalidJobError, match="exact must be True or False; got 'no'"):
        wf.train([job(0)], exact="no")  # type: ignore[arg-type]
    with pytest.raises(wf.InvalidJobError, match="'auto', 'lanes', 'turns' or 'fused'"):
        wf.train([job(0)], mode="vmap")  # type: ignore[arg-type]
    study = optuna.create_study()
    with pytest.raises(wf.StudyError, match="exact=False"):
        wf.optimize(study, lambda trial: 0.0, n_trials=1, max_concurrent=1, deterministic=True, exact=False)


def test_nothing_is_left_in_an_engine() -> None:
    with Engine(lanes=2, memory="1GiB", exact=False, mode="fused") as engine:
        before = engine.claimed()
        results = wf.train([job(n) for n in range(4)], engine=engine)
        assert engine.claimed() == before and all(result.fused_steps for result in results)


@pytest.mark.parametrize("name", ["bert", "cnn_bn", "gpt2", "lstm", "lstm_cell", "mlp_dropout", "resnet50", "vit"])
def test_models_of_the_zoo(name: str) -> None:
    """In double precision, where rounding does not hide a mistake."""
    zoo = SMALL[name]
    generator = torch.Generator().manual_seed(0)
    batches = [pytree.tree_map(_double, zoo.batch(2, generator)) for _ in range(8)]
    jobs = [
        wf.Job(name=f"{name}-{n}", model=lambda: zoo.build().double(), step=zoo.step, data=batches,
               optimizer=zoo.optimizer, epochs=2, seed=n)
        for n in range(3)
    ]  # fmt: skip
    results = wf.train(jobs, max_concurrent=3, **FUSED)
    for mine, reference in zip(results, alone(jobs), strict=True):
        assert mine.status == "completed", mine.traceback
        assert mine.fused_steps > 0
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), rtol=1e-7, atol=1e-9)


class Bag(nn.Module):
    """Its sums of embeddings are computed job by job: that operation has no rule for several."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(10, 8, mode="sum")
        self.numbers = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sums(x) * self.numbers


def _zero_dimensions(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (output.mean().sum(0) * output).square().mean()


def _drawn_into_a_tensor_of_its_own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (output * torch.empty(output.shape, dtype=output.dtype).bernoulli_(0.5)).square().mean()


def _written_through_a_view(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    sums = model.sums(x)
    sums.view(-1).mul_(2)
    sums.t().add_(1)
    return (sums * model.numbers).square().mean()


def _noise_is_returned_beside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.rrelu(model(x), training=True).square().mean()


def _parameters_change_in_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.numbers.mul_(0.9)
    return model(x).square().mean()


def _batch_changes_in_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.add_(1).remainder_(10)
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("step", "fused"),
    [
        (_zero_dimensions, True), (_written_through_a_view, True), (_drawn_into_a_tensor_of_its_own, False),
        (_noise_is_returned_beside, False), (_parameters_change_in_forward, False), (_batch_changes_in_forward, False),
    ],
)  # fmt: skip
def test_rare_operations(step: Callable[..., torch.Tensor], fused: bool) -> None:
    """Each job has its own batches; in double precision. What cannot be done together runs alone."""

    def jobs() -> list[wf.Job]:
        made = []
        for n in range(3):
            generator = torch.Generator().manual_seed(n)
            data = [torch.randint(0, 10, (4, 5), generator=generator) for _ in range(8)]
            made.append(job(n, model=lambda: Bag().double(), data=data, loss=None, step=step, epochs=2))
        return made

    results = wf.train(jobs(), max_concurrent=3, **FUSED)
    for mine, reference in zip(results, alone(jobs()), strict=True):
        assert (mine.fused_steps > 0) == fused
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_parameters_of_another_layout(name: str) -> None:
    def build() -> nn.Module:
        model = network(0.0).double()
        model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
        return model

    jobs = [job(n, model=build, data=[_doubles(b) for b in BATCHES], optimizer=OPTIMIZERS[name](n)) for n in range(3)]
    results = wf.train(jobs, max_concurrent=3, **FUSED)
    for mine, reference in zip(results, alone(jobs), strict=True):
        assert mine.fused_steps > mine.steps / 2
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), rtol=1e-7, atol=1e-9)
        assert mine.state_dict["1.weight"].stride() == reference.state_dict["1.weight"].stride()


def test_steps_alone_end_before_the_next_ones_together() -> None:
    """Large batches of another size run alone; what the job hands in behind them must not overtake them."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 3)).double()

    generator = torch.Generator().manual_seed(0)
    sizes = [2, 400] * 12
    data = [
        (torch.randn(n, 64, generator=generator).double(), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]
    jobs = [job(n, model=build, data=data, epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)) for n in range(3)]
    results = wf.train(jobs, max_concurrent=3, **FUSED)
    for mine, reference in zip(results, alone(jobs), strict=True):
        assert mine.fused_steps > 0
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(reference.losses), rtol=1e-7, atol=1e-9)


def test_steps_that_nobody_holds_are_let_go() -> None:
    def trained(number: int) -> weakref.ref[nn.Module]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        ready.wait()
        for batch in BATCHES:
            step(batch)
        fused.append(step.fused_steps)
        return weakref.ref(model)

    fused: list[int] = []
    ready = threading.Barrier(2)
    with Engine(lanes=2, memory="1GiB", exact=False, mode="fused") as engine:
        with ThreadPoolExecutor(2) as pool:
            models = list(pool.map(trained, range(2)))
        gc.collect()
        assert sum(fused) > 0
        assert engine.claimed() == 0
        assert [model() for model in models] == [None, None]


def test_a_group_does_not_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who would give it back need the lock that it holds."""
    claim = Engine.claim

    def crowded(engine: Engine, number: int, plan: Any, **settings: Any) -> None:
        if "jobs as one" in engine.names[number]:
            other = engine.add_job("other")
            height = max(plan.height, *(c.height for c in engine._claims.values()))
            claim(engine, other, opaque_plan("other", 0, persistent=engine.room - engine.claimed() - height, batch=0))
        claim(engine, number, plan, **settings)

    monkeypatch.setattr(Engine, "claim", crowded)
    results = wf.train([job(n) for n in range(2)], **FUSED)
    assert [(result.status, result.fused_steps) for result in results] == [("completed", 0)] * 2


def _doubles(batch: Any) -> Any:
    return pytree.tree_map(_double, batch)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def test_jobs_of_a_known_kind_claim_their_memory() -> None:
    claimed: list[int] = []
    with Engine(lanes=2, memory="1GiB", exact=False, mode="fused") as engine:
        for _ in range(2):  # the second time their plan is known before their first step
            evaluate = lambda model: float(claimed.append(engine.claimed()) or 0.0)  # noqa: E731
            jobs = [job(n, evaluate=evaluate if n == 0 else None) for n in range(3)]
            results = wf.train(jobs, engine=engine, max_concurrent=3)
            assert all(result.fused_steps for result in results)
    state = sum(t.nbytes for t in results[0].state_dict.values())
    assert min(claimed) >= 2 * state  # at least its own, with momentum
    assert claimed[len(claimed) // 2] >= 6 * state  # and those of the others, which are there all along


def test_empty_seats_are_claimed() -> None:
    class Watch(wf.Callback):
        def on_epoch_end(self, job: wf.Job, epoch: int, metrics: Any) -> None:
            if job.name == "job-2" and epoch == 38:
                claimed.append(engine.claimed())

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 4))

    claimed: list[int] = []
    jobs = [job(n, model=wide, epochs=2 if n < 2 else 40) for n in range(4)]
    with Engine(lanes=1, memory="1GiB", exact=False, mode="fused") as engine:
        results = wf.train(jobs, engine=engine, max_concurrent=4, callbacks=[Watch()])
    assert all(result.fused_steps for result in results)
    model = sum(p.nbytes for p in wide().parameters())
    assert claimed[0] >= 6 * model  # two jobs with their momentum, and two seats
