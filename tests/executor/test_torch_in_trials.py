"""What torch dispatches by keys, modes and subclasses does in a trial what it does outside, with the trial's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import optuna
import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import waterflow as wf
from tests.support import assert_same, images, same_bits, train_eager, train_step
from waterflow.executor.rng import own_numbers

X = torch.linspace(0.1, 0.9, 12).reshape(3, 4)


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.cos(ctx.saved_tensors[0])


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws in place, by a mask, by a permutation and as something new."""
    x = F.dropout(x * torch.rand_like(x), 0.3) + torch.empty_like(x).normal_()
    return (x + torch.randn(4)).sin()[torch.randperm(3)]


def noisy_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    noisy(Sine.apply(x)).sum().backward()
    return x.grad


class FunctionSubclass(torch.Tensor):
    """Has what torch.Tensor's own ``__torch_function__`` does written down."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(f"{func.__name__} {sorted(kwargs or ())}")
        return super().__torch_function__(func, types, args, kwargs)


class DispatchSubclass(torch.Tensor):
    """Wraps a tensor; a generator among an operator's arguments is one that nobody gave."""

    held: torch.Tensor
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DispatchSubclass:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(f"{func} {[type(leaf).__name__ for leaf in tree_leaves((args, kwargs))]}")
        plain = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        made = tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


class DispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {[type(leaf).__name__ for leaf in tree_leaves((args, kwargs))]}")
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func.__name__} {sorted(kwargs or ())}")
        return func(*args, **(kwargs or {}))


def in_mode(mode: Any) -> Any:
    with mode:
        made = noisy_gradient(X)
    return made, mode.seen


def of_subclass(kind: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    kind.seen.clear()
    made = noisy(make(X.clone()))
    assert type(made) is kind
    return getattr(made, "held", made).as_subclass(torch.Tensor), list(kind.seen)


def faked() -> Any:
    with FakeTensorMode() as mode:
        made = noisy(mode.from_tensor(X))
        return tuple(made.shape), made.stride(), str(made.device)


def graph_of(call: Callable[[torch.Tensor], torch.Tensor], mode: str) -> Any:
    graph = make_fx(call, tracing_mode=mode)(X)
    return str(graph.graph), graph(X)


def exported() -> Any:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return noisy(x)

    made = torch.export.export(Module(), (X,))
    return str(made.graph), made.module()(X), made.run_decompositions().module()(X)


def traced() -> Any:
    made = torch.jit.trace(noisy, (X,), check_trace=False)
    return str(made.graph), made(X)


def compiled(backend: str) -> Any:
    torch._dynamo.reset()
    call = torch.compile(noisy, backend=backend)
    x = X.clone().requires_grad_()
    call(x).sum().backward()
    return call(X), x.grad


def attention() -> torch.Tensor:
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j))


def conditional() -> torch.Tensor:
    torch._dynamo.reset()
    return torch.cond(X.sum() > 3, lambda x: x.sin() + torch.rand(3, 4), lambda x: x.cos() + torch.rand(3, 4), (X,))


def loop() -> Any:
    torch._dynamo.reset()
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.zeros(()), torch.rand(3)))


def again(reentrant: bool) -> torch.Tensor:
    x = X.clone().requires_grad_()
    checkpoint(noisy, checkpoint(noisy, x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    return x.grad


func = torch.func
PROGRAMS: dict[str, Callable[[], Any]] = {
    "grad of a Function": lambda: func.grad(lambda t: noisy(Sine.apply(t)).sum())(X),
    "vmap of a Function": lambda: func.vmap(lambda t: Sine.apply(t) + torch.rand_like(t), randomness="different")(X),
    "vmap with the same numbers": lambda: func.vmap(lambda t: Sine.apply(t) * torch.rand(4), randomness="same")(X),
    "jacrev of a Function": lambda: func.jacrev(lambda t: Sine.apply(t * torch.rand(4)))(X[0]),
    "jvp": lambda: func.jvp(noisy, (X,), (X,)),
    "functionalize": lambda: func.functionalize(noisy)(X),
    "cond": conditional,
    "while_loop": loop,
    "flex_attention": attention,
    "checkpoint": lambda: again(False),
    "reentrant checkpoint": lambda: again(True),
    "compile for eager": lambda: compiled("eager"),
    "compile for aot_eager": lambda: compiled("aot_eager"),
    "export": exported,
    "make_fx": lambda: graph_of(noisy, "real"),
    "make_fx with fake tensors": lambda: graph_of(noisy, "fake"),
    "make_fx of any shape": lambda: graph_of(noisy_gradient, "symbolic"),
    "jit.trace": traced,
    "fake tensors": faked,
    "__torch_function__": lambda: of_subclass(FunctionSubclass, lambda x: x.as_subclass(FunctionSubclass)),
    "__torch_dispatch__": lambda: of_subclass(DispatchSubclass, DispatchSubclass),
    "dispatch mode": lambda: in_mode(DispatchMode()),
    "function mode": lambda: in_mode(FunctionMode()),
}


def ends(program: Callable[[], Any]) -> list[Any]:
    """What a program makes behind a seed, and where it leaves the generator."""
    torch.manual_seed(3)
    return [*tree_leaves(program()), torch.get_rng_state()]


def assert_equal(made: list[Any], expected: list[Any]) -> None:
    assert len(made) == len(expected)
    for mine, theirs in zip(made, expected):
        assert same_bits(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def of_process() -> torch.Tensor:
    with own_numbers():
        return torch.get_rng_state()


SLOW = ["compile for aot_eager", "export"]


@pytest.mark.needs_time("torch imports its compiler, and traces")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PROGRAMS])
def test_a_trial_does_what_a_plain_program_does(name: str) -> None:
    """With the same bits, and with numbers of its own: the process's generator stays where it was."""
    program, made = PROGRAMS[name], []

    def objective(trial: optuna.Trial) -> float:
        stood = of_process()
        made.extend(ends(program))
        assert torch.equal(of_process(), stood) and not torch.equal(torch.get_rng_state(), stood)
        return 0.0

    expected = ends(program)
    wf.optimize(optuna.create_study(), objective, n_trials=1)
    assert_equal(made, expected)


def mean_sine(x: torch.Tensor) -> torch.Tensor:
    return Sine.apply(x).mean()


def conditionally(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def repeatedly(x: torch.Tensor) -> torch.Tensor:
    return x * while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.zeros(()), torch.ones(4)))[1]


def attending(x: torch.Tensor) -> torch.Tensor:
    q = x.detach().reshape(1, 1, 8, 4)  # there is no backward pass on the CPU
    return x + flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))[0, 0]


def under(mode: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return F.dropout(x, 0.5) + torch.rand_like(x)

    return call


def anew(make: Callable[[Any, torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + make(lambda t: F.dropout(t.sin(), 0.5), x.detach())(x.detach())


IN_STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad of a Function": lambda x: x + func.grad(mean_sine)(x.detach()),
    "vmap of a Function": lambda x: func.vmap(Sine.apply)(x) + func.vmap(torch.rand_like, randomness="different")(x),
    "jacrev of a Function": lambda x: x + func.jacrev(Sine.apply)(x.detach()[0]).sum(),
    "cond": conditionally,
    "while_loop": repeatedly,
    "flex_attention": attending,
    "checkpoint": lambda x: checkpoint(lambda t: F.dropout(Sine.apply(t), 0.5), x, use_reentrant=False),
    "compile": lambda x: torch.compile(lambda t: F.dropout(t.sin(), 0.5), backend="eager")(x),
    "make_fx": anew(lambda call, x: make_fx(call)(x)),
    "jit.trace": anew(lambda call, x: torch.jit.trace(call, (x,), check_trace=False)),
    "__torch_function__": lambda x: F.dropout(x.as_subclass(FunctionSubclass).sin()).as_subclass(torch.Tensor),
    "__torch_dispatch__": lambda x: x + DispatchSubclass(x.detach()).sin().held,
    "dispatch mode": under(DispatchMode),
    "function mode": under(FunctionMode),
}


CAPTURED = {"grad of a Function", "vmap of a Function", "jacrev of a Function", "checkpoint", "make_fx", "function mode"}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(name: str) -> Callable[[nn.Module, Any], torch.Tensor]:
    return lambda model, batch: F.cross_entropy(IN_STEPS[name](model(batch[0])), batch[1])


@pytest.mark.needs_time("torch imports its compiler, and traces")
@pytest.mark.parametrize("name", IN_STEPS)
def test_a_step_of_a_trial_does_what_eager_training_does(name: str) -> None:
    """Captured, or eagerly for a reason of the step's."""
    batches, ends = images(3), []

    def objective(trial: optuna.Trial) -> float:
        ends.append(train_step(made, batches, step=step_of(name)))
        return 0.0

    eager = train_eager(made, batches, step=step_of(name))
    wf.optimize(optuna.create_study(), objective, n_trials=1)
    assert_same(ends[0], eager)
    reason = ends[0].step.opaque_reason
    assert reason is None or "audit" not in reason
    assert (reason is None) == (name in CAPTURED)


@pytest.mark.parametrize("name", ["grad of a Function", "jacrev of a Function", "cond"])
def test_a_step_of_a_job_does_what_eager_training_does(name: str) -> None:
    batches = images(3)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    eager = train_eager(make, batches, step=step_of(name))
    job = wf.Job("job", model=lambda: make()[0], data=batches, step=step_of(name), seed=5,
                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True))  # fmt: skip
    (result,) = wf.train([job])
    assert list(result.losses) == [loss.item() for loss in eager.results]
