"""Where a peak comes from, by the user's lines."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import waterflow as wf
from waterflow.planner.report import lines_at_peak, save_report
from waterflow.planner.step_sizes import SizedStep, StepSizes


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 512, bias=False), nn.Linear(512, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(x)
        x = x.sigmoid()
        return self.narrow(x)


def test_lines_of_the_model() -> None:
    model = Two()
    step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
    found = StepSizes(step, (torch.zeros(100, 8), torch.zeros(100, 8))).captured(1000)
    lines = dict(lines_at_peak(found))
    first = inspect.getsourcelines(Two.forward)[1]
    assert lines[f"{__file__}:{first + 2}"] >= 1000 * 512 * 4  # what sigmoid made is there until its own gradient is
    assert sum(lines.values()) == found.resident


def sized(model: nn.Module, size: int = 1000) -> SizedStep:
    step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
    return StepSizes(step, (torch.zeros(100, 8), torch.zeros(100, 8))).captured(size)


def test_modules_and_operators_where_there_is_no_line() -> None:
    layers = [nn.Linear(8, 512), nn.Sigmoid(), nn.Sequential(nn.Linear(512, 8))]
    lines = dict(lines_at_peak(sized(nn.Sequential(*layers))))
    assert lines["1 (Sigmoid)"] >= 1000 * 512 * 4
    assert "aten.mm, backward" in lines and "(not known)" not in lines
    assert "0 (Linear)" in sized(nn.Sequential(*layers)).footprint.lines
    assert "2.0 (Linear)" in sized(nn.Sequential(*layers)).footprint.lines


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, jobs: Any, **options: Any) -> Figure:
    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: made.append(self))
    save_report(path, jobs, **options)
    return made[0]


def test_what_a_picture_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = sized(Two())
    names = ["net 1", "a name with many words, too long for the place beside the lanes"]
    figure = drawn(monkeypatch, tmp_path, [(name, step) for name in names], limit=20 << 20, reserve=5 << 20, gpu="x-1g")
    stacks, lanes, lines = figure.axes
    assert figure.get_suptitle().startswith("x-1g: 2 jobs: net 1 with batches of 1000, a name")
    assert [text.get_text() for text in stacks.texts] == ["the limit"] and stacks.get_ylabel() == "memory of steps (MiB)"
    assert "20.0 MiB: 5.0 MiB reserve, " in stacks.get_title(loc="left")
    legend = lanes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["net 1", "a name with many words, too …"]
    assert lanes.get_xlabel().startswith("microseconds") and lines.get_xlabel() == "MiB"
    for text in (*figure.texts, stacks.title, lines.title):
        assert len(text.get_text()) <= 122


@pytest.mark.parametrize("state", [True, False])
def test_a_job_that_does_not_fit_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: bool) -> None:
    step = sized(Two())
    limit = step.held // 2 if state else step.held + step.offsets.height // 2
    stacks = drawn(monkeypatch, tmp_path, [("net", step)], limit=limit).axes[0]
    (line,) = stacks.lines
    top = stacks.get_ylim()[1]
    assert np.ravel(line.get_ydata())[0] == (0 if state else pytest.approx(top / 1.06 / 2, rel=0.01))
    assert ("less than is held without a step" in stacks.texts[0].get_text()) == state
