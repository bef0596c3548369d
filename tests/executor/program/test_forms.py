"""Which form of a step runs under which ceiling: whole, with activations recomputed, with some in host memory, or none."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import waterflow as wf
from tests.test_recompute import BATCHES, make_deep
from waterflow.errors import MemoryLimitError
from waterflow.executor.program.capture_cache import CapturedStep
from waterflow.executor.program.forms import form_of, placed_height


@pytest.fixture(scope="module")
def whole() -> CapturedStep:
    model, optimizer = make_deep()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
    return step._bound_steps.captured(*step._flat(BATCHES[0]))


def lowest(whole: CapturedStep, offload: bool) -> int:
    with pytest.raises(MemoryLimitError) as refused:
        form_of(whole, 1, offload)
    assert refused.value.needed is not None
    return refused.value.needed


# The ceiling, as a share of the way from the lowest form that recomputes (0) to the whole step (1); whether it may offload.
TABLE = {
    (1.0, False): "whole", (0.8, False): "recomputes", (0.3, False): "recomputes", (0.0, False): "recomputes", (-0.05, False): "none",
    (1.0, True): "whole", (0.3, True): "recomputes", (-0.05, True): "offloads",
}  # fmt: skip


@pytest.mark.parametrize(("ceiling", "form"), TABLE.items(), ids=str)
def test_the_form_below_a_ceiling(ceiling: tuple[float, bool], form: str, whole: CapturedStep) -> None:
    share, offload = ceiling
    low, high = lowest(whole, False), placed_height(whole)
    room = int(low + share * (high - low))
    if form == "none":
        with pytest.raises(MemoryLimitError, match="cannot be brought to a height of") as refused:
            form_of(whole, room, offload)
        assert refused.value.needed == low
        return
    made = form_of(whole, room, offload)
    assert placed_height(made) <= room
    assert form_of(whole, room, offload) is made
    told = "offloads" if made.offloaded is not None else "recomputes" if made.recomputed is not None else "whole"
    assert told == form and (made is whole) is (form == "whole")


def test_offloading_goes_below_recomputing_and_has_an_end(whole: CapturedStep) -> None:
    assert lowest(whole, True) < lowest(whole, False)


def test_without_a_ceiling_or_below_one_it_is_whole(whole: CapturedStep) -> None:
    assert form_of(whole, None) is whole
    model = torch.nn.Linear(4, 2)
    step = wf.Step(model, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    small = step._bound_steps.captured(*step._flat((torch.randn(3, 4), torch.randn(3, 2))))
    assert form_of(small, placed_height(small)) is small
