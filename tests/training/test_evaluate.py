"""wf.evaluate: the same numbers in plain PyTorch, in an objective and in a job, and nothing else is changed."""

from __future__ import annotations

import logging
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import waterflow as wf
from waterflow.errors import InvalidJobError, MemoryLimitError
from waterflow.training import evaluate

X = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X[:, 0] > 0).long())


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


METRICS = {"accuracy": accuracy, "loss": F.cross_entropy}


def net(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 2))
    made[1].eval()
    return made


def by_hand(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        return {name: float(f(model(X), DATA.tensors[1])) for name, f in METRICS.items()}


class Rows(Dataset[Any]):
    """The same rows, one by one."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


@pytest.mark.parametrize(
    "data", [DATA, Rows(), DataLoader(DATA, 64), [DATA[0:100], DATA[100:150]]], ids=["tensors", "rows", "loader", "list"]
)
def test_means_are_weighed_by_rows(data: Any) -> None:
    model = net()
    flags = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = wf.evaluate(model, data, metrics=METRICS)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found == pytest.approx(by_hand(model), rel=1e-5) and all(type(value) is float for value in found.values())


@pytest.mark.parametrize("data", [DATA, DataLoader(DATA, 64)])
def test_reduce_gets_all_rows(data: Any) -> None:
    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        assert len(outputs) == len(targets) == len(X) and not outputs.requires_grad
        return {"output": outputs.max(), "right": int((outputs.argmax(1) == targets).sum())}

    model = net()
    found = wf.evaluate(model, data, reduce=largest)
    with torch.no_grad():
        assert found == {"output": pytest.approx(float(model.eval()(X).max())), "right": round(150 * by_hand(model)["accuracy"])}
    assert type(wf.evaluate(model, data, reduce=accuracy)) is float


def test_a_data_set_is_read_in_large_batches() -> None:
    sizes = []

    def count(output: torch.Tensor, target: torch.Tensor) -> float:
        sizes.append(len(target))
        return 0.0

    wf.evaluate(nn.Identity(), ConcatDataset([DATA] * 40), metrics={"count": count})
    wide = TensorDataset(torch.zeros(9, 2**18), torch.zeros(9))
    wf.evaluate(nn.Identity(), wide, metrics={"count": count})
    wf.evaluate(nn.Identity(), DataLoader(DATA, 100), metrics={"count": count})
    assert sizes == [4096, 1904, *[1] * 9, 100, 50]


def objective(values: list[Any], evaluate: Any) -> Any:
    def run(trial: optuna.Trial) -> float:
        torch.manual_seed(trial.number)
        model = net(dropout=0.1 * trial.number)
        first = evaluate(model)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            for batch in wf.DataLoader(DATA, 50, shuffle=True):
                step(batch)
            values.append((trial.number, first, evaluate(model)))
        return 0.0

    return run


@pytest.mark.parametrize("lanes", [1, 2])
def test_in_an_objective_as_in_plain_pytorch(lanes: int) -> None:
    def plain(model: nn.Module) -> dict[str, float]:
        flags = [(module, module.training) for module in model.modules()]
        found = by_hand(model)
        for module, flag in flags:
            module.training = flag
        return found

    found: list[Any] = []
    expected: list[Any] = []
    wf.optimize(optuna.create_study(), objective(expected, plain), n_trials=4, lanes=1, max_concurrent=1)
    summary = wf.optimize(
        optuna.create_study(), objective(found, lambda model: wf.evaluate(model, DATA, metrics=METRICS)), n_trials=4, lanes=lanes
    )
    for values in (found, expected):
        values.sort(key=lambda entry: entry[0])  # of each trial in their order
    assert found == [(number, pytest.approx(first, rel=1e-5), pytest.approx(then, rel=1e-5)) for number, first, then in expected]
    assert summary.stats.shares["evaluation"] > 0


def test_within_a_job() -> None:
    job = wf.Job(
        "a", model=net, data=DataLoader(DATA, 50), loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        evaluate=lambda model: wf.evaluate(model, DATA, metrics=METRICS), seed=0,
    )  # fmt: skip
    [result] = wf.train(job)
    assert result.status == "completed"
    model = net()
    model.load_state_dict(result.state_dict)
    assert result.metrics[-1] == pytest.approx(by_hand(model), rel=1e-5)


def test_it_draws_nothing() -> None:
    torch.manual_seed(3)
    model = net()
    before = torch.get_rng_state()
    wf.evaluate(model, DATA, metrics=METRICS)
    wf.evaluate(model, [DATA[0:5]], metrics=METRICS)
    assert torch.equal(torch.get_rng_state(), before)


class Drawing(Rows):
    """Rows that are drawn."""

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.rand(()), DATA.tensors[1][index]


def test_rows_that_draw_are_read_once() -> None:
    model, found = net(), []
    for read in (lambda: wf.evaluate(model, Drawing(), metrics=METRICS), lambda: [Drawing()[n] for n in range(len(X))]):
        torch.manual_seed(5)
        read()
        found.append(torch.rand(()).item())
    assert found[0] == found[1]


def test_a_larger_input_is_measured_anew() -> None:
    sizes = []

    def run(trial: optuna.Trial) -> float:
        model = nn.Linear(6, 2)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        step(DATA[0:5])
        for rows in (5, 150, 150):
            wf.evaluate(model, [DATA[0:rows]], metrics=METRICS)
            [lane] = evaluate._lanes[step].values()
            sizes.append((lane._size, lane._height))
        return 0.0

    wf.optimize(optuna.create_study(), run, n_trials=1)
    assert sizes[0][0] == 5 * 32 and sizes[1][0] == 150 * 32 and sizes[1] == sizes[2] and sizes[0][1] < sizes[1][1]


def test_under_the_callers_autocast() -> None:
    seen = []

    def kind(output: torch.Tensor, target: torch.Tensor) -> float:
        seen.append(output.dtype)
        return 0.0

    def run(trial: optuna.Trial) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            wf.evaluate(net(), DATA, metrics={"kind": kind})
        wf.evaluate(net(), DATA, metrics={"kind": kind})
        return 0.0

    wf.optimize(optuna.create_study(), run, n_trials=1)
    assert seen == [torch.bfloat16, torch.float32]


def test_memory_is_admitted() -> None:
    """Beside a job whose step is small a large batch is refused with a remedy."""

    def run(trial: optuna.Trial) -> float:
        model = nn.Linear(1024, 2)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        step((torch.zeros(4, 1024), torch.zeros(4, dtype=torch.long)))
        copies = nn.Sequential(nn.Identity(), Copies())
        big = [(torch.zeros(4096, 1024), torch.zeros(4096, dtype=torch.long))]
        for _ in range(2):
            wf.evaluate(copies, big, metrics={"zero": lambda output, target: 0.0})
        return 0.0

    with pytest.raises(MemoryLimitError, match=r"evaluate\(\) beside step .* Evaluate in smaller batches"):
        wf.optimize(optuna.create_study(), run, n_trials=1, memory="48MiB")


class Copies(nn.Module):
    """Takes memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x + number for number in range(3)])[0]


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({}, "takes metrics=, means over rows, or reduce=, .*; got neither"),
        ({"metrics": METRICS, "reduce": accuracy}, "got both: call it twice"),
        ({"metrics": accuracy}, r"metrics must be a dict of functions of \(output, target\).*; got function"),
        ({"metrics": {}}, "got {}"),
        ({"reduce": "auc"}, r"reduce must be a function of \(outputs, targets\); got str"),
        ({"metrics": {"right": lambda o, t: o.argmax(1) == t}}, r"\['right'\] .* got a tensor of shape \(150,\); take its mean\(\)"),
        ({"metrics": {"none": lambda o, t: None}}, r"metrics\['none'\] .* a number; got NoneType: None"),
        ({"reduce": lambda o, t: "much"}, "reduce of .* a number; got str: 'much'"),
        ({"metric": METRICS}, "did you mean metrics="),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: Any, told: str) -> None:
    with pytest.raises(InvalidJobError, match=told):
        wf.evaluate(net(), DATA, **arguments)


@pytest.mark.parametrize(
    "data, told",
    [
        (X, r"got Tensor. Pass TensorDataset\(inputs, targets\)"),
        (DATA.tensors, r"got Tensor. Pass TensorDataset\(inputs, targets\)"),
        ([], "no batch"),
        ([(X, 3)], "got a target of type int"),
        (3, "got int"),
    ],
)
def test_wrong_data(data: Any, told: str) -> None:
    with pytest.raises(InvalidJobError, match=told):
        wf.evaluate(net(), data, metrics=METRICS)


def test_a_failure_leaves_the_flags(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    model = net()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        wf.evaluate(model, TensorDataset(torch.zeros(3, 4), torch.zeros(3)), metrics=METRICS)
    assert model.training and not model[1].training


def test_a_repeatable_study_repeats() -> None:
    def run(trial: optuna.Trial) -> float:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1.0, log=True))
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
        for epoch in range(3):
            for batch in wf.DataLoader(DATA, 30, shuffle=True):
                step(batch)
            value = float(wf.evaluate(model, DATA, metrics=METRICS)["loss"])
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    found = []
    for _ in range(2):
        torch.manual_seed(0)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
        wf.optimize(study, run, n_trials=10, max_concurrent=3, deterministic=True)
        found.append([(trial.params, trial.state, trial.value, trial.intermediate_values) for trial in study.trials])
    assert found[0] == found[1]
