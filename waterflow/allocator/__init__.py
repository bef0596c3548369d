"""Memory: devices, the multi-stream allocator, and what torch's allocators are asked for."""

from waterflow.allocator import cuda
from waterflow.allocator.devices import CpuDevice, Device, Race, SimulatedDevice
from waterflow.allocator.fuzzing import FuzzResult, FuzzSetup, fuzz_table, run_fuzz
from waterflow.allocator.planned import time_planned_requests
from waterflow.allocator.request_log import RequestLog, record_requests
from waterflow.allocator.stream_allocator import AllocatorReport, StreamAllocator

__all__ = [
    "AllocatorReport",
    "CpuDevice",
    "Device",
    "FuzzResult",
    "FuzzSetup",
    "Race",
    "RequestLog",
    "SimulatedDevice",
    "StreamAllocator",
    "cuda",
    "fuzz_table",
    "record_requests",
    "run_fuzz",
    "time_planned_requests",
]
