"""What finds the faults that tests plant: where it is switched off, each of those tests fails.

Faults are planted beside what they are about: leaks of guards in ``test_planted_leaks``, the allocator's mistakes in
``allocator/test_planted_bugs``, admission's in ``executor/test_admission``, the order on the device in ``executor/test_device_order``
and ``allocator/test_arena``, and here one bit in a kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import support, test_planted_leaks
from tests.allocator import oracle, test_arena, test_fuzz, test_planted_bugs
from tests.executor import test_admission, test_cross_lane_fences as test_device_order
from tests.native import SimulatedDevice, StreamAllocator, run_fuzz
from tests.support import assert_same, images, train_eager, train_step
from waterflow import _C
from waterflow.executor.audit import BothWays

Test = Callable[[pytest.MonkeyPatch, Any], None]  # with what is captured
Off = Callable[[pytest.MonkeyPatch], None]


# -- one bit in a kernel


@pytest.fixture(autouse=True)
def _no_audits(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    test_planted_leaks.no_audits(monkeypatch)


@pytest.fixture
def wrong_relu() -> Iterator[None]:
    with planted_bit():
        yield


@contextlib.contextmanager
def planted_bit() -> Iterator[None]:
    """Within, our kernel of ReLU gives one wrong bit in each step that is captured."""
    assert hasattr(_C, "plant_wrong_bit"), "the extension was built without WATERFLOW_TEST_HOOKS=1; make build sets it"
    _C.plant_wrong_bit("waterflow::relu")
    try:
        yield
    finally:
        _C.plant_wrong_bit("")


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_audit_finds_one_wrong_bit_of_a_kernel(wrong_relu: None) -> None:
    trained = train_step(small, images(3), loss=F.cross_entropy, audit=1)
    assert trained.step is not None and trained.step.audit.passed == 0
    assert "the captured step is not the eager one" in str(trained.step.opaque_reason)
    assert_same(trained, train_eager(small, images(3)))


def test_bits_are_compared_one_by_one(wrong_relu: None) -> None:
    trained = train_step(small, images(3), loss=F.cross_entropy)
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(trained, train_eager(small, images(3)))


def test_without_the_fault_nothing_is_found() -> None:
    with planted_bit():
        pass
    trained = train_step(small, images(3), loss=F.cross_entropy, audit=1)
    assert trained.step is not None and trained.step.audit.passed == 3


@pytest.mark.parametrize("name", ["waterflow::none", "relu"])
def test_a_kernel_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"no kernel is called '{name}'"):
        _C.plant_wrong_bit(name)


# -- what finds them


def no_comparison_of_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BothWays, "_compare", lambda self, *ways: None)


def no_comparison_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "same_bits", lambda one, other: True)


def no_checks_of_random_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_planted_bugs, "run_fuzz", lambda table, setup: run_fuzz(table, replace(setup, checked=False)))


def no_checks_of_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_planted_bugs, "CONTENTS", test_planted_bugs.CONTENTS.replace("fault=", "checked=False, fault="))


def no_checks_of_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(SimulatedDevice):
        def access(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(test_planted_bugs, "SimulatedDevice", Blind)
    monkeypatch.setattr(StreamAllocator, "check", lambda self: None)


def no_look_at_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle.GraphDevice, "access", lambda self, *access: None)
    monkeypatch.setattr(oracle.GraphDevice, "shrink", lambda self, at, size: None)


def no_look_at_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    for finder in ("verify", "verify_turn", "verify_end"):
        monkeypatch.setattr(test_admission.Driver, finder, lambda self, *arguments: None)


def no_look_at_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_device_order, "unordered", lambda groups: [])


def no_device_that_runs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_arena, "behind", lambda seed: None)


def plain(test: Callable[..., None], *arguments: Any) -> Test:
    """A test that needs nothing else."""
    return lambda monkeypatch, captured: test(*arguments)


def with_bit(test: Callable[..., None]) -> Test:
    def run(monkeypatch: pytest.MonkeyPatch, captured: Any) -> None:
        captured.clear()
        with planted_bit():
            test(None)

    return run


def leak(test: Callable[..., None], kind: str) -> Test:
    return lambda monkeypatch, captured: test(kind, monkeypatch, captured)


ROWS: dict[str, tuple[Test, Off]] = {
    "a bit, by an audit": (with_bit(test_an_audit_finds_one_wrong_bit_of_a_kernel), no_comparison_of_audits),
    "a bit, by its tensors": (with_bit(test_bits_are_compared_one_by_one), no_comparison_of_bits),
    **{
        kind: (leak(test_planted_leaks.test_what_a_guard_would_miss_an_audit_finds, kind), no_comparison_of_audits)
        for kind in test_planted_leaks.TABLE
    },
    **{
        f"judge of {kind}": (
            leak(test_planted_leaks.test_what_the_judge_would_let_pass_an_audit_finds, kind), no_comparison_of_audits,
        )
        for kind in test_planted_leaks.JUDGED
    },
    **{
        f"allocator, random runs: {fault}": (
            plain(test_planted_bugs.test_random_runs_find_it, fault), no_checks_of_random_runs,
        )
        for fault in test_planted_bugs.SIGNS if fault != "none"
    },
    **{
        f"allocator: {fault}, {case.__name__}": (
            plain(test_planted_bugs.test_the_shortest_way_to_it, fault, case), no_checks_of_accesses,
        )
        for fault, case in test_planted_bugs.DIRECT
    },
    "allocator, contents": (plain(test_planted_bugs.test_contents_on_the_cpu_show_it), no_checks_of_contents),
    **{
        f"allocator, oracle: {fault}": (plain(test_fuzz.test_the_oracle_sees, fault), no_look_at_the_graph)
        for fault in ("dropped_wait", "no_rerecord", "free_under_allocator")
    },
    **{
        f"admission: {fault}": (plain(test_admission.test_planted_faults_are_found, fault), no_look_at_admission)
        for fault in test_admission.FAULTS
    },
    "order on the device: heights": (
        plain(test_device_order.test_planted_heights_compared_at_events_instead_of_peaks, False), no_look_at_the_order,
    ),
    "order on the device: waits": (
        plain(test_device_order.test_planted_dropped_waits, False), no_look_at_the_order,
    ),
    "order on the device: numbers": (
        plain(functools.partial(test_arena.find_a_missing_wait, seeds=range(1, 4))), no_device_that_runs_behind,
    ),
}  # fmt: skip


@pytest.mark.needs_time("real steps, and random runs, are looked at in vain")
@pytest.mark.parametrize("what", [pytest.param(w, marks=pytest.mark.slow) if w.endswith(": numbers") else w for w in ROWS])
def test_where_its_finder_is_switched_off_nothing_is_found(what: str, monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    test, off = ROWS[what]
    off(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(monkeypatch, no_captures)
