"""Steps of one job that were handed to its engine, and the losses that they gave."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch

from waterflow.executor.fused_group import FusedPending
from waterflow.executor.pending import Pending


class StepQueue:
    """Steps under way, in order, and the losses of those that ended; numbers come from the device all at once."""

    def __init__(self) -> None:
        self._under_way: deque[Pending | FusedPending] = deque()
        self._ended: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, pending: Pending | FusedPending) -> None:
        """A step was handed in."""
        self._under_way.append(pending)

    def take_half(self) -> None:
        """One wait for half of the queue: its steps end in order, and each wait costs two thread switches."""
        half = (len(self._under_way) + 1) // 2
        self._under_way[half - 1].wait()
        for _ in range(half):
            self._take()

    def take_all(self) -> None:
        """Wait for all of them. Raises what the first that fails raised; those behind it do not count."""
        while self._under_way:
            self._take()

    def losses(self) -> list[float]:
        """Those of the steps that ended since the last call."""
        ended, self._ended = self._ended, []
        # One transfer from the device.
        return torch.stack([loss.reshape(()).to(torch.float64) for loss in ended]).tolist() if ended else []

    def _take(self) -> None:
        try:
            self._ended.append(_loss_of(self._under_way.popleft().result()))
        except BaseException:
            for pending in self._under_way:
                with contextlib.suppress(Exception):
                    pending.result()
            self._under_way.clear()
            raise


def _loss_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
