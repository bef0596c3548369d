"""The names of devices, and whether this machine has one."""

from __future__ import annotations

import re

DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]*))?")


def missing(device: str, count: int = 1) -> str | None:
    """Why this machine has not ``count`` devices of that name, with the remedy; None where it has them.

    ``device`` matches ``DEVICE``. CUDA is not initialized, which a process that forks or starts others must not do.
    """
    if device == "cpu":
        return None
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        return (
            f"{device!r} needs a GPU, and torch finds none on this machine; take device 'cpu', or a CUDA build of torch"
        )
    last = int(device.partition(":")[2]) if ":" in device else count - 1
    if last >= there:
        asked = f"{device!r}" if ":" in device else f"{count} devices"
        return f"{asked} of {there} GPU(s) on this machine cannot be; ask for at most {there}, the last is 'cuda:{there - 1}'"
    return None
