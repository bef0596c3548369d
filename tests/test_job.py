"""Jobs are checked before they train; results tell what became of them."""

from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import waterflow as wf
from tests.support import Net, images
from waterflow.results import pack_result


def sgd(parameters: Any = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters or Net().parameters(), lr=0.1)


def make(**changes: Any) -> wf.Job:
    settings: dict[str, Any] = {"name": "job", "model": Net, "data": images(1), "optimizer": sgd, "loss": F.cross_entropy}
    return wf.Job(**(settings | changes))


def of_output(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


@wraps(of_output)
def decorated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return of_output(output)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"model": Net()}, {"data": iter(images(1))}, {"data": lambda: images(1)}, {"loss": None},
        {"loss": nn.CrossEntropyLoss()}, {"loss": None, "step": lambda model, batch: model(batch)},
        {"seed": 3}, {"seed": torch.tensor(3).numpy()[()]}, {"scheduler": lambda o: StepLR(o, 1)},
        {"scheduler_interval": "step"}, {"epochs": 7}, {"evaluate": len},
        {"loss": partial(F.cross_entropy, label_smoothing=0.1)}, {"loss": decorated}, {"loss": torch.dist},
    ],
    ids=lambda changes: ", ".join(changes) or "as it is",
)  # fmt: skip
def test_jobs_that_can_be_right(changes: dict[str, Any]) -> None:
    make(**changes).check()


MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no epochs": (lambda: {"epochs": 0}, "epochs must be a positive integer; got 0"),
    "half an epoch": (lambda: {"epochs": 0.5}, "epochs must be a positive integer; got 0.5"),
    "a model's name": (lambda: {"model": "resnet"}, "model must be a module or a function that makes one; got 'resnet'"),
    "an optimizer": (lambda: {"optimizer": sgd()}, r"function of \(params\), such as optimizer=lambda params:.*; got SGD"),
    "an optimizer's name": (lambda: {"optimizer": "adam"}, r"function of \(params\).*got 'adam'"),
    "no data": (lambda: {"data": None}, "data must be iterable or a function.*got NoneType"),
    "a data set": (lambda: {"data": TensorDataset(torch.ones(3))}, "got TensorDataset; read it through a DataLoader"),
    "a loss class": (lambda: {"loss": nn.CrossEntropyLoss}, r"class CrossEntropyLoss; pass an object.*Loss\(\)"),
    "a loss's name": (lambda: {"loss": "mse"}, r"loss must be a function of \(output, target\), .* got 'mse'"),
    "loss and step": (lambda: {"step": lambda model, batch: 0}, "give loss= or step=, not both"),
    "a scheduler": (lambda: {"scheduler": StepLR(sgd(), 1)}, r"scheduler must be a function of \(optimizer\), .* got StepLR"),
    "an unknown interval": (lambda: {"scheduler_interval": "batch"}, "must be 'epoch' or 'step'; got 'batch'"),
    "an accuracy": (lambda: {"evaluate": 0.9}, r"evaluate must be a function of \(model\), .* got 0.9"),
    "a step of the batch": (
        lambda: {"loss": None, "step": lambda batch: 0},
        r"step is called with \(model, batch\), and <lambda> \(\S+test_job.py:\d+\) takes \(batch\)\. Write for example step=lambda",
    ),
    "a loss of the output": (
        lambda: {"loss": of_output},
        r"loss is called with \(output, target\), and of_output .* takes \(output: .* Write .* F\.cross_entropy\(output, target\)",
    ),
    "a seed in words": (lambda: {"seed": "one"}, "seed must be an integer or None; got 'one'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_jobs_that_cannot_be_right(kind: str) -> None:
    changes, text = MISTAKES[kind]
    with pytest.raises(wf.InvalidJobError, match=f"job 'job': .*{text}"):
        make(**changes()).check()


RESULTS = wf.Results([
    wf.JobResult("a", "completed", ({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.75, "loss": 1.0}), (3.0, 1.5), 2),
    wf.JobResult("b", "failed", (), (4.0,), 1, error=ValueError("broken"), traceback="..."),
    wf.JobResult("c", "cancelled", predicted_peak=100, measured_peak=120, seconds=1.5),
])  # fmt: skip


def test_the_value_of_a_result() -> None:
    assert [result.value for result in RESULTS] == [0.75, 4.0, None]


def test_results_by_position_and_by_name() -> None:
    assert RESULTS[0] is RESULTS["a"] and RESULTS[-1] is RESULTS["c"] and len(RESULTS[:2]) == 2
    assert RESULTS.failed == [RESULTS["b"]] and isinstance(RESULTS.failed, wf.Results)
    with pytest.raises(KeyError, match="no job is called 'd'; there are 'a', 'b', 'c'"):
        RESULTS["d"]


def test_results_as_plain_values() -> None:
    rows = json.loads(json.dumps([result.to_dict() for result in RESULTS]))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["metrics"] == {"accuracy": 0.75, "loss": 1.0} and rows[0]["loss"] == 1.5
    assert rows[1]["error"] == "ValueError: broken" and rows[0]["error"] is None
    assert rows[2]["measured_peak_bytes"] == 120 and rows[2]["value"] is None


def test_a_result_is_written_out_without_its_losses() -> None:
    """There is one for each step."""
    assert "losses" not in repr(wf.JobResult("a", "completed", losses=(1.5,) * 1000))


def test_results_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RESULTS.to_dataframe()
    assert list(table["name"]) == ["a", "b", "c"] and list(table["status"]) == ["completed", "failed", "cancelled"]
    assert table["steps"].sum() == 3 and {"value", "seconds", "predicted_peak_bytes"} <= set(table.columns)
    real = builtins.__import__

    def without_pandas(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match="pip install pandas"):
        RESULTS.to_dataframe()


class Unreadable(Exception):
    """One that can be pickled, and not read again."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_results_can_be_read_by_other_processes() -> None:
    def read(**fields: Any) -> wf.JobResult:
        return pickle.loads(pack_result(wf.JobResult("job", "failed", **fields)))  # type: ignore[no-any-return]

    assert str(read(error=wf.MemoryLimitError("all", needed=2, limit=1)).error).startswith("MemoryLimitError: all")
    assert isinstance(read(error=wf.StepError("a step")).error, wf.StepError)
    try:
        raise Unreadable("my", "message")
    except Unreadable as error:
        told = read(error=error, state_dict={"a": torch.ones(1)})
    assert str(told.error).startswith("Unreadable: my message") and "raise Unreadable(" in str(told.error)
    assert told.state_dict is not None
    lost = read(state_dict={"extra": (number for number in range(3))})
    assert lost.state_dict is None and "is lost: state_dict" in str(lost.error)
