"""The tests' own extension: devices, allocator and admission as Python sees them, random runs, logged requests, counted memory."""

from tests.native.admission import Admission, CounterBarrier, CrossLaneFences, DeviceClock, OrderFault, PageLedger
from tests.native.counting import count_memory
from tests.native.devices import CpuDevice, Device, Race, SimulatedDevice
from tests.native.fuzzing import FuzzResult, FuzzSetup, fuzz_table, run_fuzz
from tests.native.request_log import RequestLog, record_requests
from tests.native.stream_allocator import AllocatorReport, Fault, StreamAllocator

__all__ = [
    "Admission",
    "AllocatorReport",
    "CounterBarrier",
    "CpuDevice",
    "CrossLaneFences",
    "Device",
    "DeviceClock",
    "Fault",
    "FuzzResult",
    "FuzzSetup",
    "OrderFault",
    "PageLedger",
    "Race",
    "RequestLog",
    "SimulatedDevice",
    "StreamAllocator",
    "count_memory",
    "fuzz_table",
    "record_requests",
    "run_fuzz",
]
