"""The parts of ``gpu_check`` that measure; each prints its figures as one line of JSON. Needs a GPU."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.gpu_check import MARK

BATCH, STEPS, WARM = 32, 20, 8


def device() -> dict[str, Any]:
    """What it is measured on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "memory_bytes": properties.total_memory, "torch": torch.__version__,
        "cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}",
    }  # fmt: skip


def per_request(count: int = 1000, batches: int = 30) -> float:
    """Nanoseconds of one torch.empty on the GPU and its release."""
    taken = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(count):
            torch.empty(1 << 16, device="cuda", dtype=torch.uint8)
        taken.append((time.perf_counter() - start) / count * 1e9)
    return statistics.median(taken)


def requests() -> dict[str, Any]:
    """A planned request without torch's own share; others with it, on waterflow's memory. See ``torch_requests``."""
    import subprocess

    own = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_parts", "torch_requests"], capture_output=True, text=True, timeout=30
    )
    found = [line for line in own.stdout.splitlines() if line.startswith(MARK)]
    figures = dict(json.loads(found[-1][len(MARK) :])) if found else {}
    with wf.Engine("cuda", memory="1GiB", lanes=1):
        from waterflow import allocator

        figures["planned_ns"] = statistics.median(allocator.cuda.planned_request_nanoseconds())
        figures["unplanned_ns"] = per_request()
    return figures


def torch_requests() -> dict[str, Any]:
    """The same requests with torch's own allocator."""
    per_request(batches=2)
    return {"torch_ns": per_request()}


class Block(nn.Module):
    """Two convolutions and what they add to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return F.relu(x + self.body(x))


def network() -> nn.Module:
    """A residual network of 17 convolutions for images of 32 pixels; nothing beside torch is needed for it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for width in (64, 128):
        layers += [Block(width) for _ in range(4)]
        layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def graphs(steps: int = 60) -> dict[str, Any]:
    """A launch-bound job with its node groups as device graphs and without: equal bits, and steps in a second."""
    figures: dict[str, Any] = {}
    ends: list[list[torch.Tensor]] = []
    for name, on in (("plain", False), ("graph", True)):
        torch.manual_seed(0)
        layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))]
        model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        numbers = torch.Generator("cuda").manual_seed(1)
        batch = torch.randn(BATCH, 64).cuda(), torch.randint(0, 10, (BATCH,)).cuda()
        with wf.Engine("cuda", memory="1GiB", lanes=1, device_graphs=on) as engine:
            step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=numbers)
            losses = [step(batch) for _ in range(WARM)]
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses += [step(batch) for _ in range(steps)]
            torch.cuda.synchronize()
            figures[f"{name}_steps_per_second"] = steps / (time.perf_counter() - start)
            figures["graphs_launched"] = engine.stats().graphs["launched"]
        ends.append([*losses, *(p.detach().clone() for p in model.parameters())])
    figures["bitwise"] = all(torch.equal(a, b) for a, b in zip(*ends))
    return figures


def jobs(count: int) -> dict[str, Any]:
    """So many jobs side by side on as many lanes: samples of all of them in a second, and memory against the limit."""
    rates: list[float] = []
    with wf.Engine("cuda", memory="4GiB", lanes=count) as engine:
        steps = []
        for seed in range(count):
            torch.manual_seed(seed)
            model = network().to(engine.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
            batch = torch.randn(BATCH, 3, 32, 32).to(engine.device), torch.randint(0, 10, (BATCH,)).to(engine.device)
            steps.append((wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine), batch))
        for step, batch in steps:
            for _ in range(WARM):
                step(batch)
        torch.cuda.synchronize()

        def train(step: wf.Step, batch: Any, gate: threading.Barrier) -> None:
            gate.wait()
            for _ in range(STEPS):
                step(batch)

        for _ in range(3):
            gate = threading.Barrier(count + 1)
            threads = [threading.Thread(target=train, args=(*one, gate)) for one in steps]
            for thread in threads:
                thread.start()
            gate.wait()
            start = time.perf_counter()
            for thread in threads:
                thread.join()
            torch.cuda.synchronize()
            rates.append(count * STEPS * BATCH / (time.perf_counter() - start))
        planned, missed, _ = engine.native.placed
        return {
            "samples_per_second": statistics.median(rates),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "limit_bytes": engine.limit,
            "planned_requests": planned,
            "missed_requests": missed,
            "peak_held_bytes": engine.stats().peak_held,
        }


def main() -> int:
    """Command line: the name of a part, and its arguments."""
    name, *arguments = sys.argv[1:]
    parts = {"device": device, "requests": requests, "torch_requests": torch_requests, "graphs": graphs,
             "jobs": jobs}  # fmt: skip
    print(MARK + json.dumps(parts[name](*(int(one) for one in arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
