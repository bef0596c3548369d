"""Launch-bound jobs: a deep MLP and a tiny transformer against eager training with the same fused optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks import report
from benchmarks.networks import deep_mlp

STEPS = 200


def mlp() -> nn.Module:
    """40 residual layers of width 64."""
    return deep_mlp(40, 64)


def transformer() -> nn.Module:
    """12 encoder blocks of width 32."""
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(block, 12, enable_nested_tensor=False)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(output, target)


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    # model, shape of a batch of 4, least speed-up of one job, of two
    "40-layer MLP, width 64": (mlp, (4, 64), 2.5, 3.8),
    "12-block transformer, width 32": (transformer, (4, 16, 32), 2.2, 3.8),
}


class Repeated:
    """The same batch ``steps`` times: loading costs nothing and is the same for all."""

    def __init__(self, batch: Any, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.steps))


def eager(model: nn.Module, batch: Any, steps: int) -> None:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_loop(model: nn.Module, batch: Any, steps: int) -> None:
    """The same loop with a captured step, alone on the calling thread."""
    step = wf.Step(model, loss=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(steps):
        step(batch)


def together(models: list[nn.Module], batch: Any, steps: int) -> None:
    """All models at once, through train()."""
    wf.train(
        models, loss=loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=Repeated(batch, steps), memory="1GiB",
    )  # fmt: skip


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one workload."""
    make, shape, goal_one, goal_two = WORKLOADS[name]
    batch = (torch.randn(shape), torch.randn(shape))
    first, second = make(), make()
    step_loop(first, batch, 4)  # captures; the study benchmark counts that, this one does not
    together([first, second], batch, 4)
    eager(first, batch, 4)
    times = report.interleaved(
        {
            "eager": lambda: report.seconds(lambda: eager(first, batch, STEPS)),
            "captured": lambda: report.seconds(lambda: step_loop(first, batch, STEPS)),
            "two eager": lambda: report.seconds(lambda: [eager(m, batch, STEPS) for m in (first, second)]),
            "two together": lambda: report.seconds(lambda: together([first, second], batch, STEPS)),
        },
        repeats,
    )
    rows = []
    for what, slow, fast, goal in (
        ("one job, one thread", "eager", "captured", goal_one),
        ("two jobs, two cores", "two eager", "two together", goal_two),
    ):
        ratio = report.ratio_of(times[slow], times[fast])
        rows.append({
            "workload": name, "what": what,
            "eager ms/step": report.median(times[slow]) / STEPS * 1e3,
            "waterflow ms/step": report.median(times[fast]) / STEPS * 1e3,
            "ratio": ratio,
            "spread": report.spread([s / f for s, f in zip(times[slow], times[fast])]),
            "at least": goal, "holds": ratio >= goal,
        })  # fmt: skip
    return rows


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for name in WORKLOADS for row in measure(name, arguments.repeats)]
    note = "ms/step of two jobs: both steps; eager: one after the other, one intra-op thread, fused AdamW"
    return report.finish("launch_bound", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
