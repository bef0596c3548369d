"""What the engine books: admission, barriers, the order on the device, an arena's pages; and the clock of simulations."""

from __future__ import annotations

from tests.native.build import load

_C = load()
Admission, CounterBarrier = _C.Admission, _C.CounterBarrier
CrossLaneFences, OrderFault = _C.CrossLaneFences, _C.OrderFault
DeviceClock, PageLedger = _C.DeviceClock, _C.PageLedger
