"""Make a job's model and optimizer, and set the training and evaluation flags of its modules."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch._subclasses import fake_tensor

from waterflow.errors import InvalidJobError
from waterflow.executor.cancel import Turn, doing
from waterflow.executor.rng import own_numbers
from waterflow.job import Job
from waterflow.partition.capture.trace import one_at_a_time

logger = logging.getLogger("waterflow")


def begin_training(job: Job, model: nn.Module) -> None:
    """Put a model that is in evaluation mode as a whole into training mode; keep the flags of one in training mode.

    A module with a ``train()`` of its own, which for example keeps a backbone in evaluation mode, may still put parts into
    evaluation mode. With ``job.train_mode="as_is"`` no flag changes.
    """
    if job.train_mode == "as_is":
        return
    if model.training:
        # A train() of the user's may only switch parts off: flags that were off before it, as the user's eval() on a
        # part, stay off.
        flags = [(module, module.training) for module in model.modules()]
        _call_own_train(model)
        for module, training in flags:
            module.training = module.training and training
        return
    model.train()
    logger.warning(
        "job %r: its %s came in evaluation mode, as from_pretrained() returns models, and train() was called on all of it. Call "
        "train() in model= yourself, and eval() on parts that are to stay in evaluation mode, or pass train_mode='as_is' to "
        "keep all flags",
        job.name,
        type(model).__name__,
    )


def _call_own_train(module: nn.Module) -> None:
    # Outermost only: an overridden train() takes care of the modules below it.
    if getattr(module.train, "__func__", None) is not nn.Module.train:
        module.train()
        return
    for child in module.children():
        _call_own_train(child)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the whole model into evaluation mode inside; afterwards each module has its flag of before.

    A module that was added inside gets the flag of its parent.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
        known = {id(module) for module, _ in before}
        for holder in model.modules():  # holders come before what they hold
            for module in holder.children():
                if id(module) not in known:
                    known.add(id(module))
                    module.training = holder.training


_building = Turn()  # one at a time: builders patch globals of the process, as transformers' do


@doing("making its model or optimizer")
def model_of(job: Job, numbers: Sequence[torch.Generator] = (), device: torch.device | None = None) -> nn.Module:
    """Return the job's model, ready to train, on ``device`` if that is given, as is its loss module.

    A function that makes it draws from ``numbers``, or else from torch's generators.

    Raises InvalidJobError if the function returns no module.
    """
    if isinstance(job.model, nn.Module):
        model = job.model
    elif not numbers:
        model = job.model()
    else:
        with own_numbers(*numbers), _building:
            model = _made(job)
    if not isinstance(model, nn.Module):
        raise InvalidJobError(f"job {job.name!r}: model() made a {type(model).__name__}, not a module")
    begin_training(job, model)
    for module in (model, job.loss):
        if device is not None and isinstance(module, nn.Module):
            _move(module, device)
    return model


def _move(module: nn.Module, device: torch.device) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    if any(one.device != device for one in tensors) and not any(one.is_meta for one in tensors):
        # Jobs may share frozen modules: two would each move a tensor, and while one is captured its modules have stand-ins.
        with _building, one_at_a_time:
            module.to(device)


def _made(job: Job) -> nn.Module:
    try:
        return job.model()
    except Exception as error:
        # While another job's step is captured its modules have stand-ins without values. A function that copies such a
        # module fails deep inside torch: say what is wrong.
        if all(frame.f_code.co_filename != fake_tensor.__file__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        raise InvalidJobError(
            f"job {job.name!r}: model() came upon a tensor without values, of modules that another job trains. Give each job its "
            "own, as by copy.deepcopy; frozen tensors can be shared: docs/howto.md, LoRA adapters over one frozen model"
        ) from error


@doing("making its model or optimizer")
def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer over the parameters of ``model``. Raises InvalidJobError if it is none."""
    optimizer = job.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidJobError(f"job {job.name!r}: optimizer made a {type(optimizer).__name__}, not an optimizer")
    return optimizer
