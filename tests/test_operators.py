"""Every operator with a gradient that torch lists trains with the bits of the eager loop."""

from __future__ import annotations

import pytest

from tests.operator_sweep import MOST_REFUSED, Sweep


@pytest.mark.slow
def test_every_operator_trains_as_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")  # else code that differs would run eagerly
    sweep = Sweep()
    sweep.run(samples=3)
    assert sweep.run_both_ways > 500
    assert not sweep.differing
    assert len(sweep.refused) <= MOST_REFUSED * sweep.run_both_ways, sweep.refused
