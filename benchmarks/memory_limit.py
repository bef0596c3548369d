"""Most private memory of a process that trains one job, against the job's limit: capture, first steps, audits and 100 steps.

Each model trains in a process of its own, under a limit of 1.2 times its plan, or the least that it can have. Private memory is
that of the process alone (``Private_Dirty`` of ``smaps_rollup``, sampled each 5 ms), above what was there before ``train()``:
torch, the batches, and what it imports with the first model and optimizer. The engine promises the limit; 3 % or 64 MiB more,
whichever is more, may go to Python.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from benchmarks import report
from benchmarks.networks import mlp
from benchmarks.zoo import FULL, SMALL, ZooModel

STEPS, LIMIT = 100, 1.2
MOST, LARGE, BESIDE = 1.03, 256 << 20, 64 << 20  # a share of the limit for plans of so many bytes; bytes for smaller ones


def _rows(n: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 50, generator=generator), torch.randint(2, (n,), generator=generator)


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


TABLE = ZooModel("table", partial(mlp, (50, 512, 512, 2), 0.0), _rows, _classify, SMALL["vit"].optimizer, "50 numbers")
MODELS: dict[str, tuple[ZooModel, int]] = {
    "table (an MLP), batch 35,000": (TABLE, 35_000),
    "bert (small), batch 2,400": (SMALL["bert"], 2_400),
    "gpt2 (small), batch 1,700": (SMALL["gpt2"], 1_700),
    "dlrm, batch 64": (FULL["dlrm"], 64),
    "lstm (small), batch 6,000": (SMALL["lstm"], 6_000),
    "mlp_dropout, batch 512": (FULL["mlp_dropout"], 512),
    "cnn_bn (small), batch 256": (SMALL["cnn_bn"], 256),
    "resnet50 (small), batch 8": (SMALL["resnet50"], 8),
    "vit (small), batch 128": (SMALL["vit"], 128),
    "nasnet (small), batch 4": (SMALL["nasnet"], 4),
    "lstm_cell (small), batch 64": (SMALL["lstm_cell"], 64),
    "mamba (small), batch 32": (SMALL["mamba"], 32),
    "tacotron2 (small), batch 32": (SMALL["tacotron2"], 32),
}


def private_bytes() -> int:
    """Return the bytes that this process alone has in memory."""
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Private_Dirty:\s+(\d+) kB", file.read())[1]) * 1024  # type: ignore[index]


class Watch:
    """Samples private memory on a thread, inside of its context; ``most`` is the most that was there above the start, in bytes."""

    def __enter__(self) -> Watch:
        self._start, self.most = private_bytes(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, private_bytes() - self._start)


def planned(name: str) -> tuple[int, int]:
    """Return the bytes of the model's plan, and of the limit to train it under: a small one may need more for the reserve."""
    job = _job(name, 6)
    with wf.Engine(lanes=1) as engine, wf.within(engine):
        model = job.model()
        plan = wf.Step(model, step=job.step, optimizer=job.optimizer(model.parameters())).plan_for(job.data[0]).peak
    limit = int(plan * LIMIT)
    while True:
        try:
            wf.train([job], memory=limit)
        except wf.MemoryLimitError as error:
            limit = int(max(error.needed, 0.76 * limit) / 0.75)  # a quarter of a small limit is the reserve
        else:
            return plan, limit


def trained(name: str, limit: int, steps: int = STEPS) -> int:
    """Train under the limit; return the most private bytes above the start."""
    job = _job(name, steps)
    job.optimizer(job.model().parameters())  # so that libraries are there
    with Watch() as watch:
        wf.train([job], memory=limit)
    return watch.most


def _job(name: str, steps: int) -> wf.Job:
    zoo, size = MODELS[name]
    batches = [zoo.batch(size, torch.Generator().manual_seed(number)) for number in range(min(steps, 4))]
    data = [batches[number % len(batches)] for number in range(steps)]
    return wf.Job(name=zoo.name, model=zoo.build, data=data, step=zoo.step, optimizer=zoo.optimizer, seed=0)


def _in_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.memory_limit", "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str) -> dict[str, Any]:
    """One row: the plan, the limit, and the most that was there."""
    plan, limit = _in_process(name)
    most = _in_process(name, str(limit))
    allowed = limit * MOST if plan >= LARGE else limit + BESIDE
    return {
        "model": name,
        "plan MiB": plan / 2**20,
        "limit MiB": limit / 2**20,
        "most MiB": most / 2**20,
        "most over the limit": f"{most / limit:.3f}",
        "holds": most <= allowed,
    }


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--one", nargs="+", help="for the benchmark itself: a model, and a limit in bytes")
    arguments = parser.parse_args()
    if arguments.one:
        name, *limit = arguments.one
        print(json.dumps(trained(name, int(limit[0])) if limit else planned(name)))
        return 0
    rows = [measure(name) for name in arguments.models]
    note = f"at most {MOST:.2f} of the limit for plans from 256 MiB, the limit and 64 MiB for smaller ones; {STEPS} steps"
    return report.finish("memory_limit", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
