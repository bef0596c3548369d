"""Admission, barriers, the order on the device, and its clock (``admission.h``, ``cross_lane_fences.h``, ``simulation.h``)."""

from __future__ import annotations

from tests.native.build import load

_C = load()
Admission, CounterBarrier = _C.Admission, _C.CounterBarrier
CrossLaneFences, OrderFault = _C.CrossLaneFences, _C.OrderFault
DeviceClock = _C.DeviceClock
