"""Lanes on a GPU: waterflow's memory put under torch where that is still possible, and a stream of torch's per lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from waterflow import _C
from waterflow.allocator import cuda

# More lanes than this only add launches to a GPU that two steps side by side keep busy.
DEFAULT_LANES = 2


@dataclass(frozen=True)
class CudaLanes:
    """What an engine on a GPU is made of; ``planned`` where torch's requests for memory are waterflow's to serve."""

    device: torch.device
    free: int
    planned: bool


def prepare(device: torch.device) -> CudaLanes:
    """Look at the device, before anything on it has been made. Raises InvalidJobError where it cannot be used."""
    cuda.check_settings()
    planned = cuda.install(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return CudaLanes(torch.device("cuda", index), int(_C.cuda_device(index).free_memory), planned)


def native_settings(lanes: CudaLanes, count: int, limit: int) -> dict[str, Any]:
    """For ``_C.Engine``: the device, and two streams for each of ``count`` lanes; torch never gives one of its own back."""
    if lanes.planned:
        cuda.install(lanes.device, limit)
    streams = [torch.cuda.Stream(lanes.device) for _ in range(2 * count)]
    return {
        "cuda": _C.cuda_device(lanes.device.index),
        "handles": [stream.cuda_stream for stream in streams],
        "streams": [(stream.stream_id, stream.device_index, stream.device_type) for stream in streams],
    }
