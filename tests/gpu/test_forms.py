"""What an ordinary loop does beside steps, with device graphs and another job at its side: as the job alone without both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow import _C

STEPS = 24
Batch = tuple[torch.Tensor, torch.Tensor]
Result = tuple[list[float | str], dict[str, torch.Tensor]]
Between = Callable[[int, wf.Step], None]


def batch_of(rows: int, numbers: torch.Generator, width: int = 64) -> Batch:
    return torch.randn(rows, width, generator=numbers).cuda(), torch.randint(0, 10, (rows,), generator=numbers).cuda()


def rate(index: int, step: wf.Step) -> None:
    step.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)


def decay(index: int, step: wf.Step) -> None:
    step.optimizer.param_groups[0]["weight_decay"] = 0.01 * (index // 8)


def replace(index: int, step: wf.Step) -> None:
    if index == 12:
        weight = next(step.model.parameters())
        weight.data = weight.data * 0.5


def nothing(index: int, step: wf.Step) -> None:
    pass


FORMS: dict[str, tuple[dict[str, Any], Between, Callable[[int], tuple[int, int]]]] = {
    "plain": ({}, nothing, lambda index: (32, 64)),
    "schedule": ({}, rate, lambda index: (32, 64)),
    "decay": ({}, decay, lambda index: (32, 64)),
    "replaced weights": ({}, replace, lambda index: (32, 64)),
    "accumulation": ({"accumulate": 3}, rate, lambda index: (32, 64)),
    "clipping": ({"clip_grad_norm": 0.1, "clip_grad_value": 0.01}, nothing, lambda index: (32, 64)),
    "second kind": ({}, rate, lambda index: (16 if index % 5 == 4 else 32, 64)),
    "error": ({}, rate, lambda index: (32, 60 if index in (9, 17) else 64)),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 10)).cuda()


def train(step: wf.Step, form: str, seed: int, losses: list[float | str]) -> None:
    numbers = torch.Generator().manual_seed(seed)
    _, between, kind = FORMS[form]
    for index in range(STEPS):
        between(index, step)
        rows, width = kind(index)
        try:
            losses.append(float(step(batch_of(rows, numbers, width)).detach()))
        except RuntimeError:
            losses.append("refused")


def run(forms: list[str], graphs: bool) -> list[Result]:
    """Jobs of these forms together."""
    made: list[Any] = [None] * len(forms)
    with wf.Engine("cuda", memory="1GiB", lanes=len(forms), mode="lanes", device_graphs=graphs) as engine:
        models = [model() for _ in forms]

        def work(index: int, form: str) -> None:
            try:
                model, seed = models[index], 100 + index
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
                settings = {"generator": torch.Generator("cuda").manual_seed(seed), "engine": engine, **FORMS[form][0]}
                step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, **settings)
                losses: list[float | str] = []
                train(step, form, seed, losses)
                made[index] = losses, {key: value.cpu() for key, value in model.state_dict().items()}
            except BaseException as error:
                made[index] = error

        threads = [threading.Thread(target=work, args=one) for one in enumerate(forms)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (engine.stats().graphs["launched"] > 0) is graphs
    for one in made:
        if isinstance(one, BaseException):
            raise one
    return made


@pytest.mark.parametrize("form", list(FORMS))
def test_bits_as_alone_without_graphs(form: str) -> None:
    [(expected, state)] = run([form], False)
    assert expected.count("refused") == (2 if form == "error" else 0)
    for forms in ([form], [form, "plain"]):
        losses, mine = run(forms, True)[0]
        assert losses == expected
        assert all(torch.equal(mine[name], value) for name, value in state.items())


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is launched again although its binding has changed."""
    [(expected, _)] = run(["replaced weights"], False)
    monkeypatch.setattr(_C.Binding, "current", lambda self: True)
    assert run(["replaced weights"], True)[0][0] != expected
