"""Events happen in the order of virtual steps, however fast each worker is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from waterflow.executor.virtual_clock import VirtualClock

Event = tuple[int, int]  # time, worker


def run_all(*bodies: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"


def act(clock: VirtualClock, worker: int, steps: list[int], log: list[Event], pause: Callable[[], None]) -> None:
    """So many steps before each event; then leave."""
    for count in steps:
        for _ in range(count):
            clock.advance(worker)
        pause()
        with clock.turn(worker):
            log.append((clock.time(worker), worker))
            pause()
    with clock.turn(worker):
        clock.leave(worker)


schedules = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=4)


@given(schedules, st.integers(0, 2**16))
def test_events_are_sorted_by_time_and_then_by_number(schedule: list[list[int]], seed: int) -> None:
    draw = random.Random(seed)
    clock, log = VirtualClock(), []
    for worker in range(len(schedule)):
        clock.join(worker, 0)
    run_all(*(
        lambda worker=worker, steps=steps: act(
            clock, worker, steps, log, lambda: time.sleep(0.0003 * draw.randrange(3))
        )
        for worker, steps in enumerate(schedule)
    ))  # fmt: skip
    expected = [(sum(steps[: n + 1]), worker) for worker, steps in enumerate(schedule) for n in range(len(steps))]
    assert log == sorted(expected)


def test_a_worker_that_joins_later_begins_at_its_time() -> None:
    clock, log = VirtualClock(), []
    clock.join(0, 0)
    clock.join(1, 5)

    def late() -> None:
        with clock.turn(1):
            log.append("late")

    def early() -> None:
        for _ in range(5):
            with clock.turn(0):
                log.append(clock.time(0))
            clock.advance(0)
        clock.advance(0)

    run_all(late, early)
    assert log == [0, 1, 2, 3, 4, "late"]


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_turns_exclude_each_other_and_nest() -> None:
    clock, inside = VirtualClock(), []
    for worker in range(3):
        clock.join(worker, 0)

    def body(worker: int) -> None:
        for _ in range(20):
            with clock.turn(worker):
                inside.append(worker)
                with clock.turn(worker):
                    time.sleep(0.0001)
                assert inside.pop() == worker and not inside
            clock.advance(worker)
        clock.leave(worker)

    run_all(*(lambda worker=worker: body(worker) for worker in range(3)))


def test_a_turn_ends_with_its_error() -> None:
    clock = VirtualClock()
    clock.join(0, 0)
    clock.join(1, 0)
    with pytest.raises(ValueError), clock.turn(0):
        raise ValueError
    clock.advance(0)
    run_all(lambda: clock.turn(1).__enter__())


def test_a_suspended_worker_holds_nobody_up_and_goes_on_when_another_leaves() -> None:
    clock, log = VirtualClock(), []
    clock.join(0, 0)
    clock.join(1, 0)

    def waiting() -> None:
        with clock.turn(0):
            clock.suspend(0)
        with clock.turn(0):
            log.append(("resumed", clock.time(0)))

    def working() -> None:
        for _ in range(4):
            clock.advance(1)
            with clock.turn(1):
                log.append(("works", clock.time(1)))
        with clock.turn(1):
            clock.leave(1)

    run_all(waiting, working)
    assert log == [*(("works", time) for time in range(1, 5)), ("resumed", 4)]


def test_open_ends_all_waiting() -> None:
    clock, passed = VirtualClock(), []
    clock.join(0, 0)
    clock.join(1, 3)

    def body() -> None:
        with clock.turn(1):
            passed.append(1)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout=0.05)
    assert thread.is_alive() and not passed
    clock.open()
    thread.join(timeout=5)
    assert passed == [1]
