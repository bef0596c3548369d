"""A thread's own random numbers: whatever draws, and whatever seeds, means those of the thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support import same_bits
from waterflow.executor import rng
from waterflow.executor.rng import generators_for, own_numbers, telling_of_shared_numbers, thread_generator

X = torch.linspace(0.1, 0.9, 64).reshape(8, 8)


def backward_that_draws() -> torch.Tensor:
    x = X.clone().requires_grad_()
    checkpoint(lambda t: F.dropout(t * 2, 0.5), x, use_reentrant=False).sum().backward()
    return x.grad


def recurrent() -> torch.Tensor:
    return nn.LSTM(8, 4, num_layers=3, dropout=0.5)(X[None])[0].detach()


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(7),
    "randn": lambda: torch.randn(7, dtype=torch.float64),
    "randint": lambda: torch.randint(100, (9,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(X),
    "normal": lambda: torch.normal(X, 1.0),
    "normal of a number": lambda: torch.normal(0.0, X),
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.4),
    "multinomial": lambda: torch.multinomial(X, 3),
    "poisson": lambda: torch.poisson(X),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "dropout": lambda: F.dropout(X, 0.5),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5),
    "feature_dropout": lambda: F.dropout2d(X[None, None], 0.5),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "gumbel": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None], dropout_p=0.5),
    "recurrent": recurrent,
    "initialization": lambda: nn.Linear(5, 3).weight.detach(),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "fractional pooling": lambda: F.fractional_max_pool2d(X[None, None], 2, output_size=3),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(X).sample(),
    "binomial": lambda: torch.distributions.Binomial(10, X).sample(),
    "a backward pass that draws": backward_that_draws,
    "vmap": lambda: torch.func.vmap(lambda row: row + torch.rand_like(row), randomness="different")(X),
    "the default generator by name": lambda: torch.rand(5, generator=torch.default_generator),
    "numbers of sparse": lambda: torch.rand(3, 3).to_sparse().to_dense(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_comes_from_the_threads_own(name: str) -> None:
    """With the same bits as from the default generator, which stays where it was; both sequences go on where they stood."""
    draw = DRAWS[name]
    torch.manual_seed(3)
    expected = [draw(), draw(), torch.rand(3)]
    torch.manual_seed(9)
    stood = torch.get_rng_state()
    own = torch.Generator().manual_seed(3)
    with own_numbers(own):
        made = [draw(), draw(), torch.rand(3)]
    assert all(map(same_bits, made, expected))
    assert torch.equal(torch.get_rng_state(), stood)


def operators() -> dict[str, Any]:
    """Those of torch's that take a generator, and run on the CPU with what ``arguments_for`` makes."""
    every = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = {
        name: getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default") for name in every
    }
    return {n: op for n, op in found.items() if any(a.name == "generator" for a in op._schema.arguments) and "fused" not in n}


def arguments_for(name: str, operator: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments without defaults, by their types."""
    out = torch.empty(0, dtype=torch.int64) if name.startswith(("multinomial", "randperm")) else torch.empty(0)
    of_names = {"high": 50, "to": 50, "out": torch.empty_like(X) if name == "normal.Tensor_float_out" else out}
    of_types = {"float": 0.5, "number": 0.5, "int": 5, "List[int]": [4], "Tensor": X.clone()}
    plain, named = [], {}
    for argument in operator._schema.arguments:
        if not argument.has_default_value():
            value = of_names.get(argument.name, of_types.get(str(argument.type)))
            if argument.name == "high" and str(argument.type) == "Tensor":
                value = torch.tensor(50)
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                plain.append(value)
    return plain, named


def test_every_operator_that_takes_a_generator() -> None:
    drew = set()
    for name, operator in operators().items():

        def draw(name: str = name, operator: Any = operator) -> list[torch.Tensor]:
            plain, named = arguments_for(name, operator)
            return [*(one.nan_to_num() for one in tree_leaves(operator(*plain, **named))), torch.get_rng_state()]

        torch.manual_seed(3)
        stood = torch.get_rng_state()
        expected = draw()
        torch.manual_seed(9)
        with own_numbers(torch.Generator().manual_seed(3)):
            made = draw()
        assert all(map(same_bits, made, expected)), name
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(9).get_state()), name
        if not torch.equal(made[-1], stood):
            drew.add(name)
    assert len(drew) > 70, drew


def test_a_generator_that_is_given_is_drawn_from() -> None:
    given, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    with own_numbers(own):
        made = torch.rand(5, generator=given), torch.empty(5).normal_(generator=given)
    again = torch.Generator().manual_seed(1)
    expected = torch.rand(5, generator=again), torch.empty(5).normal_(generator=again)
    assert all(map(same_bits, made, expected))
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(2).get_state())


def test_seeding_and_states_mean_the_threads_own() -> None:
    torch.manual_seed(5)
    stood = torch.get_rng_state()
    own = torch.Generator()
    with own_numbers(own):
        torch.manual_seed(7)
        assert torch.initial_seed() == 7 and own.initial_seed() == 7
        first = torch.rand(4)
        state = torch.get_rng_state()
        assert torch.equal(state, own.get_state())
        second = torch.rand(4)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(4), second)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            assert torch.equal(torch.rand(4), first)
        third = torch.rand(4)
        torch.random.manual_seed(7)
        assert torch.equal(torch.rand(12), torch.cat([first, second, third]))
        torch.default_generator.manual_seed(7)
        assert torch.equal(torch.rand(4), first)
        torch.seed()
        assert torch.initial_seed() == own.initial_seed() != 7
    assert torch.equal(torch.get_rng_state(), stood) and torch.initial_seed() == 5


def test_what_manual_seed_returns_can_be_drawn_from() -> None:
    with own_numbers(torch.Generator()):
        made = torch.rand(5, generator=torch.manual_seed(4))
    assert torch.equal(made, torch.rand(5, generator=torch.Generator().manual_seed(4)))


def test_contexts_nest_and_end_with_an_error() -> None:
    outer, inner = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.manual_seed(3)
    with own_numbers(outer):
        with pytest.raises(KeyError), own_numbers(inner):
            torch.rand(1)
            raise KeyError
        assert thread_generator(torch.device("cpu")) is not None
        torch.rand(1)
        with own_numbers():
            assert thread_generator(torch.device("cpu")) is None
            from_default = torch.rand(1)
        torch.rand(1)
    assert thread_generator(torch.device("cpu")) is None
    for generator, seed, drawn in ((outer, 1, 2), (inner, 2, 1)):
        again = torch.Generator().manual_seed(seed)
        torch.rand(1, generator=again)
        if drawn == 2:
            torch.rand(1, generator=again)
        assert torch.equal(generator.get_state(), again.get_state())
    assert torch.equal(from_default, torch.rand(1, generator=torch.Generator().manual_seed(3)))


def test_threads_draw_at_the_same_time_without_waiting() -> None:
    """One stands in the middle of its context; another draws and seeds, and a third draws from the process's numbers."""
    torch.manual_seed(0)
    entered, leave = threading.Event(), threading.Event()

    def stand() -> None:
        with own_numbers(torch.Generator()):
            entered.set()
            leave.wait(30)

    standing = threading.Thread(target=stand)
    standing.start()
    entered.wait(30)
    made: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        with own_numbers(torch.Generator()):
            torch.manual_seed(seed)
            made[seed] = torch.cat([torch.rand(3000 + n) for n in range(50)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    process = torch.cat([torch.rand(3000 + n) for n in range(50)])
    for thread in threads:
        thread.join(30)
    leave.set()
    standing.join(30)
    for seed, drawn in {**made, 0: process}.items():
        again = torch.Generator().manual_seed(seed)
        assert same_bits(drawn, torch.cat([torch.rand(3000 + n, generator=again) for n in range(50)]))


def test_a_device_without_a_generator_of_its_own_is_left_alone() -> None:
    with own_numbers(torch.Generator()):
        assert torch.rand(3, device="meta").is_meta
        assert torch.empty(3, device="meta").bernoulli_(0.5).is_meta
    assert [g.device.type for g in generators_for(torch.device("cpu"), 3)] == ["cpu"]


@pytest.mark.slow
def test_a_trace_of_the_users_holds_no_generator() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.empty(8).bernoulli_(0.5)

    with own_numbers(torch.Generator()):
        graph = make_fx(noisy, tracing_mode="fake")(X).graph
        compiled = torch.compile(noisy, backend="aot_eager")
        torch.manual_seed(3)
        compiled(X)
        torch.manual_seed(3)
        made = compiled(X)
    assert not any(node.kwargs.get("generator") is not None for node in graph.nodes)
    torch.manual_seed(3)
    assert same_bits(made, torch.compile(noisy, backend="aot_eager")(X))


class FakeCuda:
    """Stands in for torch's module: what it is asked for is written down."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.asked.append(name)


def test_functions_of_cuda_mean_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU a generator of the CPU stands in for one of a GPU."""
    import torch.cuda.random as of_cuda

    fake, own = FakeCuda(), torch.Generator()
    names = ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "set_rng_state")
    for name in names:
        monkeypatch.setattr(of_cuda, name, getattr(fake, name))
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(rng._C, "thread_generator", lambda device: own if device == "cuda" else None)
    rng._redirect_cuda()
    torch.cuda.manual_seed_all(11)
    assert torch.cuda.initial_seed() == own.initial_seed() == 11
    state = torch.cuda.get_rng_state("cuda")
    torch.rand(3, generator=own)
    torch.cuda.set_rng_state(state, device="cuda:0")
    assert torch.equal(own.get_state(), state) and not fake.asked
    monkeypatch.setattr(rng._C, "thread_generator", lambda device: None)
    torch.cuda.manual_seed(3)
    assert fake.asked == ["manual_seed"]


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(3)], ids=["random", "numpy"])
def test_numbers_that_threads_share_are_told_of_once(
    draw: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, "_told", threading.Lock())
    caplog.set_level("WARNING", logger="waterflow")
    with telling_of_shared_numbers("trial 1", lambda: True):
        random.Random(3).random(), np.random.default_rng(3).random(), torch.rand(3)
    with telling_of_shared_numbers("trial 2", lambda: False):
        draw()
    assert not caplog.messages
    for number in (3, 4):
        with telling_of_shared_numbers(f"trial {number}", lambda: True):
            draw()
    (told,) = caplog.messages
    assert "trial 3" in told and "generators of your own" in told


def test_threads_that_end_together_tell_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have found that nobody was told, and both have drawn, before either says so."""
    monkeypatch.setattr(rng, "_told", threading.Lock())
    caplog.set_level("WARNING", logger="waterflow")
    together, numbers = threading.Barrier(2, timeout=30), rng._process_numbers

    def both_see() -> dict[str, Any]:
        seen = numbers()
        together.wait()
        return seen

    def trial(number: int) -> None:
        with telling_of_shared_numbers(f"trial {number}", lambda: True):
            random.random()

    monkeypatch.setattr(rng, "_process_numbers", both_see)
    threads = [threading.Thread(target=trial, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.messages) == 1


@pytest.mark.campaign
def test_what_draws_nothing_costs_nothing_more() -> None:
    """Figures are printed (pytest -s): microseconds a call on the thread with numbers of its own, and without."""
    x = torch.rand(4)

    def timed(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(20000):
            call()
        return (time.perf_counter() - began) / 20000 * 1e6

    for name, call in {"add": lambda: x + 1, "bernoulli_": lambda: x.bernoulli_(0.5)}.items():
        plain, own = [], []
        for _ in range(7):
            plain.append(timed(call))
            with own_numbers(torch.Generator()):
                own.append(timed(call))
        print(f"{name}: {sorted(plain)[3]:.3f} without, {sorted(own)[3]:.3f} with numbers of the thread's own")
