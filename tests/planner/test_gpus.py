"""GPUs by name."""

from __future__ import annotations

import dataclasses

import pytest

import waterflow as wf
from waterflow.planner.gpus import GPU, GPUS, gpu


def test_names_lead_to_their_gpu_in_any_case() -> None:
    assert [gpu(each.name) for each in GPUS] == list(GPUS)
    assert gpu(" V100-32G ") is gpu("v100-32g")
    names = "p100-16g v100-32g a100-40g a100-80g h100-80g h200-141g rtx4090-24g"
    assert [each.name for each in GPUS] == names.split()


@pytest.mark.parametrize("each", GPUS, ids=lambda each: each.name)
def test_figures_are_those_of_their_names(each: GPU) -> None:
    stated = int(each.name.rsplit("-", 1)[1].removesuffix("g"))
    # Cards are sold in some mixture of 10**9 and 2**30 bytes, and drivers keep some.
    assert 0.98 * stated * 10**9 < each.memory < stated * 2**30
    assert 200 * 2**20 < each.context < 2**30 and each.usable == each.memory - each.context
    assert 500 < each.memory_rate < 5_000 and 5_000 < each.compute_rate < 100_000


def test_an_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(wf.InvalidJobError, match=r"'v100'; did you mean v100-32g\? Known are p100-16g, v100-32g, a100"):
        gpu("v100")
    with pytest.raises(wf.InvalidJobError, match="did you mean rtx4090-24g"):
        gpu("4090")


def test_rates_must_be_positive() -> None:
    with pytest.raises(wf.InvalidJobError, match="must be positive"):
        dataclasses.replace(gpu("v100-32g"), memory_rate=0)
