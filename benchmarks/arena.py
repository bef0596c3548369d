"""Steps whose memory lies at planned addresses, against the same steps with torch's own allocator, in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL
from waterflow import allocator

STEPS = {"LeNet": 200, "ResNet-50": 3}


def lenet() -> nn.Module:
    """LeNet-5 with batch normalization, for images of 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(batch: int, channels: int, pixels: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of noise."""
    return torch.randn(batch, channels, pixels, pixels), torch.randint(0, classes, (batch,))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, torch.Tensor]]] = {
    "LeNet": (lenet, images(128, 1, 32, 10)),
    "ResNet-50": (FULL["resnet50"].build, images(16, 3, 96, 1000)),
}


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (build, batch) in MODELS.items():
        variants: dict[str, Callable[[], float]] = {}
        steps: dict[str, wf.Step] = {}
        with wf.Engine(memory="4GiB", lanes=1) as planned, wf.Engine(memory="4GiB", lanes=1, arenas=False) as plain:
            for what, engine in (("arena", planned), ("torch", plain)):
                torch.manual_seed(0)
                model = build()
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
                step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
                for _ in range(4):
                    step(batch)

                def train(step: wf.Step = step, count: int = STEPS[name]) -> None:
                    for _ in range(count):
                        step(batch)  # noqa: B023

                variants[what] = lambda train=train: report.seconds(train)  # type: ignore[misc]
                steps[what] = step
            times = report.interleaved(variants, arguments.repeats)
            ratio = report.ratio_of(times["torch"], times["arena"])
            rows.append({
                "model": f"{name}, batch {len(batch[0])}",
                "arena ms": report.median(times["arena"]) / STEPS[name] * 1e3,
                "torch's own ms": report.median(times["torch"]) / STEPS[name] * 1e3,
                "ratio": ratio,
                "spread": report.spread([slow / fast for slow, fast in zip(times["torch"], times["arena"])]),
                "planned requests": steps["arena"].planned_requests, "missed": steps["arena"].missed_requests,
                "at least": 1.0, "holds": ratio >= 1.0,
            })  # fmt: skip
            cost = allocator.time_planned_requests(steps["arena"].plan)
            rows.append({
                "model": f"{name}: a planned request with its release, ns", "arena ms": None,
                "ratio": report.median(cost), "spread": report.spread(cost), "at most": 50.0,
                "holds": report.median(cost) <= 50.0,
            })  # fmt: skip
            for step in steps.values():
                step.close()
    return report.finish("arena", arguments, rows, "one lane, one intra-op thread; the same captured step in both")


if __name__ == "__main__":
    sys.exit(main())
