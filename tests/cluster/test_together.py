"""Jobs in sets for devices: what each of them takes is what an engine there would give it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support import images
from tests.test_recompute import Deep
from waterflow.cluster.hand_in import memory_of, sets_that_fit
from waterflow.executor.memory_limit import reserve_of


def deep(recompute: str | None) -> wf.Job:
    data = images(1, size=256, shape=(32,))
    return wf.Job("deep", Deep, data, torch.optim.SGD, loss=nn.functional.cross_entropy, recompute=recompute)


def test_jobs_that_may_recompute_count_as_low_as_a_device_makes_them() -> None:
    needed = memory_of([deep(None)])
    memory = needed * 5 // 4  # of which a quarter is the reserve
    (alone,) = sets_that_fit([deep("auto")], memory)
    assert len(alone.jobs) == 1 and 0 < alone.memory <= memory - reserve_of(memory) < needed
    with pytest.raises(wf.MemoryLimitError, match="job 'deep' does not fit: .* with recompute='auto' this one fits"):
        sets_that_fit([deep(None)], memory)


def test_who_cannot_be_captured_is_alone() -> None:
    def looks(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() >= 0 else -loss

    eager = wf.Job("eager", Deep, images(1, size=8, shape=(32,)), torch.optim.SGD, step=looks)
    sets = sets_that_fit([eager, deep(None), deep(None)], 1 << 30)
    assert [[job.name for job in one.jobs] for one in sets] == [["deep", "deep"], ["eager"]]
    assert sets[0].memory > 0 == sets[1].memory == memory_of([eager, deep(None)])
