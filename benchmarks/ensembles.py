"""Model ensembling with ``torch.func`` as one writes it by hand, with a learning rate for each job.

After https://docs.pytorch.org/tutorials/intermediate/ensembling.html: parameters and buffers are stacked, and
``vmap`` runs one function that takes gradients over the stack. Parameters are views of one flat tensor per
ensemble, so that the optimizer is a few operations however many parameters there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.optim import SGD, AdamW
from torch.utils import _pytree as pytree

from benchmarks.workloads import MadeJob


class Ensemble:
    """Jobs of one workload, stacked.

    A step takes a batch with a leading dimension of jobs and returns a loss for each. ``batches`` are the jobs' own,
    stacked beforehand.
    """

    def __init__(self, jobs: Sequence[MadeJob], compiled: bool = False) -> None:
        workload = jobs[0].workload
        models = [job.model for job in jobs]
        stacked, self.buffers = stack_module_state(models)  # type: ignore[arg-type]
        self.shapes = {name: tensor.shape for name, tensor in stacked.items()}
        with torch.no_grad():
            self.flat = torch.cat([tensor.flatten(1) for tensor in stacked.values()], 1)
        self.parameters = views(self.flat, self.shapes)
        self.batches = [
            pytree.tree_map(lambda *of_jobs: torch.stack(of_jobs), *together)
            for together in zip(*(job.batches for job in jobs), strict=True)
        ]
        base = models[0]  # its code; BERT also asks it for a device, so that it cannot be on meta

        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
            def model(*args: Any, **kwargs: Any) -> Any:
                return functional_call(base, (parameters, buffers), args, kwargs)

            return workload.loss(model, batch)

        self.gradients = vmap(grad_and_value(loss), randomness="different")
        rates = torch.tensor([job.settings["lr"] for job in jobs], dtype=self.flat.dtype).unsqueeze(1)
        self.update = UPDATES[workload.optimizer](self.flat, rates, workload)
        self.work = torch.compile(self._work) if compiled else self._work
        # torch has no batching rule for oneDNN's recurrent layers and would loop over the jobs.
        self.recurrent = any(isinstance(module, nn.RNNBase) for module in models[0].modules())

    def step(self, batch: Any) -> Tensor:
        """One step of all jobs; a loss for each."""
        with torch.backends.mkldnn.flags(enabled=False) if self.recurrent else contextlib.nullcontext():
            return self.work(batch, self.update.numbers())

    def _work(self, batch: Any, numbers: tuple[Tensor, ...]) -> Tensor:
        gradients, losses = self.gradients(self.parameters, self.buffers, batch)
        self.update(torch.cat([gradients[name].flatten(1) for name in self.shapes], 1), *numbers)
        return losses

    def weights(self, number: int) -> dict[str, Tensor]:
        """Parameters and buffers of one job."""
        return {name: tensor[number] for name, tensor in (*self.parameters.items(), *self.buffers.items())}


def views(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Parameters by name, as parts of a tensor (jobs, parameters of one job)."""
    jobs = flat.shape[0]
    parts = flat.split([shape.numel() // jobs for shape in shapes.values()], 1)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class MomentumUpdate:
    """SGD with momentum over a stack (jobs, parameters); ``rates`` are (jobs, 1)."""

    def __init__(self, flat: Tensor, rates: Tensor, workload: Any) -> None:
        self.flat, self.rates = flat, rates
        self.momentum = workload.settings["momentum"]
        self.speed = torch.zeros_like(flat)

    def numbers(self) -> tuple[Tensor, ...]:
        """Nothing changes from step to step."""
        return ()

    def __call__(self, gradients: Tensor) -> None:
        self.speed.mul_(self.momentum).add_(gradients)
        self.flat.sub_(self.speed * self.rates)


class AdamWUpdate:
    """AdamW over a stack (jobs, parameters) with torch's default settings; ``rates`` are (jobs, 1)."""

    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 1e-2

    def __init__(self, flat: Tensor, rates: Tensor, workload: Any) -> None:
        self.flat, self.rates, self.kept = flat, rates, 1 - rates * self.decay
        self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)
        self.count = 0

    def numbers(self) -> tuple[Tensor, ...]:
        """The corrections of the step that comes, as tensors: as numbers each would be compiled for itself."""
        self.count += 1
        corrections = 1 - self.beta1**self.count, (1 - self.beta2**self.count) ** 0.5
        return tuple(torch.tensor(number, dtype=torch.float64) for number in corrections)

    def __call__(self, gradients: Tensor, first: Tensor, second: Tensor) -> None:
        self.flat.mul_(self.kept)
        self.mean.lerp_(gradients, 1 - self.beta1)
        self.square.mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        spread = self.square.sqrt().div_(second).add_(self.eps)
        self.flat.sub_((self.mean / spread).mul_(self.rates / first))


UPDATES: dict[Any, Callable[[Tensor, Tensor, Any], Any]] = {SGD: MomentumUpdate, AdamW: AdamWUpdate}
