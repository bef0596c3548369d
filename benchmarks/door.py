"""The smallest step: processor time of the calling thread for each call, alone, in an engine and in a job, beside a plain loop.

One linear layer and plain SGD: nearly all of it is what stands around the operations. ``perceptron`` (64-128-64-10, batch 64, AdamW)
compares steps that people train, in wall time. One intra-op thread; each figure is the median of interleaved chunks.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import waterflow as wf
from benchmarks import jax_steps, report

STEPS = 1000
LIMITS = {"a step alone": 18.0, "a step in an engine": 22.0}  # us


def smallest() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """A layer of 4 x 2."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True), (torch.randn(4, 4), torch.randn(4, 2))


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """64-128-64-10, batch 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), (torch.randn(64, 64), torch.randn(64, 10))


Made = tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]


def by_hand(make: Callable[[], Made]) -> Callable[[], None]:
    """The plain loop."""
    model, optimizer, (x, y) = make()

    def run() -> None:
        for _ in range(STEPS):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def stepped(make: Callable[[], Made], loss: Any = F.mse_loss, engine: wf.Engine | None = None) -> Callable[[], None]:
    """Calls of a Step."""
    model, optimizer, batch = make()
    step = wf.Step(model, loss=loss, optimizer=optimizer, engine=engine, audit=10**9)

    def run() -> None:
        for _ in range(STEPS):
            step(batch)

    return run


def asked(output: Tensor, target: Tensor) -> Tensor:
    """A loss that no graph can hold, as it asks for a value."""
    loss = F.mse_loss(output, target)
    return loss * 1.0 if loss.item() > -1.0 else loss


def asked_by_hand(make: Callable[[], Made]) -> Callable[[], None]:
    """The plain loop with it."""
    model, optimizer, (x, y) = make()

    def run() -> None:
        for _ in range(STEPS):
            asked(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def floor(folder: str) -> Callable[[int], float]:
    """A function that trains the perceptron for so many steps in C++ (``floor.cpp``, built in ``folder``) and returns the loss."""
    built, torchs = f"{folder}/floor.so", Path(torch.__file__).parent / "lib"
    # Not -ffast-math: a library that is built by it makes the whole process that loads it take denormal numbers for zero.
    command = ["c++", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-o", built]
    link = [f"-L{torchs}", f"-Wl,-rpath,{torchs}", "-ltorch_cpu"]
    subprocess.run([*command, str(Path(__file__).with_name("floor.cpp")), *link], check=True)
    train = ctypes.CDLL(built).train
    train.restype = ctypes.c_double
    model, _, batch = perceptron()
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def run(steps: int) -> float:
        given = (ctypes.c_void_p(one.data_ptr()) for one in (parameters, *batch))
        return float(train(steps, *given, ctypes.c_float(1e-3)))

    return run


def trained(make: Callable[[], Made]) -> Callable[[], None]:
    """A job over a list of batches."""
    _, _, batch = make()

    def run() -> None:
        result = wf.train(
            wf.Job("job", lambda: make()[0], [batch] * STEPS, lambda p: torch.optim.AdamW(p, lr=1e-3), loss=F.mse_loss), lanes=1
        )
        assert result[0].status == "completed"

    return run


def eight_jobs() -> float:
    """Microseconds for each job's step of eight perceptrons over lists of batches, with their starts."""
    _, _, batch = perceptron()
    jobs = [
        wf.Job(
            f"job {n}",
            lambda: perceptron()[0],
            [batch] * jax_steps.STEPS,
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            loss=F.mse_loss,
        )
        for n in range(jax_steps.JOBS)
    ]
    began = time.perf_counter()
    assert all(result.status == "completed" for result in wf.train(jobs))
    return (time.perf_counter() - began) / (jax_steps.JOBS * jax_steps.STEPS) * 1e6


def in_jax(python: str) -> dict[str, list[float]]:
    """The same in JAX, by way."""
    done = subprocess.run([python, jax_steps.__file__], capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def against_jax(python: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of eight jobs."""
    eight_jobs()  # captures
    ours, theirs = list[float](), dict[str, list[float]]()
    for _ in range(repeats):
        ours.append(eight_jobs())
        for way, us in in_jax(python).items():
            theirs.setdefault(way, []).append(report.median(us))
    best = min(theirs, key=lambda way: report.median(theirs[way]))
    ratio = report.ratio_of(ours, theirs[best])
    told = [{"what": f"eight perceptrons: {way}", "us a step": round(report.median(us), 1), "spread": report.spread(us)}
            for way, us in {"wf.train": ours, **theirs}.items()]  # fmt: skip
    return [*told, {"what": f"wf.train over {best}", "ratio": round(ratio, 2), "at most": 1.5, "holds": ratio <= 1.5}]


def in_threads(count: int) -> Callable[[], float]:
    """Steps a second of as many threads, each with a step of its own."""
    runs = [stepped(smallest) for _ in range(count)]
    for run in runs:
        run()

    def measured() -> float:
        threads = [threading.Thread(target=run) for run in runs]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * STEPS / (time.perf_counter() - began)

    return measured


def measure(variants: dict[str, Callable[[], object]], clock: Callable[[], float], repeats: int) -> dict[str, list[float]]:
    """Microseconds a step."""

    def timed(run: Callable[[], object]) -> float:
        began = clock()
        run()
        return (clock() - began) / STEPS * 1e6

    for run in variants.values():
        run()  # captures, profiles and first audits
    return report.interleaved({name: partial(timed, run) for name, run in variants.items()}, repeats)


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--jax", metavar="PYTHON", help="of an environment with jax and optax: only eight jobs against those")
    arguments = parser.parse_args()
    if arguments.jax:
        return report.finish(
            "door_jax", arguments, against_jax(arguments.jax, arguments.repeats), "wall time of all, over all steps"
        )
    torch.set_num_threads(1)
    with wf.Engine("cpu", memory="1GiB", lanes=1) as engine:
        small = measure(
            {
                "a loop by hand": by_hand(smallest),
                "a step alone": stepped(smallest),
                "a step in an engine": stepped(smallest, engine=engine),
                "eager, by hand": asked_by_hand(smallest),
                "eager, in a Step": stepped(smallest, asked),
            },
            time.thread_time,
            4 * arguments.repeats,
        )
    with tempfile.TemporaryDirectory() as folder:
        large = measure(
            {
                "perceptron, in C++": partial(floor(folder), STEPS),
                "perceptron, by hand": by_hand(perceptron),
                "perceptron, a step alone": stepped(perceptron),
                "perceptron, a job": trained(perceptron),
            },
            time.perf_counter,
            arguments.repeats,
        )
    rows: list[dict[str, Any]] = []
    for name, us in (small | large).items():
        row = {"what": name, "us a step": round(report.median(us), 1), "spread": report.spread(us)}
        limit = LIMITS.get(name)
        rows.append(row | ({"at most": limit, "holds": report.median(us) <= limit} if limit is not None else {}))
    ratio = report.ratio_of(small["eager, in a Step"], small["eager, by hand"])
    rates = report.interleaved({"one": in_threads(1), "two": in_threads(2)}, 2 * arguments.repeats)
    gain = report.ratio_of(rates["two"], rates["one"])
    rows.append(
        {"what": "steps a second of two threads, over one", "ratio": round(gain, 2), "at least": 1.3, "holds": gain >= 1.3}
    )
    rows.append({"what": "eager in a Step, over by hand", "ratio": round(ratio, 3), "at most": 1.03, "holds": ratio <= 1.03})
    return report.finish(
        "door", arguments, rows, "processor time of the calling thread; perceptron: wall time, a job's with its start"
    )


if __name__ == "__main__":
    sys.exit(main())
