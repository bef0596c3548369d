"""Planned memory: how far the highest byte of a step lies above what is live, for each model and order of placement.

Batches are usual ones; steps are captured, not run. ``excess`` is the height over the most bytes that are ever live at
once, ``area`` heights over live bytes, both summed over the step. "searched" is what plans use.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL

Order = Literal["death", "life", "birth", "size", "area"]
BATCHES = {
    "mlp_dropout": 64, "cnn_bn": 64, "resnet50": 64, "resnet152": 32, "inception_v3": 64, "nasnet": 16, "nasnet_mobile": 64, "unet": 8,
    "vit": 32, "bert": 32, "gpt2": 8, "lstm": 20, "lstm_cell": 20, "mamba": 8, "tacotron2": 32, "dlrm": 512,
}  # fmt: skip
CNNS = ("cnn_bn", "resnet50", "resnet152", "inception_v3", "nasnet", "nasnet_mobile", "unet")
ORDERS: tuple[Order, ...] = ("death", "life", "birth", "size", "area")
GOAL, GOAL_CNN = 1.05, 1.02


def measure(name: str) -> dict[str, Any]:
    """All orders on one model."""
    zoo = FULL[name]
    model = zoo.build()
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    searched = step.footprint_for(zoo.batch(BATCHES[name], torch.Generator().manual_seed(0))).offsets()
    taken = report.seconds(lambda: searched.by(None))
    goal = GOAL_CNN if name in CNNS else GOAL
    row: dict[str, Any] = {
        "model": f"{name}, batch {BATCHES[name]}", "pieces": len(searched.lives), "live MiB": max(searched.resident) / 2**20,
    }  # fmt: skip
    for order in ORDERS:
        made = searched.by(order)
        row[order] = f"{made.excess:.3f} / {made.area_excess:.2f}"
    row |= {
        "searched": f"{searched.excess:.4f} / {searched.area_excess:.2f}", "seconds": taken, "excess": searched.excess,
        "at most": goal, "holds": searched.excess <= goal,
    }  # fmt: skip
    return row


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(FULL), choices=list(FULL))
    arguments = parser.parse_args()
    rows = [measure(name) for name in arguments.models]
    return report.finish("offsets", arguments, rows, "excess / area; each piece in the tightest gap, in this order")


if __name__ == "__main__":
    sys.exit(main())
