"""Jobs on a GPU, as far as a machine without one shows it: refusals, and the moving of models and batches to a device."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import Net
from waterflow.errors import InvalidJobError
from waterflow.executor.data.copies import brought
from waterflow.executor.rng import generators_for, set_state_of, state_of
from waterflow.training.build import model_of
from waterflow.training.evaluation import Bringing
from waterflow.training.shards.group import Group
from waterflow.training.shards.runner import memory_of_each
from waterflow.units import check_device

META = torch.device("meta")  # a device that each build of torch has


def never(*_: Any) -> Any:
    raise AssertionError("something was made")


def job(**changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": never, "data": never, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "loss": F.cross_entropy,
    }  # fmt: skip
    return wf.Job("job", **(settings | changes))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    yield


# -- refusals


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda", 0)])
def test_without_a_gpu_it_is_refused_before_anything_is_made(device: Any, tmp_path: Path) -> None:
    study = optuna.create_study()
    why = r"device 'cuda.*' cannot be used: this torch \(.*\) (was built without CUDA|finds no GPU)"
    with pytest.raises(InvalidJobError, match=why):
        wf.train([job()], device=device, checkpoint=tmp_path / "folder")
    with pytest.raises(InvalidJobError, match=why):
        wf.train([job(shards=2)], devices=["cuda:0"], checkpoint=tmp_path / "folder")
    with pytest.raises(InvalidJobError, match=why):
        wf.optimize(study, never, n_trials=3, device=device, catch=Exception)
    with pytest.raises(InvalidJobError, match=why):
        wf.Engine(device)
    assert not study.trials and not (tmp_path / "folder").exists()


def test_a_gpu_beyond_the_last_is_refused(two_gpus: None, tmp_path: Path) -> None:
    check_device("cuda:1")
    with pytest.raises(InvalidJobError, match="'cuda:2' of 2 GPU.*the last is 'cuda:1'"):
        wf.train([job()], device="cuda:2", checkpoint=tmp_path / "folder")
    with pytest.raises(InvalidJobError, match="'cuda:2' of 2 GPU.*the last is 'cuda:1'"):
        wf.train([job(shards=2)], devices=["cuda:1", "cuda:2"], checkpoint=tmp_path / "folder")
    with pytest.raises(InvalidJobError, match="'mps' is not supported"):
        wf.train([job()], device="mps", checkpoint=tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_generator_of_another_device() -> None:
    model = Net()
    generator = types.SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(InvalidJobError, match=r"generator is on cuda:0 and the model on cpu.*torch.Generator\('cpu'\)"):
        wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), generator=generator)


# -- what is moved


def test_a_model_and_its_loss_are_moved_in_place() -> None:
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.CrossEntropyLoss(weight=torch.ones(4))
    moved = model_of(job(model=lambda: model, loss=loss), generators_for(torch.device("cpu"), 0), META)
    assert moved is model
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), loss.weight))


def test_a_model_without_values_is_told_as_such() -> None:
    with torch.device("meta"):
        model = Net()
    result = wf.train([job(model=lambda: model, data=[])], on_error="continue")[0]
    assert isinstance(result.error, InvalidJobError) and "materialize it first" in str(result.error)


def test_batches_are_brought() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    batch = {"x": [x, x, x.t()], "n": 3, "grad": torch.zeros(1, requires_grad=True)}
    there = brought(batch, META)
    assert there["x"][0] is there["x"][1] and there["n"] == 3 and there["grad"].requires_grad
    assert there["x"][2].is_meta and there["x"][2].stride() == x.t().stride()
    assert brought(there, META) is there and brought(batch, torch.device("cpu")) is batch


def test_in_an_evaluation_operations_on_two_devices_are_done_on_the_models() -> None:
    here, there = torch.ones(3), torch.ones(3, device=META)
    with pytest.raises(RuntimeError, match="not on the expected device"):
        here == there  # noqa: B015
    with Bringing(META):
        assert (here == there).is_meta and (there + here).is_meta and (here + here).device.type == "cpu"
        with pytest.raises(RuntimeError, match="must match the size"):
            here + torch.ones(2)

    def add_(*given: torch.Tensor) -> None:
        raise RuntimeError("on two devices")

    with pytest.raises(RuntimeError, match="on two devices"):
        Bringing(META).__torch_function__(add_, (), (here, there))  # it would change a copy


def test_states_of_generators_go_between_kinds_of_devices() -> None:
    """A GPU's jobs have two generators, of which the CPU's comes first; a job that goes on elsewhere has that one's state."""
    two, one = [torch.Generator().manual_seed(seed) for seed in (1, 2)], [torch.Generator()]
    state = state_of(two)
    drawn = [torch.rand(3, generator=generator) for generator in two]
    set_state_of(one, state)
    assert torch.equal(torch.rand(3, generator=one[0]), drawn[0])
    other = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(2)]
    set_state_of(other, state_of(two[:1]))
    assert torch.equal(torch.rand(3, generator=other[1]), drawn[1]), "has no state there, and stays as it is"
    set_state_of(two, state)
    assert all(torch.equal(torch.rand(3, generator=generator), numbers) for generator, numbers in zip(two, drawn))


# -- one job on several devices


def test_the_limit_on_gpus_is_theirs(two_gpus: None) -> None:
    """A share is of what each finds free on its own GPU, not of the host's memory."""
    jobs = [job(shards=2)] * 2
    assert memory_of_each(jobs, ["cuda:0", "cuda:1"], None, None) == (None, 2)
    assert memory_of_each(jobs, ["cuda:0"], 0.5, 1) == (0.5, 1)
    assert memory_of_each(jobs, ["cpu:0", "cpu:1"], "4GiB", None) == (2 << 30, 1)
    assert memory_of_each(jobs, None, "4GiB", None) == ("4GiB", 1)


def test_sends_of_nccl_are_issued_together() -> None:
    class NCCL:
        """As ``ProcessGroupNCCL`` of torch: neither call takes a device."""

        told = ""

        def _start_coalescing(self) -> None:
            self.told += "("

        def _end_coalescing(self) -> Any:
            self.told += ")"
            return types.SimpleNamespace(wait=lambda: None)

        def send(self) -> None:
            self.told += "send"

    group = Group.__new__(Group)
    group._device, group._sums = torch.device("cuda", 0), NCCL()
    with group._at_once():
        group._sums.send()
    assert group._sums.told == "(send)"
    if hasattr(dist, "ProcessGroupNCCL"):
        assert "_start_coalescing(self" in dist.ProcessGroupNCCL._start_coalescing.__doc__
        assert "device" not in dist.ProcessGroupNCCL._start_coalescing.__doc__
