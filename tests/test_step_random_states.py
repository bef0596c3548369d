"""Steps that read, set and fork the state of the default generator, as ``torch.utils.checkpoint`` does: the bits of eager steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import MiB, assert_same, compare, images, same_bits, train_eager, train_step
from waterflow.executor.engine import Engine
from waterflow.partition.capture.rng_ops import touches_state
from waterflow.partition.guards.step_key import flatten

again = functools.partial(checkpoint, use_reentrant=False)
Block = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


class Noisy(nn.Module):
    """Two layers that draw in some way, called by ``how`` with the layer's number."""

    def __init__(self, how: Callable[[Noisy, int, torch.Tensor], torch.Tensor], draw: str = "dropout") -> None:
        super().__init__()
        self.how, self.draw = how, draw
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.drop = nn.Dropout(0.4)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        """What the layers compute with their input and random numbers."""
        if self.draw == "dropout":
            return self.drop(x)
        if self.draw == "rand_like":
            return x * torch.rand_like(x)
        if self.draw == "bernoulli of values":
            return x * torch.bernoulli(x.detach().sigmoid())
        if self.draw == "multinomial":
            return x[torch.multinomial(x.detach().softmax(0)[:, 0], 8, replacement=True)]
        if self.draw == "normal":
            return x + torch.normal(x.detach(), 0.1) * torch.randn(1)  # one number: leaves another behind
        if self.draw == "gumbel":
            return F.gumbel_softmax(x, tau=0.7)
        return F.feature_alpha_dropout(x, 0.3)

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One of them."""
        return torch.tanh(self.layers[number](self.noise(torch.sin(self.layers[number](x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in range(2):
            x = self.how(self, number, x)
        return self.last(self.noise(x))


def _selective(model: Noisy, number: int, x: torch.Tensor) -> torch.Tensor:
    save = [torch.ops.aten.addmm.default]
    contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, save)
    return again(functools.partial(model.layer, number), x, context_fn=contexts)


def _nested(model: Noisy, number: int, x: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return model.noise(again(functools.partial(model.layer, 1 - number), model.layer(number, model.noise(x))))

    return again(outer, x)


def _without_early_stop(model: Noisy, number: int, x: torch.Tensor) -> torch.Tensor:
    with checkpointing.set_checkpoint_early_stop(False):
        return again(functools.partial(model.layer, number), x)


def _forked(model: Noisy, number: int, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        if number:
            torch.manual_seed(-7)
        x = model.layer(number, x)
    return model.noise(x)


def _by_hand(model: Noisy, number: int, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    x = model.layer(number, x)
    torch.set_rng_state(state)
    return model.noise(x)


HOW: dict[str, Callable[[Noisy, int, torch.Tensor], torch.Tensor]] = {
    "plain": lambda model, number, x: again(functools.partial(model.layer, number), x),
    "one of two": lambda model, number, x: model.layer(0, x) if number else again(functools.partial(model.layer, 1), x),
    "nested": _nested,
    "new masks": lambda model, number, x: again(functools.partial(model.layer, number), x, preserve_rng_state=False),
    "selective": _selective,
    "no early stop": _without_early_stop,
    "no check": lambda model, number, x: again(functools.partial(model.layer, number), x, determinism_check="none"),
    "forked": _forked,
    "by hand": _by_hand,
}
DRAWS = ["dropout", "rand_like", "bernoulli of values", "multinomial", "normal", "gumbel", "alpha dropout"]


def making(model: Callable[[], nn.Module], optimizer: Any = AdamW) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model()
        return made, optimizer(made.parameters(), lr=0.05, fused=True)

    return make


def check(make: Any, engine: Engine | None, opaque: str | None = None, count: int = 4, **options: Any) -> None:
    """The same bits, and the generators stand where they stand behind eager steps."""
    batches = options.pop("batches", None) or images(count)
    train_eager(make, batches, **options)
    behind = torch.get_rng_state()
    mine = compare(make, batches, engine=engine, opaque=opaque, **options)
    assert mine.step is not None
    if engine is None:
        assert same_bits(torch.get_rng_state(), behind)
        return
    assert mine.step.generator is not None and same_bits(mine.step.generator.get_state(), behind)
    left = torch.get_rng_state()
    torch.manual_seed(5)
    assert same_bits(torch.get_rng_state(), left), "a job with a generator of its own leaves the process's alone"


@pytest.mark.parametrize("how", HOW)
def test_ways_to_draw_again(how: str, engine: Engine | None) -> None:
    check(making(lambda: Noisy(HOW[how])), engine)


def test_selective_checkpointing_leaves_no_notes_for_the_next_trace(engine: Engine | None) -> None:
    """torch.compile fails on such notes."""
    before = dict(fx_traceback.current_meta)
    check(making(lambda: Noisy(HOW["selective"])), engine)
    assert fx_traceback.current_meta == before


@pytest.mark.parametrize("how", ["plain", "nested", "by hand"])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_again(draw: str, how: str, engine: Engine | None) -> None:
    if draw == "multinomial" and how == "nested":
        how = "forked"
    check(making(lambda: Noisy(HOW[how], draw), SGD), engine)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"autocast": torch.bfloat16}, {"clip_grad_norm": 0.1}], ids=str)
def test_with_other_settings(options: dict[str, Any], engine: Engine | None) -> None:
    check(making(lambda: Noisy(HOW["nested"])), engine, **options)


@pytest.mark.parametrize("how", HOW)
def test_opaque_steps(how: str, engine: Engine | None) -> None:
    """What asks for the state of the default generator asks for that of the job's own."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 1.5 else loss

    check(making(lambda: Noisy(HOW[how])), engine, opaque="step reads the values", step=step)


def test_opaque_steps_that_gather(engine: Engine | None) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 1.5 else loss

    check(making(lambda: Noisy(HOW["nested"])), engine, opaque="step reads the values", step=step, accumulate=2)


def test_a_state_from_outside_of_the_step(engine: Engine | None) -> None:
    """Each step restores a state that is kept beside the model."""
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.set_rng_state(state)
        return F.cross_entropy(model(batch[0]), batch[1])

    check(making(lambda: Noisy(HOW["plain"])), engine, step=step)


def test_a_seed_in_each_step(engine: Engine | None) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(2**64 - 3)
        return F.cross_entropy(model(batch[0]), batch[1])

    check(making(lambda: Noisy(HOW["plain"])), engine, step=step)


@pytest.mark.parametrize("ask", ["initial_seed", "seed"])
def test_what_becomes_no_operation(ask: str) -> None:
    """Numbers that Python computes with: the step runs eagerly, also where it goes on without them."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        try:
            return loss * (1 + getattr(torch, ask)() % 2)
        except wf.WaterflowError:
            return loss

    model = Noisy(HOW["plain"])
    job = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.1))
    job(images(1)[0])
    assert job.opaque_reason is not None and f"default generator for its {ask}" in job.opaque_reason


def test_the_generator_itself() -> None:
    """Its methods cannot be followed."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        state = torch.default_generator.get_state()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        torch.default_generator.set_state(state)
        return loss

    check(making(lambda: Noisy(HOW["plain"])), None, opaque="default generator", step=step)


def test_recompute() -> None:
    make = making(lambda: Noisy(HOW["plain"]))
    model, optimizer = make()
    height = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer).plan_for(images(1)[0]).height
    eager = train_eager(make, images(3))
    mine = train_step(make, images(3), recompute=height - 64)
    assert_same(mine, eager)


def test_first_checkpoint_of_a_process() -> None:
    """What torch notes at a function's first call is no change of a step, whoever calls it first."""
    checkpoint = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    vars(checkpoint).pop("__dynamo_disable", None)
    model = nn.Linear(6, 5)

    def step(model: Any, batch: Any) -> torch.Tensor:
        return again(model, batch[0]).square().mean() + 0.0625  # a step that no other test has captured

    job = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.1))
    job.plan_for((torch.randn(3, 6),))
    assert "__dynamo_disable" in vars(checkpoint)


def test_states_that_nobody_needs_are_not_read() -> None:
    """Checkpoints around layers without randomness cost nothing."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Dropout(0.2), nn.Linear(6, 4))

    def step(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in model[:3]:
            x = again(layer, x)
        x = again(lambda x: torch.tanh(model[3](x)), x)
        return F.cross_entropy(model[4](x), batch[1])

    job = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.1))
    captured = job._bound_steps.captured(*flatten(images(1)[0]))
    names = [node.target.name() for node in captured.capture.graph.nodes if node.op == "call_function" and
             not isinstance(node.target, type(len)) and touches_state(node.target)]  # fmt: skip
    assert names == [f"waterflow::{name}" for name in
                     ("random_state", "random_state", "set_random_state", "set_random_state")]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_transformer_with_gradient_checkpointing(reentrant: bool, engine: Engine | None) -> None:
    zoo = SMALL["bert"]

    def model() -> nn.Module:
        made: Any = zoo.build()
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return made.train()

    batches = [zoo.batch(2, torch.Generator().manual_seed(number)) for number in range(3)]
    check(making(model), engine, opaque="checkpoint" if reentrant else None, step=zoo.step, batches=batches)
