"""Programs with hidden state of every kind end with the same bits as in eager training, or run eagerly and say why."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import program_runs
from tests.program_campaign import Campaign, shrunk, singles
from tests.random_programs import KINDS, MODES, WAYS, programs, single


@pytest.fixture(autouse=True)
def _no_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What guards miss is to be seen here: an audit would mend it."""
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")


def assert_none_differs(campaign: Campaign) -> None:
    assert not campaign.failing, f"{campaign.failing[0][1]}\n{campaign.failing[0][0].source()}"
    if campaign.differing:
        smallest = shrunk(campaign.differing[0])
        found = smallest.compare().differences
        pytest.fail(f"{len(campaign.differing)} programs differ, one of them by {found[:5]}:\n{smallest.script()}")


@pytest.mark.needs_time("programs of all kinds, in short: each captured and eager")
def test_programs_of_all_kinds() -> None:
    campaign = Campaign()
    campaign.run(30, 1)
    assert_none_differs(campaign)
    assert campaign.total.captured >= 0.3 * campaign.total.steps


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_each_state_alone(kind: str) -> None:
    for program in singles(kind):
        found = program.compare().differences
        assert not found, f"{found[:5]}\n{program.script()}"


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_ten_thousand_programs() -> None:
    campaign = Campaign()
    campaign.run(10_000, 2)
    assert_none_differs(campaign)
    assert campaign.total.captured >= 0.3 * campaign.total.steps
    assert campaign.tallies.keys() == KINDS.keys() and campaign.ways.keys() == WAYS.keys()
    rare = {kind: tally.changed for kind, tally in campaign.tallies.items() if tally.changed < 300}
    assert not rare


# -- the comparison itself


def test_equal_seeds_give_equal_programs() -> None:
    texts = [[program.source() for program in programs(20, 5)] for _ in range(2)]
    assert texts[0] == texts[1] != [program.source() for program in programs(20, 6)]


def test_modes_are_drawn() -> None:
    assert {piece.mode for program in programs(100, 0) for piece in program.pieces} == set(MODES)


def test_a_step_that_misses_a_change_is_found_and_made_smaller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted mistake: what plays the step under test never sees a second value of the closure cell."""

    class Stale(program_runs.Captured):
        def __call__(self, model: Any, *, step: Any, **arguments: Any) -> Any:
            cells = dict(zip(step.__code__.co_freevars, step.__closure__ or ()))
            first = cells["x1"].cell_contents

            def stale(*given: Any) -> Any:
                now, cells["x1"].cell_contents = cells["x1"].cell_contents, first
                try:
                    return step(*given)
                finally:
                    cells["x1"].cell_contents = now

            return program_runs.Eager()(model, step=stale, **arguments)

    program = single("closure cells", KINDS["closure cells"][0], "between")
    assert not program.compare().differences
    monkeypatch.setattr(program_runs, "Captured", Stale)
    smallest = shrunk(program)
    assert any("losses" in path for path in smallest.compare().differences)
    script = types.ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)
    exec(compile(smallest.script(), "script.py", "exec"), vars(script))
    assert not script.compare(script.program).differences  # the real step sees it
    assert "x1" in smallest.source() and len(smallest.source()) < len(program.source())


def test_bits_and_fake_tensors_are_compared() -> None:
    items = [dict(program_runs.items_of(value)) for value in (torch.zeros(2), -torch.zeros(2), [0.0], [-0.0])]
    assert items[0] != items[1] and items[2] != items[3]
    with FakeTensorMode() as mode:
        fake = torch.empty(2)
    assert list(program_runs.items_of(fake)) == [("", ("fake tensor",))]

    def keeps() -> None:
        pass

    keeps.kept = {"deep": [fake]}  # type: ignore[attr-defined]
    assert program_runs.fakes_within([keeps], {"__name__": __name__})
    del mode
