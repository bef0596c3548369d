"""A job ends with the same bits, whether captured or eager, alone or among others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.zoo import SMALL, ZooModel
from tests.support import MiB, Trained, assert_same, run_steps, train_eager, train_step
from waterflow.executor.engine import Engine

pytestmark = pytest.mark.needs_time("the bits of real models, captured, among others and in tight memory")

STEPS = 5
BATCH = 2
LARGE = ("inception_v3", "nasnet")
# Models whose five steps take milliseconds are drawn more often than those that take seconds.
WEIGHTS = {"inception_v3": 0.1, "resnet50": 0.3, "nasnet": 0.3, "tacotron2": 0.5}

_references: dict[tuple[str, int], Trained] = {}


def batches_of(zoo: ZooModel, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed + 100)
    return [zoo.batch(BATCH, generator) for _ in range(STEPS)]


def train(zoo: ZooModel, seed: int, run: Any, **options: Any) -> Trained:
    def make() -> Any:
        model = zoo.build()
        return model, zoo.optimizer(model.parameters())

    return run(make, batches_of(zoo, seed), step=zoo.step, seed=seed, **options)


def reference(name: str, seed: int) -> Trained:
    """The job alone, eager."""
    if (name, seed) not in _references:
        _references[name, seed] = train(SMALL[name], seed, train_eager)
    return _references[name, seed]


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    _references.clear()


def together(names: Sequence[str], engine: Engine) -> list[Trained]:
    """Train all of them at the same time, each from a thread of its own; job i has seed i."""
    made = []
    for seed, name in enumerate(names):  # building draws from the default generator: one after the other
        torch.manual_seed(seed)
        model = SMALL[name].build()
        made.append((model, SMALL[name].optimizer(model.parameters())))
    results: list[Any] = [None] * len(names)

    def work(number: int) -> None:
        zoo = SMALL[names[number]]
        try:
            results[number] = run_steps(*made[number], batches_of(zoo, number), step=zoo.step, seed=number, engine=engine)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(names))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120
    while (running := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < until:
        engine.native.check()
        running[0].join(0.01)
    assert not any(thread.is_alive() for thread in threads), "the jobs never end"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def assert_all_as_alone(names: Sequence[str], trained: Sequence[Trained]) -> None:
    for seed, (name, result) in enumerate(zip(names, trained)):
        assert result.step is not None and result.step.opaque_reason is None, (name, result.step.opaque_reason)
        assert_same(result, reference(name, seed))
        result.step.close()


@pytest.fixture(params=[None, 7], ids=["plain", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> int | None:
    """In its plain mode a CPU does everything when it is issued; a missing wait shows in the other one only."""
    return request.param


def mix_of(seed: int, count: int = 4) -> list[str]:
    names = list(SMALL)
    return random.Random(seed).choices(names, [WEIGHTS.get(name, 1.0) for name in names], k=count)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in SMALL])
def test_alone(name: str) -> None:
    trained = train(SMALL[name], 0, train_step)
    assert trained.step is not None and trained.step.opaque_reason is None
    assert_same(trained, reference(name, 0))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3])
def test_four_jobs_on_two_lanes(seed: int, asynchronous: int | None) -> None:
    names = mix_of(seed)
    with Engine(memory="4GiB", lanes=2, asynchronous=asynchronous) as engine:
        assert_all_as_alone(names, together(names, engine))
        planned, missed, _ = engine.native.placed
        assert planned > 0 and missed == 0
        assert engine.native.peak_held <= engine.native.capacity
        engine.native.check()


@pytest.mark.parametrize("lanes", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16))])
def test_more_lanes(lanes: int, asynchronous: int | None) -> None:
    names = mix_of(lanes, count=5)
    with Engine(memory="4GiB", lanes=lanes, asynchronous=asynchronous) as engine:
        assert_all_as_alone(names, together(names, engine))
        engine.native.check()


def test_the_same_model_four_times() -> None:
    names = ["mlp_dropout"] * 4
    with Engine(memory="1GiB", lanes=2) as engine:
        assert_all_as_alone(names, together(names, engine))


def test_one_lane_and_more_lanes_than_jobs() -> None:
    names = ["vit", "lstm"]
    for lanes in (1, 3):
        with Engine(memory="1GiB", lanes=lanes) as engine:
            assert_all_as_alone(names, together(names, engine))


def tight_limit(names: Sequence[str], slack: float) -> int:
    """A limit in which all states fit, and steps only ``slack`` of the way between one and all of them."""
    persistent, heights = 0, []
    for seed, name in enumerate(names):
        step = train(SMALL[name], seed, train_step).step
        assert step is not None
        persistent += step.plan.persistent + step.plan.batch
        # The first steps are issued with the predicted plan.
        heights.append(max(step.plan.height, step.predicted_height))
    room = max(heights) + int(slack * (sum(heights) - max(heights)))
    return persistent + room


@pytest.mark.parametrize("seed", [10, 11, 12, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slack", [0.0, 0.3])
def test_tight_memory(seed: int, slack: float, asynchronous: int | None) -> None:
    names = mix_of(seed)
    limit = tight_limit(names, slack)
    lanes = {10: 3, 11: 8, 12: 16, 13: 4}[seed]
    with Engine(memory=limit, lanes=lanes, reserve=0, asynchronous=asynchronous) as engine:
        assert_all_as_alone(names, together(names, engine))
        assert 0 < engine.native.peak_held <= engine.limit
        assert engine.native.placed[0] > 0
        engine.native.check()


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 140))
def test_random_mixes(seed: int) -> None:
    draw = random.Random(seed)
    names = mix_of(seed, count=draw.randint(2, 6))
    limit = tight_limit(names, draw.random()) if draw.random() < 0.5 else 4096 * MiB
    asynchronous = draw.choice([None, seed])
    with Engine(memory=limit, lanes=draw.choice([1, 2, 3, 4, 8, 16]), reserve=0, asynchronous=asynchronous) as engine:
        assert_all_as_alone(names, together(names, engine))
        engine.native.check()
