"""Learning-rate schedulers of jobs, and which of them may step while a training step runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler

from waterflow.job import Metrics

_OF_OTHERS = {lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler}
_OF_NUMBERS = {
    *_OF_OTHERS,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.CyclicLR,
    lr_scheduler.OneCycleLR,
}
_THE_USERS = ("step", "get_lr", "_scale_fn_custom")  # attributes, where the user has set them


def of_numbers(scheduler: Any) -> bool:
    """Return True if a scheduler is known to read and write numbers alone, its own and the optimizer's, of which steps have copies.

    All others may look at parameters or change them, or call a function of the user's that does, as ``LambdaLR``.
    """
    if type(scheduler) not in _OF_NUMBERS or any(vars(scheduler).get(name) is not None for name in _THE_USERS):
        return False
    if type(scheduler) in _OF_OTHERS:
        return all(map(of_numbers, scheduler._schedulers))
    groups = scheduler.optimizer.param_groups
    return not any(isinstance(value, torch.Tensor) for group in groups for value in group.values())


def step_after_epoch(scheduler: Any, metrics: Metrics) -> None:
    """Step a scheduler after an epoch; ReduceLROnPlateau gets the first metric."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(next(iter(metrics.values())))
    else:
        scheduler.step()
