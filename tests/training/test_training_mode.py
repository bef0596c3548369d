"""Parts of a model that are to stay in evaluation mode do, whatever happens to their job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import images, same_bits
from waterflow.executor.engine import Engine, within
from waterflow.training.build import begin_training
from waterflow.training.runner import JobRunner

BATCHES = images(4)


def frozen() -> nn.Module:
    """A model in training mode, whose normalization is in evaluation mode."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Dropout(0.5), nn.ReLU()), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)
    model[1].eval()
    model[2][0].eval()
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def job(name: str = "job", **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {"model": frozen, "data": BATCHES, "optimizer": sgd, "loss": F.cross_entropy, "epochs": 3,
                                "seed": 1}  # fmt: skip
    return wf.Job(name, **(settings | changes))


def eager(make: Callable[[], nn.Module], epochs: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that everybody writes, which leaves the flags as the model has them."""
    torch.manual_seed(1)
    model = make()
    optimizer = sgd(model.parameters())
    losses = []
    for x, y in BATCHES * epochs:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_as_eager(result: wf.JobResult, make: Callable[[], nn.Module] = frozen) -> None:
    losses, state = eager(make)
    assert list(result.losses) == losses and result.state_dict is not None
    assert all(same_bits(state[name], result.state_dict[name]) for name in state)


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def number(model: nn.Module) -> float:
    assert not any(module.training for module in model.modules())
    return 0.0


class KeepsItsBackbone(nn.Module):
    """As people freeze what they have not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.head[1].eval()

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.backbone.eval()
        return self


@pytest.mark.parametrize("inside", [False, True])
def test_a_train_of_the_models_own_decides_over_its_parts(inside: bool) -> None:
    """And what was in evaluation mode before stays there."""
    own = KeepsItsBackbone()
    model = nn.Sequential(own) if inside else own
    begin_training(wf.Job("one", model, [], lambda p: torch.optim.SGD(p, lr=0.1)), model)
    assert model.training and own.training and own.head.training and own.head[0].training
    assert not any(part.training for part in [*own.backbone.modules(), own.head[1]])


def test_parts_in_evaluation_mode_stay_in_it() -> None:
    results = wf.train([job("a"), job("b", evaluate=number), job("c", data=lambda: iter(BATCHES))], lanes=2)
    for result in results:
        assert_as_eager(result)
        assert int(result.state_dict["1.num_batches_tracked"]) == 0
    assert_as_eager(JobRunner(job(evaluate=number)).run())


def test_models_that_differ_in_their_flags_alone_are_not_taken_for_equal() -> None:
    def awake() -> nn.Module:
        model = frozen()
        model[1].train()
        return model

    jobs = [job("a"), job("b", model=awake), job("c"), job("d", model=awake)]
    for result, make in zip(wf.train(jobs, lanes=2), (frozen, awake) * 2):
        assert_as_eager(result, make)


def test_a_model_that_comes_in_evaluation_mode_is_trained_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def pretrained() -> nn.Module:
        model = frozen()
        model[2][0] = nn.Identity()
        return model.eval()

    def training() -> nn.Module:
        return pretrained().train()

    caplog.set_level(logging.WARNING, logger="waterflow")
    (result,) = wf.train([job("tuned", model=pretrained)])
    assert_as_eager(result, training)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "job 'tuned'" in said and "evaluation mode" in said and "train_mode='as_is'" in said
    caplog.clear()
    (result,) = wf.train([job("tuned", model=pretrained, train_mode="as_is", evaluate=number)])
    assert_as_eager(result, pretrained)
    wf.train([job("a")])
    assert not caplog.records


def test_a_train_mode_that_does_not_exist() -> None:
    with pytest.raises(wf.InvalidJobError, match="job 'job': train_mode must be 'auto' or 'as_is'; got 'eval'"):
        job(train_mode="eval").check()
    with pytest.raises(wf.InvalidJobError, match="train_mode must be"):
        wf.train([frozen()], data=BATCHES, optimizer=sgd, loss=F.cross_entropy, train_mode=True)


def raises(model: nn.Module) -> float:
    raise LookupError("evaluated on purpose")


def wakes(model: nn.Module) -> float:
    model.train()
    model[3].eval()
    return 0.0


def adds(model: nn.Module) -> float:
    model[2].add_module("later", nn.Dropout(0.0))
    model[1].add_module("below", nn.Sequential(nn.Identity()))
    model.eval()
    return 0.0


def swaps(model: nn.Module) -> float:
    model[2] = nn.Sequential(nn.Identity().eval())
    return 0.0


@pytest.mark.parametrize("evaluate", [number, raises, wakes, adds, swaps])
@pytest.mark.parametrize("lanes", [None, 2])
def test_after_evaluate_every_flag_is_as_before(evaluate: Callable[[nn.Module], float], lanes: int | None) -> None:
    model = frozen()
    before = flags(model)
    made = job(model=model, evaluate=evaluate, epochs=1)
    result = JobRunner(made).run() if lanes is None else wf.train([made], lanes=lanes, on_error="continue")[0]
    assert result.status == ("failed" if evaluate is raises else "completed")
    after = flags(model)
    if evaluate is adds:
        assert after.pop("2.later") and not after.pop("1.below") and not after.pop("1.below.0")
    if evaluate is swaps:
        before.pop("2.1"), before.update({"2.0": True})
    assert after == before


@pytest.mark.parametrize("suspend", [False, True])
def test_flags_stay_over_checkpoints_and_suspension(tmp_path: Path, suspend: bool) -> None:
    reached, seen = threading.Event(), threading.Event()

    def data() -> Any:
        for count, batch in enumerate(BATCHES):
            if count == 2 and not reached.is_set():
                reached.set()
                seen.wait(0.2)
            yield batch

    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(data=data, evaluate=number), engine)
        box: list[wf.JobResult] = []

        def work() -> None:
            with within(engine):
                box.append(runner.run())

        thread = threading.Thread(target=work)
        thread.start()
        assert reached.wait(20)
        state = runner.suspend(20) if suspend else runner.snapshot(20)
        seen.set()
        if suspend:
            runner.resume()
        thread.join(20)
        assert_as_eager(box[0])
        state.save(tmp_path / "state")
        again = wf.Checkpoint.load(tmp_path / "state")
        with within(engine):
            assert_as_eager(JobRunner(job(data=data, evaluate=number), engine, resume=again).run())
