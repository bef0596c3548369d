"""Two copies of a model on a simulated device of 32 GB under several policies: the largest batch of each.

All policies see the same captured steps. Persistent state and one batch of each copy are taken from the memory first.
`banker` places every piece in advance; `dynamic` lets our order of operations ask one best-fit pool; `waterwave` and
`waterwave-s` are the published system on two streams (`waterflow/planner/policies/waterwave.py` says how its text is
read), whose pool is our own allocator with all of that memory as one segment. "alone" counts live bytes. A batch fits if
every request of three steps of both copies is served. Under fragmentation one may fit though a smaller one does not:
"batch" is the best of the sizes looked at, 32 of them spread up to the largest batch alone, and the next four do not fit.
The published ratio of waterwave stands in the row of its best split size.
"""

from __future__ import annotations

import sys
from typing import Any

import waterflow as wf
from benchmarks import published, report
from benchmarks.copies import sizes_of
from benchmarks.zoo import FULL
from waterflow import batch_size, planner

COPIES = 2
SPLITS = (1, 2, 4, 6, 8, 12)  # GiB, as in figure 8 of the paper
NODE_GROUPS = (4, 8, 16)  # instead, for models that the paper cuts by number
BY_NUMBER = {"tacotron2"}


def measure(name: str, memory: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    sizes = sizes_of(name)
    alone = batch_size.largest_batch(sizes, memory=memory).size
    table = {32: published.V100_32GB, 16: published.P100_16GB}.get(memory // 2**30, {})
    known = table.get(name)
    rows = [{"model": name, "policy": "alone", "batch": alone, "ratio": 1.0, "published batch": known and known.alone}]

    def row(policy: planner.Policy) -> dict[str, Any]:
        try:
            found = planner.largest_batch_under(policy, sizes, memory=memory, copies=COPIES, most=alone)
        except wf.MemoryLimitError:
            return {"model": name, "policy": policy.name, "batch": 0, "ratio": 0.0}
        outcome = found.outcome
        return {
            "model": name, "policy": policy.name, "batch": found.size, "ratio": found.size / alone,
            "peak / limit": outcome.peak / memory, "waits for memory": outcome.waits, "speed": outcome.speed,
            "overlap": outcome.overlap, "sizes looked at": len(found.looked),
        }  # fmt: skip

    rows.append(row(planner.Banker()))
    cuts = [planner.Waterwave(groups=n) for n in NODE_GROUPS] if name in BY_NUMBER else [
        planner.Waterwave(split * 2**30) for split in SPLITS
    ]  # fmt: skip
    split = [row(policy) for policy in cuts]
    coarse = row(planner.WaterwaveS())
    if known is not None:
        best = max(split, key=lambda made: made["batch"])
        best |= {"published batch": known.waterwave, "published ratio": known.waterwave / known.alone}
        coarse |= {"published batch": known.waterwave_s, "published ratio": known.waterwave_s / known.alone}
    return [*rows, *split, coarse, row(planner.Dynamic())]


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=["resnet50"], choices=list(FULL))
    parser.add_argument("--gib", type=int, default=32, help="memory of the device")
    arguments = parser.parse_args()
    rows = [row for name in arguments.models for row in measure(name, arguments.gib * 2**30)]
    note = f"{COPIES} copies in {arguments.gib} * 2**30 bytes; published: {published.SOURCE}; speed and overlap are a model"
    return report.finish("policies", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
