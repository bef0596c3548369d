"""Predicted peak memory against an allocator that counts every request of the whole step."""

from __future__ import annotations

import sys
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL, SMALL, ZooModel

MODELS: dict[str, tuple[ZooModel, int]] = {
    "resnet50, 224 px, batch 8": (FULL["resnet50"], 8),
    "bert-base, 128 tokens, batch 4": (FULL["bert"], 4),
    "vit-base, 224 px, batch 4": (FULL["vit"], 4),
    "unet, 256 px, batch 2": (FULL["unet"], 2),
    "gpt2-small, batch 1": (FULL["gpt2"], 1),
    "inception_v3 (107 px), batch 8": (SMALL["inception_v3"], 8),
    "nasnet (narrow, 64 px), batch 8": (SMALL["nasnet"], 8),
    "cnn_bn (small), batch 32": (SMALL["cnn_bn"], 32),
    "lstm (small), batch 32": (SMALL["lstm"], 32),
    "lstm_cell (small), batch 32": (SMALL["lstm_cell"], 32),
    "mamba (small), batch 8": (SMALL["mamba"], 8),
    "tacotron2 (small), batch 4": (SMALL["tacotron2"], 4),
}
BEFORE, AFTER = 0.10, 0.02


def measure(name: str) -> dict[str, Any]:
    """One row: the step's height above what persists, predicted twice and counted."""
    zoo, size = MODELS[name]
    torch.manual_seed(0)
    model = zoo.build()
    batch = zoo.batch(size, torch.Generator().manual_seed(0))
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    predicted = step.plan_for(batch)
    for _ in range(3):  # optimizer state, then two equal profiles
        step(batch)
    profiled = step.plan
    with wf.count_memory() as count:
        step(batch)
        counted = count.peak
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
        "holds": profiled.measured and abs(before) <= BEFORE and abs(after) <= AFTER,
    }


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = [measure(name) for name in MODELS]
    note = f"at most {BEFORE:.0%} off before the profiling step, {AFTER:.0%} after it; one intra-op thread"
    return report.finish("memory", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
