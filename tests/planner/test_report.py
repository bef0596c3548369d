"""Where a peak comes from, by the user's lines."""

from __future__ import annotations

import inspect

import torch
from torch import nn

import waterflow as wf
from waterflow.planner.report import lines_at_peak
from waterflow.planner.sizes import StepSizes


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
