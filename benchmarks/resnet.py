"""Two ResNet-50 that saturate the machine: side by side against one after the other."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import waterflow as wf
from benchmarks import report
from benchmarks.launch_bound import Repeated
from benchmarks.zoo import FULL

STEPS = 4


def sgd(parameters: object) -> Optimizer:
    """As ResNets are trained."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


def eager(models: list[nn.Module], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One model after the other, the ordinary way, with every core inside each operation."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        for _ in range(STEPS):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    models = [FULL["resnet50"].build() for _ in range(2)]
    batch = (torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,)))

    def together() -> None:
        wf.train(models, loss=F.cross_entropy, optimizer=sgd, data=Repeated(batch, STEPS), memory="8GiB", lanes=2)

    eager(models, batch)
    together()
    times = report.interleaved(
        {
            "one after the other": lambda: report.seconds(lambda: eager(models, batch)),
            "together": lambda: report.seconds(together),
        },
        arguments.repeats,
    )
    slow, fast = times["one after the other"], times["together"]
    ratio = report.ratio_of(slow, fast)
    row = {
        "what": "two ResNet-50, 64 px, batch 16, two cores",
        "one after the other s": report.median(slow), "together s": report.median(fast), "ratio": ratio,
        "spread": report.spread([s / f for s, f in zip(slow, fast)]), "at least": 1.0, "holds": ratio >= 1.0,
    }  # fmt: skip
    note = f"{STEPS} steps each; one after the other: eager, two intra-op threads; together: two lanes of one thread"
    return report.finish("resnet", arguments, [row], note)


if __name__ == "__main__":
    sys.exit(main())
