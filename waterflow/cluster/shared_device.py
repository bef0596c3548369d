"""A simulated device that a guaranteed job shares: the interference controller of live devices, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from waterflow.executor.interference import ALONE_STEPS, BESIDE, PAIRS, Allowed, InterferenceController

STEP_SECONDS = 0.1  # of the guaranteed job alone: from 10 ms on, live windows are counted in steps, too
STEADY = 1e-3  # the rate is found once a comparison changes it by less
MOST_ROUNDS = 200  # of comparisons at most


@dataclass(frozen=True)
class Load:
    """The shares of a device that jobs ask for and leave, and the cost of using them.

    At rate r opportunistic jobs take min(r x ``asked``, ``left``) of the device, as guaranteed work goes first. Work in
    flight cannot be taken back, so guaranteed steps take longer by ``contention`` x the share that the others take.
    """

    asked: float
    left: float
    contention: float

    def taken(self, rate: float) -> float:
        """Return the share of the device that opportunistic jobs use at ``rate``."""
        return min(rate * self.asked, self.left)


@dataclass(frozen=True)
class Pace:
    """The result of a controller for a load: the rate that it found, and the speeds, its windows without others included.

    ``guaranteed`` is a speed relative to alone, ``taken`` the share of the device that opportunistic jobs use.
    """

    rate: float
    guaranteed: float
    taken: float


class SimulatedLanes:
    """The ``Lanes`` of a controller: a guaranteed job without pauses, whose steps take as long as the model says."""

    def __init__(self, load: Load) -> None:
        self.now = 0.0  # seconds
        self._load = load
        self._rate = 0.0
        self._steps: list[tuple[int, int, int, int]] = []
        self._turns = 0  # how often the others were held

    def set_rates(self, beside: float, between: float) -> None:
        """See ``Lanes``."""
        self._rate = beside
        self._turns += beside == 0.0

    @property
    def opportunistic_ns(self) -> int:
        """See ``Lanes``."""
        return int(self.now * 1e9)

    def take_step_times(self) -> list[tuple[int, int, int, int]]:
        """See ``Lanes``."""
        steps, self._steps = self._steps, []
        return steps

    def round(self, coordinator: InterferenceController) -> Pace:
        """Advance virtual time by one comparison: windows without the others and beside them, in turns."""
        # One comparison takes PAIRS windows without the others.
        last, alone, lasted, used = self._turns + PAIRS, 0.0, 0.0, 0.0
        while self._turns < last:
            taken = self._load.taken(self._rate)
            seconds = STEP_SECONDS * (1.0 + self._load.contention * taken)
            steps = ALONE_STEPS * (BESIDE if self._rate else 1)
            for _ in range(steps):
                ready, self.now = self.now, self.now + seconds
                self._steps.append((0, int(ready * 1e9), int(self.now * 1e9), 0))
            alone += steps * STEP_SECONDS
            lasted += steps * seconds
            used += steps * seconds * taken
            coordinator.poll()
        return Pace(coordinator.rate, alone / lasted, used / lasted)


@cache
def coordinated(load: Load, allowed: float) -> Pace:
    """Return the pace at which the controller settles if guaranteed steps may take longer by ``allowed``.

    The rates that it tries before are left out.
    """
    lanes = SimulatedLanes(load)
    coordinator = InterferenceController(lanes, Allowed(median=allowed), now=lambda: lanes.now)
    before = 0.0
    for _ in range(MOST_ROUNDS):
        if coordinator.control.settled and abs(coordinator.rate - before) < STEADY:
            break
        before = coordinator.rate
        lanes.round(coordinator)
    return lanes.round(coordinator)
