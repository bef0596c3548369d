"""The local interference, on a device whose guaranteed steps are slowed down as the test says."""

from __future__ import annotations

import itertools
import random

import pytest

from waterflow.executor.interference import AWAY_SECONDS, InterferenceController, RateControl


class Device:
    """Lanes on a clock of its own: a guaranteed step takes longer, in proportion to the rate of what runs beside it."""

    def __init__(self, seconds: float, slope: float, noise: float = 0.0) -> None:
        self.seconds, self.slope, self.noise = seconds, slope, noise
        self.time = 100.0
        self.idle = False  # nobody runs beside the guaranteed job
        self.rates: list[float] = []
        self.steps: list[tuple[int, int, int, int]] = []
        self.random = random.Random(0)

    def set_rates(self, beside: float, between: float) -> None:
        self.rates.append(beside)

    @property
    def opportunistic_ns(self) -> int:
        return 0 if self.idle else int(self.time * 1e9)

    def take_step_times(self) -> list[tuple[int, int, int, int]]:
        taken, self.steps = self.steps, []
        return taken

    def step(self) -> None:
        """One of the guaranteed job."""
        factor = 1 + self.slope * self.rates[-1] + self.random.gauss(0, self.noise)
        began, self.time = self.time, self.time + self.seconds * factor
        self.steps.append((0, int(began * 1e9), int(self.time * 1e9), 0))

    def run(self, interference: InterferenceController, seconds: float) -> None:
        """For so long, looking behind each step."""
        end = self.time + seconds
        while self.time < end:
            self.step()
            interference.poll()


def made(device: Device) -> InterferenceController:
    return InterferenceController(device, now=lambda: device.time)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0003, 0.004, 0.05])
@pytest.mark.parametrize("slope", [0.05, 0.2, 0.8])
def test_the_rate_comes_to_what_is_allowed(seconds: float, slope: float) -> None:
    device = Device(seconds, slope, noise=0.01)
    interference = made(device)
    device.run(interference, 60 + 4000 * seconds)
    assert interference.rate == pytest.approx(interference.allowed.median / slope, rel=0.5)


def test_what_nobody_misses_is_given_whole() -> None:
    device = Device(0.004, 0.0, noise=0.01)
    interference = made(device)
    device.run(interference, 60)
    assert interference.rate > 0.8


def test_it_is_given_in_steps() -> None:
    device = Device(0.004, 0.0)
    device.run(made(device), 30)
    given = [rate for rate in device.rates if 0 < rate < 1]
    assert given[0] == 0.1 and max(b - a for a, b in itertools.pairwise(given)) <= 0.1 + 1e-9


def test_it_is_cut_at_once() -> None:
    device = Device(0.004, 0.05)
    interference = made(device)
    device.run(interference, 60)
    before = interference.rate
    device.slope = 2.0  # another phase of either job
    device.run(interference, 1.5)
    assert interference.rate <= before / 2


def test_alone_an_opportunistic_job_has_all() -> None:
    device = Device(0.004, 1.0)
    interference = made(device)
    assert interference.rate == 1.0
    device.run(interference, 5)
    assert interference.rate < 0.2
    device.time += AWAY_SECONDS + 0.1
    interference.poll()
    assert interference.rate == 1.0 and device.rates[-1] == 1.0


def test_a_slow_tail_counts_too() -> None:
    device = Device(0.004, 0.0)
    interference = made(device)
    step = device.step

    def with_stalls() -> None:
        device.slope = 4.0 if device.random.random() < 0.1 else 0.0
        step()

    device.step = with_stalls  # type: ignore[method-assign]
    device.run(interference, 60)
    assert interference.rate < 0.3


def test_other_jobs_are_learnt_anew() -> None:
    control = RateControl()
    for _ in range(20):
        control.learn(0.0, 0.0)
    assert control.rate == 1.0 and control.settled
    control.forget()
    assert control.rate == 0.1 and not control.settled


def test_a_guaranteed_job_that_left_in_the_middle_of_a_window_does_not_keep_the_rate_down() -> None:
    device = Device(0.004, 0.0)
    interference = made(device)
    device.run(interference, 0.02)
    device.steps.append((1, int(device.time * 1e9), int((device.time + 0.004) * 1e9), 0))  # its last one
    device.run(interference, 60)
    assert interference.rate > 0.8 and max(device.rates[-20:]) > 0.8


@pytest.mark.parametrize("seconds", [1.5, 10.0])
def test_long_guaranteed_steps_are_protected(seconds: float) -> None:
    device = Device(seconds, 0.5, noise=0.01)
    interference = made(device)
    device.run(interference, 3 * seconds)
    for _ in range(8):  # opportunistic steps end, too, while a guaranteed one is under way
        device.time += seconds / 9
        interference.poll()
        assert device.rates[-1] < 0.2
    device.time += 2 * seconds + AWAY_SECONDS
    interference.poll()
    assert interference.rate == 1.0


class Devices(Device):
    """Several guaranteed jobs on lanes of their own: of each (seconds, slope)."""

    def __init__(self, jobs: dict[int, tuple[float, float]]) -> None:
        super().__init__(0.0, 0.0)
        self.jobs = jobs
        self.began = dict.fromkeys(jobs, self.time)

    def step(self) -> None:
        """The one that ends next."""
        ends = {job: self.began[job] + seconds * (1 + slope * self.rates[-1])
                for job, (seconds, slope) in self.jobs.items()}  # fmt: skip
        job = min(ends, key=ends.__getitem__)
        self.time = max(self.time, ends[job])
        self.steps.append((job, int(self.began[job] * 1e9), int(self.time * 1e9), 0))
        self.began[job] = self.time

    def add(self, job: int, seconds: float, slope: float) -> None:
        """From now on it is there."""
        self.jobs[job], self.began[job] = (seconds, slope), self.time


@pytest.mark.slow
def test_a_job_with_long_steps_beside_one_with_short_steps_is_not_passed_over() -> None:
    device = Devices({0: (0.004, 0.0), 1: (0.8, 0.5)})
    interference = made(device)
    device.run(interference, 1000)
    assert interference.rate == pytest.approx(interference.allowed.median / 0.5, rel=0.5)


def test_a_job_that_comes_is_protected_at_once() -> None:
    device = Devices({0: (0.004, 0.0)})
    interference = made(device)
    device.run(interference, 60)
    assert interference.rate > 0.8
    for held in (False, True):  # until a window beside others has just begun
        while (device.rates[-1] == 0.0) == held:
            device.run(interference, 0.01)
    device.add(1, 0.1, 0.5)
    began = len(device.rates)
    device.run(interference, 0.5)
    assert device.rates[-1] == 0.0 and len(device.rates) == began + 1
    device.run(interference, 30)
    assert max(device.rates[began:]) <= 0.15


def test_the_rate_is_not_raised_where_a_job_could_not_be_compared() -> None:
    control = RateControl()
    for _ in range(5):
        control.learn(0.0, None, of_all=False)
    assert control.rate == 0.1
    control.learn(0.0, None)
    assert control.rate > 0.1
    before = control.rate
    control.learn(1.0, None, of_all=False)  # strain counts, whoever has it
    assert control.rate <= before / 2


def test_a_job_whose_pace_changes_keeps_the_rate_from_rising() -> None:
    device = Devices({0: (0.004, 0.0), 1: (0.004, 0.5)})
    interference = made(device)
    step, steps = device.step, itertools.count()

    def drifting() -> None:
        device.jobs[1] = (0.004 * 1.15 ** (next(steps) // 200 % 2), 0.5)
        step()

    device.step = drifting  # type: ignore[method-assign]
    device.run(interference, 60)
    assert max(device.rates[2:]) <= 0.2


def test_a_tail_of_too_few_steps_is_not_taken_for_none() -> None:
    control = RateControl()
    for _ in range(3):
        control.learn(0.0, None)
    before = control.rate
    control.learn(0.0, 2 * control.allowed.tail)
    assert control.rate <= before / 2 + 1e-9


class UnsteadyDevice(Device):
    """Its own speed changes by a fifth and back, all the time and at no regular moments; what others cost comes on top."""

    def __init__(self, seconds: float, slope: float, noise: float = 0.02, lasts: float = 0.3) -> None:
        super().__init__(seconds, slope, noise)
        self.usual, self.lasts, self.changes = seconds, lasts, 0.0

    def step(self) -> None:
        """One of the guaranteed job."""
        if self.time >= self.changes:
            self.seconds = self.usual * self.random.choice((1.0, 1.0, 1.2))
            self.changes = self.time + self.random.expovariate(1 / self.lasts)
        super().step()


def rates_of(device: Device, interference: InterferenceController) -> list[float]:
    """As time goes on."""
    rates = []
    for _ in range(20):
        device.run(interference, 1 + 40 * device.seconds)
        rates.append(interference.rate)
    return rates


@pytest.mark.parametrize("lasts", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("seconds", [0.0003, 0.0045, 0.025])
def test_a_machine_that_changes_its_own_speed_is_not_taken_for_strain(seconds: float, lasts: float) -> None:
    device = UnsteadyDevice(seconds, 0.0, lasts=lasts)
    interference = made(device)
    device.run(interference, 30 + 2000 * seconds)
    rates = rates_of(device, interference)
    assert sum(rates) / len(rates) > 0.8 and min(rates) > 0.4


@pytest.mark.parametrize("slope", [0.07, 0.3])
@pytest.mark.parametrize("seconds", [0.0003, 0.0045, 0.025])
def test_strain_is_seen_on_a_machine_that_changes_its_own_speed(seconds: float, slope: float) -> None:
    device = UnsteadyDevice(seconds, slope)
    interference = made(device)
    device.run(interference, 30 + 2000 * seconds)
    rates = rates_of(device, interference)
    assert sum(rates) / len(rates) == pytest.approx(interference.allowed.median / slope, rel=0.5)


def test_a_machine_that_becomes_slow_for_everybody_cuts_nothing() -> None:
    device = Device(0.004, 0.02)
    interference = made(device)
    device.run(interference, 60)
    before = interference.rate
    assert before > 0.8
    for seconds in (0.007, 0.004) * 20:
        device.seconds = seconds
        device.run(interference, 1.37)
    assert interference.rate >= before - 0.1


def test_nothing_is_learnt_beside_nobody() -> None:
    device = Device(0.004, 0.0)
    interference = made(device)
    device.run(interference, 3)
    before, seen = interference.rate, len(interference.control._seen)
    assert 0.1 < before < 1.0
    device.idle = True
    device.run(interference, 30)
    assert interference.rate == before and len(interference.control._seen) == seen
    device.idle = False
    device.run(interference, 30)
    assert interference.rate > before


def test_a_comparison_goes_on_behind_a_pause_of_the_guaranteed_job() -> None:
    device = Device(0.004, 0.0, noise=0.01)
    interference = made(device)
    for _ in range(60):
        device.run(interference, 1.0)  # not as long as one with windows of the length that they have in the end
        device.time += AWAY_SECONDS + 0.5
        interference.poll()
        assert device.rates[-1] == 1.0
    assert interference.control.rate == 1.0 and len(interference.control._seen) > 15
