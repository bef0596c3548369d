"""The published tables, simulated: largest batches of jobs that train together on one GPU, and how far that is from alone.

Two copies of six models on a V100 with 32 GB and a P100 with 16 GB; three and four ResNet-50 and three mixed pairs on the
V100. Memory is what the card reports, less what a CUDA context takes (``waterflow.planner.gpus``). Requests come from
captures of the real models with their customary optimizers; operations are issued one by one on two lanes that share an
arena, with the placement that plans use and every access checked; each job holds its state and one batch on the device.
Alone, a job is counted by its live bytes. "limit" is (M - N W) / (M - W), with memory M, N jobs and what each of them
holds all the time, W: parameters, buffers, optimizer state and the largest batch alone. "points" is the distance to it.

Overlap (share of the time in which both lanes are busy) and speed (against taking turns) are a model: the card's rates,
which lanes share. "overlap at most" bounds it for any schedule (``most_overlap``). Batches are the smaller the more there
is of a sample: text has 128 tokens, speech 100 tokens and 200 frames here, so batches of BERT and Tacotron2 compare by
their ratios alone.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks import published, report
from benchmarks.copies import limit_for, sizes_of
from waterflow.training import batch_size

CNNS = ("resnet50", "resnet152", "inception_v3", "nasnet_mobile")
MODELS = (*CNNS, "bert", "tacotron2")
CARDS = {"v100-32g": published.V100_32GB, "p100-16g": published.P100_16GB}
AT_MOST = {  # points behind the limit
    "v100-32g": {**dict.fromkeys(CNNS, 1.0), "bert": 1.5, "tacotron2": 1.5},
    "p100-16g": {**dict.fromkeys(CNNS, 1.5), "bert": 2.5, "tacotron2": 1.5},
}
MORE_RESNET50 = {3: 0.965, 4: 0.95}
MIXED = {
    "resnet50": 128, "resnet152": 64, "inception_v3": 96, "vit": 64, "unet": 16, "bert": 48, "gpt2": 16, "dlrm": 2048,
}  # fmt: skip
_MOMENTS = 1000


def two_copies(name: str, sizes: batch_size.StepSizes) -> list[dict[str, Any]]:
    """Alone and in pairs, on both cards."""
    rows = []
    for card, table in CARDS.items():
        gpu = batch_size.gpu(card)
        alone = batch_size.largest_batch(sizes, memory=gpu.usable)
        row = _together(name, sizes, alone, gpu, 2) | {"published": table[name].waterwave / table[name].alone}
        row |= {"at most": AT_MOST[card][name], "published alone": table[name].alone}
        row["holds"] = row["points"] <= row["at most"] and row["ratio"] > row["published"]
        if card == "v100-32g" and name.startswith("resnet"):
            row["holds"] &= abs(alone.size / table[name].alone - 1) <= 0.1
        rows.append(row)
    return rows


def _together(
    name: str, sizes: batch_size.StepSizes, alone: batch_size.LargestBatch, gpu: batch_size.GPU, copies: int
) -> dict[str, Any]:
    clock = batch_size.Clock(gpu)
    found = batch_size.largest_batch(sizes, memory=gpu.usable, copies=copies, clock=clock)
    less = batch_size.run_copies(sizes, round(0.9 * found.size), memory=gpu.usable, copies=copies, clock=clock)
    run = found.run
    assert run is not None and run.peak <= gpu.usable
    room = gpu.usable - copies * found.step.held
    ratio, limit = found.size / alone.size, limit_for(alone, copies)
    return {
        "model": f"{name} x {copies}", "card": gpu.name, "alone": alone.size, "each": found.size, "ratio": ratio,
        "limit": limit, "points": 100 * (limit - ratio), "overlap": run.overlap, "speed": run.speed,
        "overlap at 90 %": less.overlap, "speed at 90 %": less.speed,
        "overlap at most": most_overlap(found.step, room, clock),
        "at most, 90 %": most_overlap(sizes.at(round(0.9 * found.size)), room, clock),
    }  # fmt: skip


def most_overlap(step: batch_size.SizedStep, room: int, clock: batch_size.Clock) -> float:
    """A bound on the overlap of two jobs of this step in ``room`` bytes, whatever the schedule.

    Moments of one step overlap with moments of the other whose live bytes fit beside theirs. Heights in ascending order,
    h(t) over the share t of a step's time: a share x of both can overlap only if h(t) + h(x - t) fits for all t up to x.
    What overlaps takes at most twice as long, where the lanes share all that they use: then 2x of 2 are overlapped.
    """
    times = np.array([clock.work(cost)[0] for cost in step.footprint.costs], dtype=float)
    live = np.array(step.offsets.resident, dtype=float)
    order = np.argsort(live)
    until = np.cumsum(times[order]) / times.sum()
    heights = live[order][np.minimum(np.searchsorted(until, np.linspace(0, 1, _MOMENTS + 1)), len(live) - 1)]
    low, high = 0, _MOMENTS
    while low < high:
        middle = (low + high + 1) // 2
        part = heights[: middle + 1]
        low, high = (middle, high) if bool((part + part[::-1] <= room).all()) else (low, middle - 1)
    return low / _MOMENTS


def eight_jobs() -> dict[str, Any]:
    """Eight mixed jobs, captured before the clock starts: places for all their memory, sets that fit, a simulated run."""
    jobs = [(name, sizes_of(name).captured(size)) for name, size in MIXED.items()]
    gpu = batch_size.gpu("v100-32g")
    start = time.perf_counter()
    needs = [batch_size.Need(name, step.held, step.offsets.height) for name, step in jobs]
    turns = batch_size.feasible(needs, gpu.usable).turns
    together = [jobs[i][1].job(jobs[i][0], 3) for i in turns[0]]
    batch_size.simulate(together, memory=gpu.usable, clock=batch_size.Clock(gpu))
    seconds = time.perf_counter() - start
    return {
        "model": f"eight mixed jobs, {len(turns[0])} at once: seconds after capture", "card": gpu.name, "each": seconds,
        "at most": 2.0, "holds": seconds < 2.0,
    }  # fmt: skip


def more_copies(name: str, sizes: batch_size.StepSizes) -> list[dict[str, Any]]:
    """Three and four of one model on the larger card."""
    gpu = batch_size.gpu("v100-32g")
    alone = batch_size.largest_batch(sizes, memory=gpu.usable)
    known = published.V100_32GB[name].alone
    rows = []
    for copies, goal in MORE_RESNET50.items():
        row = _together(name, sizes, alone, gpu, copies)
        row |= {"published": published.V100_MORE_RESNET50[copies] / known, "at least": goal}
        rows.append(row | {"holds": row["ratio"] >= goal})
    return rows


def pairs(sizes: dict[str, batch_size.StepSizes]) -> list[dict[str, Any]]:
    """Two different models side by side, each at the same share of its largest batch alone."""
    gpu = batch_size.gpu("v100-32g")
    rows = []
    for names, batches in published.V100_MIXED.items():
        if not set(names) <= set(sizes):
            continue
        found = batch_size.largest_mix([sizes[name] for name in names], memory=gpu.usable, clock=batch_size.Clock(gpu))
        for name, step, alone, limit, batch in zip(names, found.steps, found.alone, found.limits, batches):
            ratio = step.size / alone.size
            rows.append({
                "model": f"{name} in {' + '.join(names)}", "card": gpu.name, "alone": alone.size, "each": step.size,
                "ratio": ratio, "limit": limit, "points": 100 * (limit - ratio), "overlap": found.run.overlap,
                "speed": found.run.speed, "published": batch / published.V100_32GB[name].alone,
                "holds": ratio > batch / published.V100_32GB[name].alone,
            })  # fmt: skip
    return rows


def part(names: tuple[str, ...]) -> tuple[list[dict[str, Any]], float]:
    """What one process looks at: its models, more copies of ResNet-50, and pairs of its models; and processor seconds."""
    torch.set_num_threads(1)
    made = {name: sizes_of(name) for name in names}
    rows = [row for name, sizes in made.items() for row in two_copies(name, sizes)]
    if "resnet50" in made:
        rows += more_copies("resnet50", made["resnet50"])
    return rows + pairs(made), time.process_time()


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    started = time.perf_counter()
    mixed = {name for names in published.V100_MIXED for name in names}
    parts = [tuple(n for n in arguments.models if n in mixed), tuple(n for n in arguments.models if n not in mixed)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        done = pool.map(part, [names for names in parts if names], chunksize=1)
    rows = [row for made, _ in done for row in made]
    cnns = [row for row in rows if "x 2" in row["model"] and row["model"].split()[0] in CNNS]
    for what in ("overlap", "overlap at 90 %"):
        rows += [{"model": f"lowest {what} of CNNs", what: min(row[what] for row in cnns)}] if cnns else []
    seconds = time.perf_counter() - started
    torch.set_num_threads(1)
    rows.append(eight_jobs())
    rows.append({"model": "processor time of the longer of two processes, seconds", "each": max(used for _, used in done)})
    rows.append({"model": "all of it, seconds", "each": seconds, "at most": 300.0, "holds": seconds < 300})
    return report.finish("tables", arguments, rows, f"published: {published.SOURCE}; overlap and speed are a model")


if __name__ == "__main__":
    sys.exit(main())
