"""What jobs hold, with updates that come early or at the step's end.

Heights are those of placed memory, of captured steps that never run, at a usual batch. "held" is what N jobs hold all
the time for their batches. The largest batch of N copies is that in 32 * 2**30 bytes, two lanes on one arena. Samples
of all copies per millisecond are those of the simulated run: a model, whose time is the bytes that operations move, at
900 GB/s on each lane; batches come over a bus of 12 GB/s.
"""

from __future__ import annotations

import sys
from typing import Any

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL
from waterflow.training import batch_size

MEMORY = 32 * 2**30
STEPS = 6
BATCHES = {"resnet50": 64, "bert": 32, "gpt2": 8, "dlrm": 512, "lstm": 20, "mlp_dropout": 64}
WAYS = {"before": False, "early updates": True}


def measure(name: str, batch: int, largest: bool) -> list[dict[str, Any]]:
    """One model, each way."""
    rows = []
    for way, early in WAYS.items():
        sizes = sizes_of(name, early)
        step = sizes.at(batch)
        row: dict[str, Any] = {
            "model": f"{name}, batch {batch}", "way": way, "height MiB": step.offsets.height / 2**20,
            "live MiB": step.resident / 2**20, "persistent MiB": step.persistent / 2**20,
        }  # fmt: skip
        row |= {f"held for {copies} batches MiB": copies * step.batch / 2**20 for copies in (2, 4)}
        for copies in (2, 4) if largest else ():
            found = batch_size.largest_batch(sizes, memory=MEMORY, copies=copies, steps=STEPS)
            assert found.run is not None and found.run.peak <= MEMORY
            row[f"largest of {copies}"] = found.size
            row[f"samples/ms of {copies}"] = sum(found.run.steps) * found.size / (found.run.makespan / 1e6)
        rows.append(row)
    return rows


def sizes_of(name: str, early: bool) -> batch_size.StepSizes:
    """A model of the zoo at any batch size."""
    zoo = FULL[name]
    model = zoo.build()
    optimizer = zoo.optimizer(model.parameters())
    step = wf.Step(model, step=zoo.step, optimizer=optimizer, name=name, early_updates=early)
    return batch_size.StepSizes(step, zoo.batch(8, None))


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(BATCHES), choices=list(FULL))
    parser.add_argument("--batch", type=int, help="instead of each model's usual one")
    parser.add_argument("--heights", action="store_true", help="no search for the largest batch")
    arguments = parser.parse_args()
    rows = [
        row for name in arguments.models
        for row in measure(name, arguments.batch or BATCHES.get(name, 8), not arguments.heights)
    ]  # fmt: skip
    return report.finish("reductions", arguments, rows, "32 * 2**30 bytes; samples/ms are a model (bytes moved as the clock)")


if __name__ == "__main__":
    sys.exit(main())
