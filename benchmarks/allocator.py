"""The multi-stream allocator: logs of real steps against malloc and free, many holes against none, random runs.

A log is what one eager training step asks torch for. Replays and malloc run in turns in one process and one thread, and
neither touches the memory. "holes": one request and release with 65,536 free holes of its stream, against the same with
none. Random runs check the order (simulated) or the content (CPU) of what every block's streams read and write.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.zoo import FULL
from tests.native import FuzzSetup, RequestLog, SimulatedDevice, StreamAllocator, fuzz_table, record_requests, run_fuzz

MiB = 1 << 20
BATCHES = {"resnet50": 16, "bert": 4}
HOLES = 65_536


def record(name: str) -> RequestLog:
    """What the second training step of a model asks for."""
    zoo = FULL[name]
    model = zoo.build()
    optimizer = zoo.optimizer(model.parameters())
    batch = zoo.batch(BATCHES[name], torch.Generator().manual_seed(0))

    def step() -> None:
        zoo.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    _, log = record_requests(step)
    return log


def replayed(name: str, repeats: int) -> dict[str, Any]:
    """One log, by both."""
    log = record(name)
    times = max(1, 400_000 // log.requests)
    allocator = StreamAllocator(SimulatedDevice(1 << 40))
    stream = allocator.add_stream()

    def ours() -> float:
        return log.replay(allocator, times, [stream]) / log.requests * 1e9

    def malloc() -> float:
        return log.replay_malloc(times) / log.requests * 1e9

    ours(), malloc()  # both have their memory now
    measured = report.interleaved({"waterflow": ours, "malloc": malloc}, repeats)
    allocator.check()
    ratio = report.ratio_of(measured["waterflow"], measured["malloc"])
    return {
        "what": f"{name}, batch {BATCHES[name]}, {log.requests} requests, {log.peak / MiB:.0f} MiB",
        "waterflow": f"{report.median(measured['waterflow']):.1f} ns ({report.spread(measured['waterflow'])})",
        "against": f"malloc, free: {report.median(measured['malloc']):.1f} ns ({report.spread(measured['malloc'])})",
        "ratio": ratio, "at most": 1.0, "holds": ratio <= 1.0,
    }  # fmt: skip


def pair(sizes: list[int], holes: int) -> Callable[[], float]:
    """One request and its release, beside so many holes of many sizes; nanoseconds."""
    allocator = StreamAllocator(SimulatedDevice(1 << 40), medium_segment=1 << 30, small_segment=1 << 30)
    stream = allocator.add_stream()
    draw = random.Random(0)
    blocks = [allocator.allocate(64 * draw.randrange(1, 4096), stream) for _ in range(2 * holes)]
    for address in blocks[::2]:
        allocator.release(address)
    allocator.check()
    log = RequestLog([row for i, size in enumerate(sizes) for row in ([0, i, 0, size], [1, i, 0, 0])])
    return lambda: log.replay(allocator, 400_000 // len(sizes), [stream]) / len(sizes) * 1e9


def among_holes(what: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """A pair with holes, against one without."""
    measured = report.interleaved({"holes": pair(sizes, HOLES), "none": pair(sizes, 0)}, repeats)
    ratio = report.ratio_of(measured["holes"], measured["none"])
    return {
        "what": f"{what}, {HOLES} holes",
        "waterflow": f"{report.median(measured['holes']):.1f} ns ({report.spread(measured['holes'])})",
        "against": f"no holes: {report.median(measured['none']):.1f} ns ({report.spread(measured['none'])})",
        "ratio": ratio, "at most": 2.0, "holds": ratio <= 2.0,
    }  # fmt: skip


def random_runs(device: str, operations: int) -> dict[str, Any]:
    """Two to eight streams, by one thread and by one for each stream."""
    tiers: dict[str, int] = {}
    done = requests = checks = waits = 0
    errors = []
    for streams in (2, 4, 8):
        for threads in (1, streams):
            setup = FuzzSetup(
                simulated=device == "simulated", streams=streams, threads=threads, seed=streams,
                stall_share=0.01, stall_us=200,
            )  # fmt: skip
            found = run_fuzz(fuzz_table(setup, operations // 6, seed=streams), setup)
            done, requests, checks = done + found.operations, requests + found.requests, checks + found.checks
            waits += found.waits
            errors += [found.error] if found.error else []
            for tier, count in found.tiers.items():
                tiers[tier] = tiers.get(tier, 0) + count
    shares = {tier: count / requests for tier, count in tiers.items()}
    return {
        "what": f"random, {device}: {done} operations, {checks} checks, {waits} waits",
        "waterflow": ", ".join(f"{tier} {share:.1%}" for tier, share in shares.items()),
        "against": "; ".join(errors) or "none wrong; every tier 1 %",
        "holds": not errors and min(shares.values()) >= 0.01,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--operations", type=int, default=60_000, help="of the random runs, on each device")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [among_holes(f"{size} bytes", [size], arguments.repeats) for size in (512, 100_000)]
    # So many sizes that few are found where their last release put them: the search itself.
    rows.append(among_holes("2,000 sizes in turn", [64 * i for i in range(1, 2001)], arguments.repeats))
    rows += [replayed(name, arguments.repeats) for name in arguments.models]
    rows += [random_runs(device, arguments.operations) for device in ("simulated", "cpu")]
    return report.finish("allocator", arguments, rows, "nanoseconds for one request with its release; medians (spread)")


if __name__ == "__main__":
    sys.exit(main())
