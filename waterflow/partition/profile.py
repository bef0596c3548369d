"""From a profiled step to heights: real requests and times in the place of predicted ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from waterflow.partition.liveness import OperationMemory


def profiled_memory(
    table: torch.Tensor, predicted: Sequence[OperationMemory]
) -> tuple[list[OperationMemory], list[float]]:
    """Memory and seconds of each operation, from the executor's record of one step.

    ``table`` has a row per operation: bytes at its highest above what was held when it began, bytes that it left
    behind, nanoseconds, requests. Two steps whose first two columns are equal make a profile.
    """
    held = 0
    memory, seconds = [], []
    for (peak, net, nanoseconds, _), before in zip(table.tolist(), predicted):
        top = held + max(peak, net, 0)
        held = max(0, held + net)
        memory.append(OperationMemory(max(top, held), held, before.traffic))
        seconds.append(nanoseconds * 1e-9)
    return memory, seconds


def same_requests(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two profiled steps asked for the same memory in the same order."""
    return torch.equal(one[:, :2], other[:, :2]) and torch.equal(one[:, 3], other[:, 3])
