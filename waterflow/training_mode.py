"""Which modules of a model train and which evaluate: the flags that ``train()`` and ``eval()`` set."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import nn

from waterflow.job import Job

logger = logging.getLogger("waterflow")


def begin_training(job: Job, model: nn.Module) -> None:
    """Leave the flags of a model that is in training mode; put one that is in evaluation mode as a whole into training mode.

    Modules that have a ``train()`` of their own, as those that keep a backbone in evaluation mode, may put parts of theirs there.
    With ``job.train_mode="as_is"`` no flag changes.
    """
    if job.train_mode == "as_is":
        return
    if model.training:
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
        job.name, type(model).__name__,
    )  # fmt: skip


def _call_own_train(module: nn.Module) -> None:
    """Call the outermost ones that are not torch's."""
    if getattr(module.train, "__func__", None) is not nn.Module.train:
        module.train()
        return
    for child in module.children():
        _call_own_train(child)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the whole model is in evaluation mode. Behind it each module's flag is as it was before.

    A module that was added inside gets the flag of the module that holds it.
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
