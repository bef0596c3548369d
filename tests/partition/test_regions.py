"""Regions: what belongs to them, and that calling them in its place changes nothing but who computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import assert_same, train_eager, train_step
from waterflow.executor import variants
from waterflow.executor.captured import CapturedStep, assemble, captures
from waterflow.partition import regions as regions_module
from waterflow.partition.capture import Capture
from waterflow.partition.operators import is_random
from waterflow.partition.regions import Loaded, Regions
from waterflow.partition.structure import flatten

pytestmark = pytest.mark.slow

aten = torch.ops.aten
_modules: list[fx.GraphModule] = []
_library = torch.library.Library("waterflow_test", "FRAGMENT")
_library.define("interpreted(int region, Tensor[] inputs) -> Tensor[]")
_library.impl("interpreted", lambda region, inputs: list(_modules[region](*inputs)), "CPU")


def interpreting(captured: CapturedStep, threads: int, always: bool) -> CapturedStep:
    """In the place of ``compiling``: regions run operation by operation, through the interpreter, with the same bits."""
    regions = Regions(captured.capture)
    loaded = {}
    for stage, region in regions.found.items():
        loaded[stage] = Loaded(len(_modules), 0, {})
        _modules.append(region.module)
    capture = regions.replaced(loaded)
    for node in capture.graph.nodes:
        if node.target is torch.ops.waterflow.compiled.default:
            node.target = torch.ops.waterflow_test.interpreted.default
    return assemble(capture, "interpreted", captured.keep)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps that are to be compiled are interpreted; even a single operation makes a region."""
    monkeypatch.setattr(variants, "compiling", interpreting)
    monkeypatch.setattr(regions_module, "LEAST_OPERATIONS", 1)
    captures.clear()
    yield
    captures.clear()
    _modules.clear()


_LARGE = ("inception_v3", "nasnet", "tacotron2")
_NAMES = [pytest.param(name, marks=pytest.mark.campaign) if name in _LARGE else name for name in SMALL]


@pytest.mark.parametrize("name", _NAMES)
def test_regions_have_the_bits_of_the_operations_that_they_stand_for(name: str, interpreted: None) -> None:
    zoo = SMALL[name]
    generator = torch.Generator().manual_seed(1)
    batches = [zoo.batch(2, generator) for _ in range(4)]

    def make() -> Any:
        model = zoo.build()
        return model, zoo.optimizer(model.parameters())

    ours = train_step(make, batches, step=zoo.step, compile="inductor-always")
    assert ours.step is not None and ours.step.opaque_reason is None and _modules
    assert_same(ours, train_eager(make, batches, step=zoo.step))


class Net(nn.Module):
    """Dropout in two places, one of them behind a view that is laid out otherwise."""

    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.relu(self.first(x)))
        x = self.drop(self.norm(self.second(x)).t()).t()
        return self.third(F.gelu(x))


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)) for _ in range(count)]


def _capture(step: Any = _classify, rate: float = 0.4, **settings: Any) -> Capture:
    model = Net(rate)
    made = wf.Step(model, step=step, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), **settings)
    return made._variants.captured(*flatten(_batches(1)[0])).capture


def test_random_operations_and_updates_are_no_part_of_regions() -> None:
    capture = _capture()
    regions = Regions(capture)
    assert [r.nodes[0].meta["phase"] for r in regions.found.values()] == ["forward", "backward"]
    rates = {name for name, _ in capture.dropout_rates}
    for node in (node for region in regions.found.values() for node in region.nodes):
        assert not is_random(node.target) and node.meta["phase"] != "update"
        assert node.target is not aten.empty_like.default and node.name not in rates


def test_random_operations_keep_their_order_and_their_rates() -> None:
    capture = _capture()
    replaced = Regions(capture).replaced({})
    before, after = ([n.name for n in c.graph.nodes if is_random(n.target)] for c in (capture, replaced))
    assert before == after and len(before) == 2
    assert replaced.dropout_rates == capture.dropout_rates and replaced.update_groups == capture.update_groups


def _doubled(model: nn.Module, batch: Any) -> torch.Tensor:
    made = model(batch[0])
    made.mul_(torch.ones_like(made).uniform_(0.5, 1.0))  # a random number between two regions changes what one made
    return F.cross_entropy(made.tanh(), batch[1])


def _summed(model: nn.Module, batch: Any) -> torch.Tensor:
    made = model(batch[0])
    kept = made.view(-1)[3:9]  # of what is changed behind it
    made.add_(1.0)
    return F.cross_entropy(made, batch[1]) + kept.sum()


@pytest.mark.parametrize("step", [_doubled, _summed])
def test_regions_change_only_what_they_make(step: Any) -> None:
    regions = Regions(_capture(step))
    assert regions.found
    for region in regions.found.values():
        made = {storage for node in region.nodes for storage in regions._storages[node]}
        given = {storage for node in region.inputs for storage in regions._storages[node]}
        for node in region.nodes:
            if node.target._schema.is_mutable:  # type: ignore[union-attr]
                changed = set(regions._storages[node.args[0]])  # type: ignore[index]
                assert made >= changed and not given & changed


@pytest.mark.parametrize("step", [_classify, _doubled, _summed])
@pytest.mark.parametrize(
    "settings", [{}, {"clip_grad_norm": 0.1}, {"accumulate": 2}, {"autocast": torch.bfloat16}], ids=str
)
def test_steps_of_all_kinds_keep_their_bits(step: Any, settings: dict[str, Any], interpreted: None) -> None:
    def make() -> Any:
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ours = train_step(make, _batches(5), step=step, compile="inductor-always", **settings)
    assert ours.step is not None and ours.step.opaque_reason is None and _modules
    assert_same(ours, train_step(make, _batches(5), step=step, **settings))
