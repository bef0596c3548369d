"""Jobs that read one data set whose rows take a while to decode: together, and each for itself."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import waterflow as wf
from benchmarks import report

JOBS, ROWS, BATCH, EPOCHS = 4, 128, 16, 2
DECODING = 5e-3  # seconds per row


class Slow(Dataset[Any]):
    """Rows that take their time, as images do; counts them."""

    def __init__(self) -> None:
        self.decoded = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.decoded += 1
        time.sleep(DECODING)
        return torch.rand(64), torch.rand(8)


def jobs(data: Any) -> list[wf.Job]:
    """Small networks with learning rates of their own."""
    return [
        wf.Job(name=f"job-{i}", model=lambda: nn.Linear(64, 8), loss=F.mse_loss, data=data, epochs=EPOCHS, seed=i,
               optimizer=lambda parameters, i=i: torch.optim.AdamW(parameters, lr=10.0 ** -(i + 1)))
        for i in range(JOBS)
    ]  # fmt: skip


def measure(shared: bool, repeats: int) -> dict[str, Any]:
    """Rows decoded by one call of ``train``, and its seconds."""
    seconds, decoded = [], []
    for _ in range(repeats):
        rows = Slow()
        loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
        start = time.perf_counter()
        wf.train(jobs(wf.SharedData(loader) if shared else loader), lanes=2, max_concurrent=JOBS)
        seconds.append(time.perf_counter() - start)
        decoded.append(rows.decoded)
    return {
        "data": "shared" if shared else "each its own", "rows decoded": max(decoded), "of": ROWS * EPOCHS,
        "seconds": report.median(seconds), "spread": report.spread(seconds),
        "at most": ROWS * EPOCHS * (1 if shared else JOBS), "holds": max(decoded) <= ROWS * EPOCHS * (1 if shared else JOBS),
    }  # fmt: skip


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    rows = [measure(shared, arguments.repeats) for shared in (False, True)]
    return report.finish("shared_data", arguments, rows, f"{JOBS} jobs, {DECODING * 1e3:.0f} ms a row")


if __name__ == "__main__":
    sys.exit(main())
