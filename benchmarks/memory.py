"""Predicted peak memory of steps in an arena, against an allocator that counts every request of the whole step."""

from __future__ import annotations

import sys
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL, SMALL, ZooModel
from tests.native import count_memory

# The models that plans are made for, with batches that fit this machine; and small ones that ask for memory otherwise.
PLANNED: dict[str, tuple[ZooModel, int]] = {
    "resnet50, 224 px, batch 8": (FULL["resnet50"], 8),
    "resnet152, 224 px, batch 4": (FULL["resnet152"], 4),
    "nasnet mobile, 224 px, batch 8": (FULL["nasnet_mobile"], 8),
    "inception_v3, 299 px, batch 4": (FULL["inception_v3"], 4),
    "bert-base, 128 tokens, batch 4": (FULL["bert"], 4),
    "tacotron2, 200 frames, batch 8": (FULL["tacotron2"], 8),
    "vit-base, 224 px, batch 4": (FULL["vit"], 4),
    "gpt2-small, 512 tokens, batch 1": (FULL["gpt2"], 1),
    "mamba, 64 tokens, batch 2": (FULL["mamba"], 2),
    "dlrm, batch 512": (FULL["dlrm"], 512),
    "unet, 256 px, batch 2": (FULL["unet"], 2),
}
OTHERS: dict[str, tuple[ZooModel, int]] = {
    "cnn_bn (small), batch 32": (SMALL["cnn_bn"], 32),
    "lstm (small), batch 32": (SMALL["lstm"], 32),
    "lstm_cell (small), batch 32": (SMALL["lstm_cell"], 32),
}
BEFORE, AFTER = 0.02, 0.02


def measure(name: str) -> dict[str, Any]:
    """One row: the step's height above what persists, predicted twice and counted."""
    zoo, size = (PLANNED | OTHERS)[name]
    torch.manual_seed(0)
    model = zoo.build()
    batch = zoo.batch(size, torch.Generator().manual_seed(0))
    with wf.Engine(lanes=1) as engine, wf.within(engine):
        step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
        predicted = step.plan_for(batch)
        for _ in range(4):  # optimizer state, two equal profiles, and a step in the arena
            step(batch)
        profiled = step.plan
        with count_memory() as count:
            step(batch)
            counted = count.peak
        planned = step.planned_requests
    # Persistent state and the batch are there before counting begins: they are the same bytes in all three figures.
    base = profiled.persistent + profiled.batch
    counted_peak = base + counted
    before = predicted.peak / counted_peak - 1
    after = profiled.peak / counted_peak - 1
    return {
        "model": name,
        "persistent MiB": base / 2**20,
        "counted peak MiB": counted_peak / 2**20,
        "before profiling": f"{before:+.2%}",
        "after": f"{after:+.2%}",
        "height alone, before": f"{predicted.height / counted - 1:+.2%}",
        "height alone, after": f"{profiled.height / counted - 1:+.2%}",
        "planned requests": planned,
        "holds": planned > 0 and profiled.measured and abs(before) <= BEFORE and abs(after) <= AFTER,
    }


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=[*PLANNED, *OTHERS], choices=[*PLANNED, *OTHERS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name) for name in arguments.models]
    note = f"at most {BEFORE:.0%} off before the profiling step, {AFTER:.0%} after it; one intra-op thread"
    return report.finish("memory", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
