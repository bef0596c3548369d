"""Rates of jobs on one device, from windows of their own steps, on a made-up clock."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, strategies as st

from waterflow.cluster.pace import ALONE_SECONDS, Paces, Seen


class Device:
    """Jobs with a pace each, alone and beside others, looked at twice a second."""

    def __init__(self, slower: float = 0.5) -> None:
        self.paces, self.now, self.slower = Paces(), 0.0, slower
        self.alone: dict[str, float] = {}  # paces of those that train
        self.steps: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.held: set[str] = set()
        self.protected: set[str] = set()

    def come(self, job: str, pace: float) -> None:
        self.alone[job], self.steps[job], self.waited[job] = pace, 0.0, 0.0

    def leave(self, job: str) -> None:
        del self.alone[job], self.steps[job]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(int(seconds / 0.5)):
            if until():
                return
            measured = self.paces.alone
            training = {job for job in self.alone if job not in self.held and measured in (None, job)}
            self.now += 0.5
            for job in training:
                self.steps[job] += 0.5 * self.alone[job] * (1.0 if len(training) == 1 else self.slower)
            measured = self.paces.alone
            seen = {
                job: Seen(
                    int(self.steps[job]),
                    self.waited[job],
                    job not in self.held and measured in (None, job),
                    job in self.protected,
                )
                for job in self.alone
            }
            self.paces.look(self.now, seen)


def joined() -> Device:
    """A job that was alone, and one that has just come."""
    device = Device()
    device.come("a", 20.0)
    device.run(5)
    device.come("b", 10.0)
    return device


def test_a_rate_is_the_pace_beside_others_over_the_pace_alone() -> None:
    device = Device(slower=0.4)
    device.come("a", 20.0)
    device.run(5)
    assert device.paces.of("a").pace == 20 and device.paces.of("a").rate == 1.0
    device.come("b", 10.0)
    device.run(0.5)
    assert device.paces.of("a").rate is None  # its company has changed: nothing is known
    device.run(10)
    assert device.paces.of("a").rate == 0.4 and device.paces.of("b").rate == 0.4
    device.leave("b")
    device.run(5)
    assert device.paces.of("a").rate == 1.0


def test_one_that_was_never_alone_gets_a_window_alone() -> None:
    device = joined()
    device.run(10, lambda: device.paces.alone == "b")
    assert device.paces.alone == "b" and device.paces.of("b").rate is None
    device.run(10, lambda: device.paces.alone is None)
    assert device.paces.alone is None and device.now < 12


def test_one_that_has_too_few_steps_alone_stays_unknown() -> None:
    device = Device()
    device.come("a", 20.0)
    device.run(5)
    device.come("b", 0.5)  # it reads its data, say
    device.run(3)
    assert device.paces.alone is None  # it has not begun
    device.run(5, lambda: device.paces.alone == "b")
    assert device.paces.alone == "b"
    device.run(ALONE_SECONDS + 0.5, lambda: device.paces.alone is None)
    assert device.paces.alone is None
    device.run(20)
    assert device.paces.alone is None and device.paces.of("b").rate is None


def test_a_guaranteed_job_is_never_held_for_a_measurement() -> None:
    device = Device()
    device.come("a", 20.0)
    device.protected.add("a")
    device.come("b", 10.0)
    device.run(10)
    assert device.paces.alone is None
    device.protected.clear()
    device.run(1)
    assert device.paces.alone is not None


def test_one_whose_window_alone_was_cut_short_gets_another() -> None:
    device = joined()
    device.run(5, lambda: device.paces.alone == "b")
    device.held = {"b"}  # its turn ends
    device.run(3)
    assert device.paces.alone is None
    device.held.clear()
    device.run(10, lambda: device.paces.of("b").rate is not None)
    assert device.paces.of("b").rate is not None


def test_long_steps_of_a_neighbour_are_no_time_alone() -> None:
    device = Device()
    device.come("a", 40.0)
    device.run(5)
    device.come("b", 1.0)  # a step of two seconds beside a: in most windows none ends
    device.run(60)
    assert device.paces.of("a").rate == 0.5


def test_a_window_goes_on_over_turns() -> None:
    device = Device()
    device.come("a", 1.0)  # five steps take five seconds
    device.come("b", 1.0)
    for turn in range(12):  # of two seconds
        device.held = {"a" if turn % 2 else "b"}
        device.run(2)
    assert device.paces.of("a").rate == 1.0 and device.paces.of("b").rate == 1.0


def test_the_share_of_the_time_that_a_job_waited() -> None:
    device = Device()
    device.come("a", 20.0)
    for _ in range(10):
        device.waited["a"] += 0.125
        device.run(0.5)
    assert device.paces.of("a").waited == 0.25


@given(st.lists(st.sampled_from(["come", "leave", "hold", "go on", "run", "protect"]), max_size=60), st.randoms())
def test_rates_lie_between_nothing_and_alone(events: list[str], numbers: object) -> None:
    device, count = Device(slower=0.5), 0
    for event in events:
        there = sorted(device.alone)
        if event == "come" and len(there) < 4:
            device.come(f"job-{(count := count + 1)}", 20.0)
        elif event == "run" or not there:
            device.run(3)
        elif event == "leave":
            job = numbers.choice(there)  # type: ignore[attr-defined]
            device.leave(job)
            device.held.discard(job)
            device.protected.discard(job)
        else:
            job = numbers.choice(there)  # type: ignore[attr-defined]
            {"hold": device.held.add, "go on": device.held.discard, "protect": device.protected.add}[event](job)
    for job in device.alone:
        rate = device.paces.of(job).rate
        assert rate is None or 0.5 <= rate <= 1.0
    assert device.paces.alone is None or device.paces.alone in device.alone
