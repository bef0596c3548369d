"""Trains each model of a file five steps eagerly and with ``waterflow.Step``, and prints a line for each: bytes must be equal.

    python -m benchmarks.soundness_zoo FILE [NAMES ...]

The file has ``zoo()`` and ``small()``, which return ``{name: (make a model, make a batch of a size, step)}``. The eager
optimizer is the fused form that captured steps run, where torch has one for the model. A line that says how many fake tensors
are left in the process, when all captures are forgotten, is wrong, too.
"""

from __future__ import annotations

import gc
import random
import runpy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from tests.program_campaign import forget
from tests.program_runs import Captured, Eager, Make, items_of, quiet

STEPS, BATCH = 5, 4
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01),
)


def seed(number: int) -> None:
    """All random numbers of the process."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(entry: Any, make: Make, optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    """What five steps leave behind."""
    build, batch_of, step = entry
    seed(1)
    model: nn.Module = build()
    model.train()
    batches = [batch_of(BATCH) for _ in range(STEPS)]
    if any(is_lazy(parameter) for parameter in model.parameters()):
        with torch.no_grad():
            step(model, batches[0])
    optimizer = optimizer_of(model.parameters())
    call = make(model, optimizer=optimizer, step=step)
    seed(2)
    losses = [call(batch) for batch in batches]
    left = {"losses": losses, "tensors": [*model.named_parameters(), *model.named_buffers()], "optimizer": optimizer}
    return dict(items_of(left)) | {"random numbers": torch.get_rng_state().numpy().tobytes()}


def expected(entry: Any) -> tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]:
    """Eager training with the first optimizer that works for the model."""
    for optimizer_of in OPTIMIZERS[:-1]:
        try:
            return train(entry, Eager(), optimizer_of), optimizer_of
        except (RuntimeError, NotImplementedError):
            pass
    return train(entry, Eager(), OPTIMIZERS[-1]), OPTIMIZERS[-1]


def fakes() -> int:
    """How many fake tensors there are in the process that no capture needs."""
    forget()
    gc.collect()
    return sum(issubclass(type(one), FakeTensor) for one in gc.get_objects())


def line(name: str, entry: Any) -> str:
    """What became of one model."""
    before = fakes()
    try:
        theirs, optimizer_of = expected(entry)
    except Exception as error:
        return f"{name:20s} BOTHERR eager={type(error).__name__}: {str(error)[:100]}"
    captured = Captured()
    try:
        ours = train(entry, captured, optimizer_of)
    except Exception as error:
        return f"{name:20s} ERRDIFF {type(error).__name__}: {str(error)[:150]}"
    differing = [path for path in {**theirs, **ours} if theirs.get(path) != ours.get(path)]
    left = fakes() - before
    reason = "; ".join(captured.reasons)[:110]
    end = (
        "captured"
        if captured.captured == captured.steps
        else f"OPAQUE({reason}; {captured.captured} of {captured.steps} captured)"
    )
    if left > 0:
        return f"{name:20s} FAKE {left} fake tensors are left {end}"
    return f"{name:20s} {f'DIFFERS {len(differing)}/{len(theirs)} {differing[:3]}' if differing else 'equal'} {end}"


def main() -> int:
    """Command line."""
    quiet()
    warnings.filterwarnings("ignore")
    # Vision libraries look for these operators, which a torch without GPU support does not bring.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    file = runpy.run_path(sys.argv[1])
    for name, entry in {**file["small"](), **file["zoo"]()}.items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            print(line(name, entry), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
