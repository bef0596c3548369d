"""Devices and their memory; what torch's allocators are asked for."""

from waterflow.allocator import cuda
from waterflow.allocator.planned import time_planned_requests

__all__ = ["cuda", "time_planned_requests"]
