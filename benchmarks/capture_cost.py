"""What a capture costs its user: the first step of each of the demo's networks, and what is asked before each later one.

First steps have shapes that the process has not seen, with one audit each, from the call of a step to its result. Behind a median
stands how it is made up: the parts of first steps that were profiled, in proportion. What is asked before each step is the form
of its batch, the settings of the process, and whether anything that the step was made from has changed.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from benchmarks import report
from examples import demo
from waterflow import step

NETS = [(kind, depth) for kind in ("mlp", "cnn") for depth in (1, 2, 3)]
MOST_FIRST_STEP = 60e-3  # seconds, in the median of all networks
MOST_ASKED = {"20 modules": 10e-6, "ResNet-50": 100e-6}
OPTIMIZERS = ("SGD", "Adam", "AdamW")
ASKED_AT_ONCE = 200
# The functions that the parts of a first step lie in, by file and name; the later ones are parts of earlier ones.
PARTS = {
    "key": [("step_key.py", "structure_key")], "trace": [("trace.py", "_trace")],
    "judge": [("purity.py", "_check"), ("purity.py", "_look_back")], "passes": [("cleanup.py", "clean_up"),
    ("gradient_memory.py", "sum_in_place"), ("gradient_memory.py", "update_early")],
    "lowering and plan": [("capture_cache.py", "assemble")],
    "layouts": [("fake_rules.py", "surprises")], "binding": [("binding.py", "bind")], "audit": [("audit.py", "compare")],
    "step": [("step.py", "_submit_captured")],
}  # fmt: skip

_unseen = itertools.count(1)


def first_step(kind: str, depth: int) -> tuple[float, dict[str, float]]:
    """Seconds of a first step of a new shape, and the same of its parts, where another one is profiled."""
    return report.seconds(_ready(kind, depth)), _parts_of(_ready(kind, depth))


def _ready(kind: str, depth: int) -> Any:
    """A call of a step of a network with a width and a batch as the demo's, which nobody had together."""
    number = next(_unseen)
    width, batch_size = 8 + number % 25, 16 + number % 49
    model = demo.make_model(kind, depth, width, dropout=0.1, seed=number)
    choice = demo.Choice(kind, depth, width, 0.1, OPTIMIZERS[number % 3], 1e-3, batch_size)
    numbers = torch.Generator().manual_seed(number)
    made = step.Step(model, loss=F.cross_entropy, optimizer=demo.make_optimizer(choice, model.parameters()), generator=numbers)
    batch = (torch.randn(batch_size, 1, demo.SIDE, demo.SIDE), torch.randint(0, demo.CLASSES, (batch_size,)))

    def call() -> None:
        made(batch)
        assert made.opaque_reason is None, made.opaque_reason

    return call


def _parts_of(call: Any) -> dict[str, float]:
    profile = cProfile.Profile()
    profile.runcall(call)
    found = {(os.path.basename(file), name): row[3] for (file, _, name), row in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    whole = found["capture_cost.py", "call"]
    return {part: sum(found.get(one, 0.0) for one in functions) / whole for part, functions in PARTS.items()}


def asked_before(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], repeats: int) -> list[float]:
    """Seconds of what is asked before each step, in the mean of so many."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    made = step.Step(model, loss=F.cross_entropy, optimizer=optimizer)
    for _ in range(3):
        made(batch)
    assert made.opaque_reason is None, made.opaque_reason

    def ask() -> None:
        for _ in range(ASKED_AT_ONCE):
            leaves, form, key = step.flatten(batch)
            made._bound_steps.find(leaves, form, key, True)

    return [report.seconds(ask) / ASKED_AT_ONCE for _ in range(repeats)]


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]]:
    """Those before whose steps it is measured what is asked, with a batch each."""
    layers = [layer for _ in range(9) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return {
        "20 modules": (nn.Sequential(*layers, nn.Linear(16, 10)), (torch.randn(4, 16), torch.arange(4))),
        "ResNet-50": (torchvision.models.resnet50(), (torch.randn(2, 3, 64, 64), torch.arange(2))),
    }


def _row(what: str, taken: list[float], most: float | None, unit: float, parts: str = "") -> dict[str, Any]:
    middle = report.median(taken)
    spread = report.spread([seconds / unit for seconds in taken])
    row = {"what": what, "median": middle / unit, "spread": spread, "parts": parts}
    return row if most is None else {**row, "at most": most / unit, "holds": middle <= most}


def measure(repeats: int, nets: Sequence[tuple[str, int]], asked: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each network and all of them together, in milliseconds; and for each model, in microseconds."""
    before = os.environ.get("WATERFLOW_AUDIT")
    os.environ["WATERFLOW_AUDIT"] = "first"
    try:
        for net in nets:  # torch's own first traces
            first_step(*net)
        taken: dict[tuple[str, int], list[float]] = {net: [] for net in nets}
        shares: dict[tuple[str, int], list[dict[str, float]]] = {net: [] for net in nets}
        for _ in range(repeats):
            for net in nets:
                seconds, parts = first_step(*net)
                taken[net].append(seconds)
                shares[net].append(parts)
    finally:
        os.environ.pop("WATERFLOW_AUDIT")
        if before is not None:
            os.environ["WATERFLOW_AUDIT"] = before
    rows = []
    for net in nets:
        middle = report.median(taken[net])
        told = {part: 1e3 * middle * report.median([one[part] for one in shares[net]]) for part in PARTS}
        parts_told = ", ".join(f"{part} {value:.1f}" for part, value in told.items())
        rows.append(_row(f"first step, {net[0]} of depth {net[1]}, ms", taken[net], None, 1e-3, parts_told))
    rows.append(_row("first step, all of them, ms", [v for one in taken.values() for v in one], MOST_FIRST_STEP, 1e-3))
    given = models()
    for name in asked:
        rows.append(_row(f"asked before a step, {name}, us", asked_before(*given[name], repeats), MOST_ASKED[name], 1e-6))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Command line; 1 where a limit does not hold."""
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=15)
    parser.add_argument("--nets", nargs="*", default=[f"{kind}{depth}" for kind, depth in NETS], help="of the demo")
    parser.add_argument("--asked", nargs="*", default=list(MOST_ASKED), choices=list(MOST_ASKED), help="models")
    parser.add_argument("--threads", type=int, default=1, help="of an operation")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    nets = [net for net in NETS if f"{net[0]}{net[1]}" in arguments.nets]
    rows = measure(arguments.repeats, nets, arguments.asked)
    note = "trace contains judge; parts are shares of profiled first steps, of other new shapes, in ms"
    return report.finish("capture_cost", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
