"""Two copies of each model on a simulated device of 32 GB under several policies: the largest batch of each.

All policies see the same captured steps. Persistent state and one batch of each copy are taken from the memory first.
`banker` places every piece in advance; `dynamic` lets our order of operations ask one best-fit pool; `waterwave` and
`waterwave-s` are the published system on two streams (`benchmarks/baselines/waterwave.py` says how its text is
read), whose pool is our own allocator with all of that memory as one segment. "alone" counts live bytes. A batch fits if
every request of three steps of both copies is served. Under fragmentation one may fit though a smaller one does not:
"batch" is the best of the sizes looked at, 32 of them spread up to the largest batch alone, and the next four do not fit.
The published ratio of waterwave stands in the row of the split size that was best there; where the paper names none, in
that of the best one here.

``--figure`` draws what figure 8 of the paper does: largest batch and speed over split size or number of groups, a panel
for each model. Speed, against taking turns, is a model; it counts steps with batches of different sizes.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import waterflow as wf
from benchmarks import baselines, published, report
from benchmarks.copies import sizes_of
from benchmarks.tables import MODELS
from benchmarks.zoo import FULL
from waterflow.training import batch_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COPIES = 2
SPLITS = (1, 2, 4, 6, 8, 12)  # GiB, as in figure 8 of the paper
NODE_GROUPS = (4, 8, 16)  # instead, for models that the paper cuts by number
BY_NUMBER = {"tacotron2"}
WATERWAVE, COARSE = "#EE6677", "#AA3377"
LINES = (  # policies without a number to sweep: in the table, in the picture
    ("banker", "banker (ours)", "#4477AA", "-"), ("waterwave-s", "waterwave-s", COARSE, "--"),
    ("dynamic", "dynamic", "#888888", "-."),
)  # fmt: skip


def measure(name: str, memory: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    torch.set_num_threads(1)
    sizes = sizes_of(name)
    alone = batch_size.largest_batch(sizes, memory=memory).size
    table = {32: published.V100_32GB, 16: published.P100_16GB}.get(memory // 2**30, {})
    known = table.get(name)
    rows = [{"model": name, "policy": "alone", "batch": alone, "ratio": 1.0, "published batch": known and known.alone}]

    def row(policy: baselines.Policy) -> dict[str, Any]:
        try:
            found = baselines.largest_batch_under(policy, sizes, memory=memory, copies=COPIES, most=alone)
        except wf.MemoryLimitError:
            return {"model": name, "policy": policy.name, "batch": 0, "ratio": 0.0}
        outcome = found.outcome
        return {
            "model": name, "policy": policy.name, "batch": found.size, "ratio": found.size / alone,
            "peak / limit": outcome.peak / memory, "waits for memory": outcome.waits, "speed": outcome.speed,
            "overlap": outcome.overlap, "sizes looked at": len(found.looked),
        }  # fmt: skip

    rows.append(row(baselines.Banker()))
    if name in BY_NUMBER:
        split = [row(baselines.Waterwave(groups=n)) | {"groups": n} for n in NODE_GROUPS]
    else:
        split = [row(baselines.Waterwave(gib * 2**30)) | {"split, GiB": gib} for gib in SPLITS]
    coarse = row(baselines.WaterwaveS())
    if known is not None:
        there = published.V100_BEST_SPLIT.get(name)
        best = next((made for made in split if made.get("split, GiB") == there), None) if there else None
        best = best or max(split, key=lambda made: made["batch"])
        best |= {"published batch": known.waterwave, "published ratio": known.waterwave / known.alone}
        coarse |= {"published batch": known.waterwave_s, "published ratio": known.waterwave_s / known.alone}
    return [*rows, *split, coarse, row(baselines.Dynamic())]


def draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """A panel for each model: ratios above, speeds below, as a PNG."""
    from matplotlib.figure import Figure  # slow to import

    names = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.6 * lines + 0.9), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(2 * lines, columns, squeeze=False, height_ratios=[2.4, 1.0] * lines)
    fastest = max(row.get("speed") or 1.0 for row in rows)
    for place in range(lines * columns):
        above, below = axes[place // columns * 2][place % columns], axes[place // columns * 2 + 1][place % columns]
        if place < len(names):
            _draw_model(above, below, [row for row in rows if row["model"] == names[place]])
            below.set_ylim(0.99, fastest + 0.01)
        else:
            above.remove(), below.remove()
    shown = axes[0][0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=2 * columns + 1, frameon=False, fontsize=10)
    figure.savefig(path, format="png")


def _draw_model(above: Axes, below: Axes, rows: list[dict[str, Any]]) -> None:
    """Waterwave over what it cuts by; what has no such number, as lines across."""
    by_policy = {row["policy"]: row for row in rows}
    by = "groups" if any("groups" in row for row in rows) else "split, GiB"
    swept = [row for row in rows if by in row]
    at = range(len(swept))
    above.axhline(1, color="#333333", lw=1, label="alone")
    for policy, label, color, style in LINES:
        above.axhline(by_policy[policy]["ratio"], color=color, lw=1.8, ls=style, label=label)
        speed = by_policy[policy].get("speed")
        if speed is not None:
            below.axhline(speed, color=color, lw=1.8, ls=style)
    above.plot(at, [row["ratio"] for row in swept], "o-", color=WATERWAVE, label="waterwave")
    below.plot(at, [row.get("speed") or float("nan") for row in swept], "o-", color=WATERWAVE)
    for row in rows:
        if "published ratio" in row:
            place = swept.index(row) if row in swept else len(swept) - 0.5
            color, name = (WATERWAVE, "waterwave, its best") if row in swept else (COARSE, "waterwave-s")
            above.plot(
                [place], [row["published ratio"]], "*", ms=13, mec="#333333", mew=0.7, color=color, clip_on=False,
                zorder=3, label=f"published: {name}",
            )  # fmt: skip
    above.set_title(f"{rows[0]['model']}: {rows[0]['batch']} alone", loc="left", fontsize=11)
    above.set(ylabel="largest batch / alone", ylim=(0.3, 1.05), xlim=(-0.4, len(swept) - 0.4))
    below.set(ylabel="speed (a model)", xlim=(-0.4, len(swept) - 0.4))
    below.axhline(1, color="#333333", lw=1)
    below.set_xlabel("groups of each step" if by == "groups" else "split size, GiB")
    above.set_xticks(at, [])
    below.set_xticks(at, [str(row[by]) for row in swept])
    for ax in (above, below):
        ax.grid(axis="y", color="#DDDDDD", lw=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(FULL))
    parser.add_argument("--gib", type=int, default=32, help="memory of the device")
    parser.add_argument("--figure", type=Path, help="draw a PNG; with --save to benchmarks/results/policies.png")
    arguments = parser.parse_args()
    look = functools.partial(measure, memory=arguments.gib * 2**30)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        longest_first = sorted(arguments.models, key=lambda name: name not in BY_NUMBER)
        found = dict(zip(longest_first, pool.map(look, longest_first, chunksize=1)))
    rows = [row for name in arguments.models for row in found[name]]
    path = arguments.figure or (report.RESULTS / "policies.png" if arguments.save else None)
    if path is not None:
        draw(path, rows, f"Two copies in {arguments.gib} GiB, simulated: largest batch of each, and speed against turns")
    note = f"{COPIES} copies in {arguments.gib} * 2**30 bytes; published: {published.SOURCE}; speed and overlap are a model"
    return report.finish("policies", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
