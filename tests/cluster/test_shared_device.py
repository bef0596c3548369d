"""A shared device in simulation: the coordinator of live devices decides, and a model answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from waterflow.cluster.shared_device import Load, coordinated
from waterflow.executor.interference import LEAST_RATE, Allowed, RateControl

ALLOWED = Allowed().median
WINDOWS = 12 / 13  # of the time others may run, once the rate has been found


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    coordinated.cache_clear()
    yield
    coordinated.cache_clear()


@pytest.mark.parametrize("left", [0.22, 0.5, 0.8])
@pytest.mark.parametrize("asked", [0.05, 0.4, 1.0])
def test_what_nobody_misses_is_given_whole(asked: float, left: float) -> None:
    pace = coordinated(Load(asked, left, contention=0.0), ALLOWED)
    assert pace.rate == 1.0 and pace.guaranteed == pytest.approx(1.0)
    assert pace.taken == pytest.approx(min(asked, left) * WINDOWS)


@pytest.mark.parametrize("contention", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("asked", [0.6, 1.0])
def test_guaranteed_steps_take_longer_by_what_is_allowed(asked: float, contention: float) -> None:
    pace = coordinated(Load(asked, 0.8, contention), ALLOWED)
    assert pace.rate == pytest.approx(ALLOWED / contention / asked, rel=0.01)
    assert pace.guaranteed == pytest.approx(1 / (1 + ALLOWED * WINDOWS), rel=0.001)
    assert pace.taken == pytest.approx(ALLOWED / contention * WINDOWS, rel=0.01)


def test_they_never_take_longer_than_that_and_others_never_more_than_is_left() -> None:
    for contention in (0.0, 0.03, 0.3, 0.9):
        for asked in (0.1, 0.5, 1.0):
            for left in (0.1, 0.5, 1.0):
                pace = coordinated(Load(asked, left, contention), ALLOWED)
                assert 1 / (1 + ALLOWED) <= pace.guaranteed <= 1 + 1e-9, (contention, asked, left)
                assert 0 < pace.taken <= min(asked, left)


def test_more_contention_leaves_less_to_others() -> None:
    taken = [coordinated(Load(1.0, 0.8, contention), ALLOWED).taken for contention in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert taken == sorted(taken, reverse=True) and taken[-1] < 0.2 * taken[0]


def test_others_get_the_least_where_nothing_is_bearable() -> None:
    pace = coordinated(Load(1.0, 1.0, contention=5.0), ALLOWED)
    assert pace.rate == LEAST_RATE and pace.guaranteed > 0.9


def test_it_is_the_class_of_live_devices_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it learns here is what it would learn there, and what it says is done."""
    seen: list[tuple[float, float]] = []

    def learn(control: RateControl, median: float, tail: float | None, of_all: bool = True) -> None:
        seen.append((control.rate, median))
        control._seen.append((control.rate, median, tail))
        control.rate = 0.3

    monkeypatch.setattr(RateControl, "learn", learn)
    pace = coordinated(Load(1.0, 0.8, contention=0.1), ALLOWED)
    assert pace.rate == 0.3 and pace.taken == pytest.approx(0.3 * WINDOWS, rel=0.01)
    assert seen[0] == (0.1, pytest.approx(0.01)) and seen[-1] == (0.3, pytest.approx(0.03))


def test_it_is_worked_out_once() -> None:
    first = coordinated(Load(0.5, 0.4, 0.1), ALLOWED)
    assert coordinated(Load(0.5, 0.4, 0.1), ALLOWED) is first


def test_simulating_needs_no_torch() -> None:
    code = "import sys; from waterflow.cluster import Interference, Simulator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
