"""What recomputing frees and costs: the lowest a step comes to, and the repeated work at shares of its height.

Steps are captured, not run. Heights are predicted: bytes of live memory, without temporaries inside kernels.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL

BATCHES = {"resnet50": 64, "bert": 32, "vit": 32, "unet": 8, "gpt2": 8, "nasnet": 16}
SHARES = (0.75, 0.5)


def measure(name: str) -> dict[str, Any]:
    """One model."""
    zoo = FULL[name]
    model = zoo.build()
    batch = zoo.batch(BATCHES[name], torch.Generator().manual_seed(0))
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    plain = step.plan_for(batch).height
    row: dict[str, Any] = {"model": f"{name}, batch {BATCHES[name]}", "height MiB": plain / 2**20}

    def look(height: int) -> str:
        with contextlib.suppress(wf.MemoryLimitError):
            cost = step.recomputed_for(batch, recompute=height)
            assert cost is not None
            return f"{cost.share_of_bytes:.1%} / {cost.share_of_flops:.1%}"
        return "out of reach"

    for share in SHARES:
        taken = report.seconds(lambda share=share: row.update({f"at {share}": look(int(share * plain))}))  # type: ignore[misc]
        row[f"seconds, {share}"] = taken
    try:
        step.plan_for(batch, recompute=1)
    except wf.MemoryLimitError as error:
        row |= {"lowest": error.needed / plain, "at the lowest": look(error.needed)}
    return row


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    arguments = parser.parse_args()
    rows = [measure(name) for name in arguments.models]
    return report.finish("recompute", arguments, rows, "repeated share of the bytes moved / of the flops")


if __name__ == "__main__":
    sys.exit(main())
