"""One trial more where lanes stand idle, and back again where that brought nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from waterflow.executor.tuning import AutoConcurrency


@dataclass
class Lanes:
    """A clock and lanes under the test's control."""

    count: int = 2
    now: float = 0.0
    busy: float = 0.0
    auto: AutoConcurrency = field(init=False)

    def __post_init__(self) -> None:
        self.auto = AutoConcurrency(self.count, lambda: int(self.busy * 1e9), lambda: self.now)

    def work(self, share: float, running: int | None = None, memory: bool = True, seconds: float = 0.5, in_use: int = 0) -> int:
        """Lanes in use are busy for this share of the time; what may be under way afterwards."""
        in_use = in_use or self.count
        self.now += seconds
        self.busy += share * seconds * in_use
        return self.auto.update(self.auto.limit if running is None else running, memory, in_use)


def test_begins_with_one_per_lane_and_stays_while_lanes_are_busy() -> None:
    lanes = Lanes()
    assert lanes.auto.limit == 2
    assert [lanes.work(0.95) for _ in range(5)] == [2] * 5


def test_one_more_while_that_brings_more() -> None:
    lanes = Lanes()
    assert [lanes.work(share) for share in (0.5, 0.6, 0.6, 0.7, 0.7, 0.8)] == [3, 3, 4, 4, 5, 5]
    assert lanes.work(0.95) == 5


def test_what_brings_nothing_is_taken_back_and_not_tried_again_for_a_while() -> None:
    lanes = Lanes()
    assert [lanes.work(0.5) for _ in range(21)] == [3] + [2] * 20
    assert lanes.work(0.5) == 3


def test_never_more_than_four_per_lane() -> None:
    lanes = Lanes(count=1)
    shares = [0.1 + 0.06 * n for n in range(14)]
    assert max(lanes.work(share) for share in shares) == 4


@pytest.mark.parametrize("reason", [{"memory": False}, {"running": 1}, {"seconds": 0.4}], ids=str)
def test_no_trial_more_without_memory_or_before_anything_is_known(reason: dict[str, float]) -> None:
    assert Lanes().work(0.3, **reason) == 2


def test_short_looks_add_up() -> None:
    lanes = Lanes()
    assert [lanes.work(0.5, seconds=0.2) for _ in range(3)] == [2, 2, 3]


def test_trials_run_one_after_the_other_while_one_lane_is_in_use_and_busy() -> None:
    lanes = Lanes()
    assert [lanes.work(0.95, in_use=1) for _ in range(5)] == [1] * 5
    assert [lanes.work(0.5, in_use=1) for _ in range(2)] == [2, 1]  # such as for loading: tried, and in vain
    assert lanes.work(0.95) == 2
