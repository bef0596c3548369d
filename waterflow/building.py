"""A job's model and its optimizer: made, and checked."""

from __future__ import annotations

import traceback

import torch
from torch import nn
from torch._subclasses import fake_tensor

from waterflow.errors import InvalidJobError
from waterflow.executor.cancel import Turn, doing
from waterflow.executor.thread_generators import own_numbers
from waterflow.job import Job
from waterflow.training_mode import begin_training

_building = Turn()  # functions that make models may patch what is the process's, as transformers' do


@doing("making its model or optimizer")
def model_of(job: Job, numbers: torch.Generator | None = None) -> nn.Module:
    """The job's model, ready to train. A function that makes it draws from ``numbers``; without them from torch's own.

    Raises InvalidJobError where the function makes something else.
    """
    if isinstance(job.model, nn.Module):
        model = job.model
    elif numbers is None:
        model = job.model()
    else:
        with own_numbers(numbers), _building:
            model = _made(job)
    if not isinstance(model, nn.Module):
        raise InvalidJobError(f"job {job.name!r}: model() made a {type(model).__name__}, not a module")
    begin_training(job, model)
    return model


def _made(job: Job) -> nn.Module:
    try:
        return job.model()
    except Exception as error:
        if all(frame.f_code.co_filename != fake_tensor.__file__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        raise InvalidJobError(
            f"job {job.name!r}: model() came upon a tensor without values, of modules that another job trains. Give each job its "
            "own, as by copy.deepcopy; frozen tensors can be shared: docs/howto.md, LoRA adapters over one frozen model"
        ) from error


@doing("making its model or optimizer")
def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer of the parameters of ``model``. Raises InvalidJobError where it is none."""
    optimizer = job.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidJobError(f"job {job.name!r}: optimizer made a {type(optimizer).__name__}, not an optimizer")
    return optimizer
