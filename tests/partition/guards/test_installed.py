"""What a package that was installed holds (closures, default arguments, classes) is seen when it changes, as the user's own is."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import waterflow as wf
from tests.support import images, same_bits
from waterflow.partition.guards.code_refs import _recorded, is_library_file

STEPS = 4
HEAD = """
import abc, contextlib, dataclasses, enum, functools, math, operator, types
import torch, torch.nn as nn
class Base(nn.Module):
    def __init__(self): super().__init__(); self.layer = nn.Linear(6, 4)
    def forward(self, x): return self.post(self.layer(x))
def change(number): pass
"""
CHANGES = "step changes"


@dataclass
class Case:
    """A package: ``Net`` is its model, ``change`` is called before each step; ``why`` is in the reason for eager steps.

    The user's function is given to its ``register`` before some steps, and to its ``decorate`` at first.
    """

    text: str
    why: str | None = None
    captures: int | None = None


CASES = {
    # -- changes between steps
    "class_list": Case(
        """
        class Net(Base):
            ws = [1.0]
            def post(self, x): return x * self.ws[0]
        def change(number): Net.ws[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "class_dict_of_functions": Case(
        """
        class Net(Base):
            table = {"act": torch.relu}
            def post(self, x): return self.table["act"](x)
        def change(number):
            if number == 2: Net.table["act"] = torch.tanh
        """,
        captures=2,
    ),
    "class_list_by_super": Case(
        """
        class Below(Base):
            ws = [1.0]
        class Net(Below):
            def post(self, x): return x * super().ws[0]
        def change(number): Below.ws[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "list_of_a_metaclass": Case(
        """
        class Meta(type):
            ws = [1.0]
        class Scale(metaclass=Meta): pass
        class Net(Base):
            def post(self, x): return x * Scale.ws[0]
        def change(number): Meta.ws[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "list_of_a_class_that_has_a_base": Case(
        """
        class Schedule:
            ws = [1.0]
            @classmethod
            def now(cls): return cls.ws[-1]
        class Net(Base):
            def post(self, x): return x * Schedule.now()
        def change(number): Schedule.ws.append(1.0 / (1 + number))
        """,
        captures=4,
    ),
    "default_argument": Case(
        """
        def w(seen=[1.0]): return seen[-1]
        class Net(Base):
            def post(self, x): return x * w()
        def change(number):
            if number == 2: w.__defaults__[0].append(0.1)
        """,
        captures=2,
    ),
    "default_of_forward": Case(
        """
        class Net(Base):
            def forward(self, x, *, scale={"now": 1.0}): return self.layer(x) * scale["now"]
        def change(number): Net.forward.__kwdefaults__["scale"]["now"] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "default_is_replaced": Case(
        """
        def w(x, scale=1.0): return x * scale
        class Net(Base):
            def post(self, x): return w(x)
        def change(number):
            if number == 2: w.__defaults__ = (0.1,)
        """,
        captures=2,
    ),
    "closure": Case(
        """
        def make():
            ws = [1.0]
            return (lambda: ws[0]), ws
        w, WS = make()
        class Net(Base):
            def post(self, x): return x * w()
        def change(number):
            if number == 2: WS[0] = 0.1
        """,
        captures=2,
    ),
    "variable_of_a_closure": Case(
        """
        def make():
            scale = 1.0
            def get(): return scale
            def put(value):
                nonlocal scale
                scale = value
            return get, put
        get, put = make()
        class Net(Base):
            def post(self, x): return x * get()
        def change(number): put(1.0 / (1 + number // 2))
        """,
        captures=2,
    ),
    "nested_closures": Case(
        """
        def outer():
            scale = {"now": 1.0}
            def middle():
                def inner(x): return (lambda y: y * scale["now"])(x)
                return inner
            return middle, scale
        middle, SCALE = outer()
        class Net(Base):
            def post(self, x): return middle()(x)
        def change(number): SCALE["now"] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "partial": Case(
        """
        def times(scale, x): return x * scale[0]
        SCALE = [1.0]
        scaled = functools.partial(times, SCALE)
        class Net(Base):
            def post(self, x): return scaled(x)
        def change(number): SCALE[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "partialmethod": Case(
        """
        SCALE = [1.0]
        class Net(Base):
            def times(self, scale, x): return x * scale[0]
            post = functools.partialmethod(times, SCALE)
        def change(number): SCALE[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "list_of_the_module": Case(
        """
        RATES = [1.0, 0.5]
        class Net(Base):
            def post(self, x): return x * RATES[-1]
        def change(number): RATES.append(1.0 / (1 + number))
        """,
        captures=4,
    ),
    "object_of_the_module": Case(
        """
        class Config:
            def __init__(self): self.scale = 1.0
        CONFIG = Config()
        class Net(Base):
            def post(self, x): return x * CONFIG.scale
        def change(number): CONFIG.scale = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "descriptor": Case(
        """
        class Scale:
            def __init__(self): self.now = [1.0]
            def __get__(self, one, cls): return self.now[0]
        class Net(Base):
            scale = Scale()
            def post(self, x): return x * self.scale
        def change(number): vars(Net)["scale"].now[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "attribute_of_a_function": Case(
        """
        def w(): return w.scale[0]
        w.scale = [1.0]
        class Net(Base):
            def post(self, x): return x * w()
        def change(number): w.scale[0] = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "member_of_an_enumeration": Case(
        """
        class Mode(enum.Enum):
            A = "a"
        Mode.A.scale = 1.0
        class Net(Base):
            def post(self, x): return x * Mode.A.scale
        def change(number): Mode.A.scale = 1.0 / (1 + number // 2)
        """,
        captures=2,
    ),
    "function_of_the_users_in_a_registry": Case(
        """
        class Net(Base):
            hooks = []
            def post(self, x):
                for hook in self.hooks: x = hook(x)
                return x
        def register(function): Net.hooks.append(function)
        """,
        captures=3,
    ),
    # -- changes within a step
    "counter_in_a_closure": Case(
        """
        def make():
            count = 0
            def scaled(x):
                nonlocal count
                count += 1
                return x / count
            return scaled
        scaled = make()
        class Net(Base):
            def post(self, x): return scaled(x)
        """,
        CHANGES,
    ),
    "counter_in_a_list_of_a_closure": Case(
        """
        def counted(function):
            calls = [0]
            @functools.wraps(function)
            def wrapper(*given):
                calls[0] += 1
                return function(*given) / calls[0]
            return wrapper
        class Net(Base):
            @counted
            def post(self, x): return x
        """,
        CHANGES,
    ),
    "counter_in_a_default": Case(
        """
        def scaled(x, calls=[]):
            calls.append(1)
            return x / len(calls)
        class Net(Base):
            def post(self, x): return scaled(x)
        """,
        CHANGES,
    ),
    "counter_of_a_function": Case(
        """
        def scaled(x):
            scaled.calls += 1
            return x / scaled.calls
        scaled.calls = 0
        class Net(Base):
            def post(self, x): return scaled(x)
        """,
        "changes",
    ),
    "counter_of_a_class": Case(
        """
        class Net(Base):
            calls = {"all": 0}
            def post(self, x):
                self.calls["all"] += 1
                return x / self.calls["all"]
        """,
        CHANGES,
    ),
    "counter_of_the_module": Case(
        """
        calls = 0
        class Net(Base):
            def post(self, x):
                global calls
                calls += 1
                return x / calls
        """,
        "changes the global calls",
    ),
    "bank_in_a_default": Case(
        """
        class Net(Base):
            def post(self, x, bank=[torch.zeros(4)]):
                bank[0] = 0.9 * bank[0] + 0.1 * x.detach().mean(0)
                return x - bank[0]
        """,
        "holds tensors",
    ),
    "bank_in_a_closure": Case(
        """
        def centered():
            bank = [torch.zeros(4)]
            def post(self, x):
                bank[0] = 0.9 * bank[0] + 0.1 * x.detach().mean(0)
                return x - bank[0]
            return post
        class Net(Base):
            post = centered()
        """,
        "holds tensors",
    ),
    "bank_in_a_class": Case(
        """
        class Net(Base):
            bank = [torch.zeros(4)]
            def post(self, x):
                self.bank[0] = 0.9 * self.bank[0] + 0.1 * x.detach().mean(0)
                return x - self.bank[0]
        """,
        "holds tensors",
    ),
    "bank_that_is_filled": Case(
        """
        class Net(Base):
            def post(self, x, bank=[None]):
                bank[0] = x.detach().mean(0) if bank[0] is None else 0.9 * bank[0] + 0.1 * x.detach().mean(0)
                return x - bank[0]
        """,
        "holds tensors",
    ),
    "cache_of_a_decorator": Case(
        """
        def cached(function):
            known = {}
            def wrapper(n):
                if n not in known: known[n] = function(n)
                return known[n]
            return wrapper
        @cached
        def share(n): return 1.0 / n
        class Net(Base):
            def post(self, x): return x * share(len(x))
        """,
        captures=1,
    ),
    "dict_of_a_class": Case(
        """
        class Net(Base):
            ws = [1.0]
            def post(self, x): return x * type(self).__dict__["ws"][0]
        def change(number): Net.ws[0] = 1.0 / (1 + number)
        """,
        "__dict__",
    ),
    # -- reached in other ways
    "name_of_an_attribute_that_is_computed": Case(
        """
        class Schedule: ws = [1.0]
        class Net(Base):
            def post(self, x): return x * getattr(Schedule, "w" + "s")[0]
        def change(number): Schedule.ws[0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "cell_of_a_function": Case(
        """
        def make():
            ws = [1.0]
            return lambda: ws
        w = make()
        class Net(Base):
            def post(self, x): return x * w.__closure__[0].cell_contents[0]
        def change(number): w()[0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "bound_method": Case(
        """
        class Schedule:
            def __init__(self): self.now = [1.0]
            def get(self): return self.now[0]
        schedule = Schedule()
        get = schedule.get
        class Net(Base):
            def post(self, x): return x * get()
        def change(number): schedule.now[0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "bound_method_in_c": Case(
        """
        log = []
        class Net(Base):
            def post(self, x, push=log.append, size=log.__len__):
                push(1.0)
                return x / size()
        """,
        CHANGES,
    ),
    "default_of_what_python_calls": Case(
        """
        class Schedule:
            def __getattr__(self, name, ws=[1.0]): return ws
        schedule = Schedule()
        class Net(Base):
            def post(self, x): return x * schedule.now[0]
        def change(number): Schedule.__getattr__.__defaults__[0][0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "property": Case(
        """
        class Net(Base):
            def _scale(self, ws=[1.0]): return ws[0]
            scale = property(_scale)
            def post(self, x): return x * self.scale
        def change(number):
            Net._scale.__defaults__[0][0] = 1.0 / (1 + number)
            if number == 3: Net.scale = property(lambda self: 2.0)
        """,
        captures=4,
    ),
    "property_in_c": Case(
        """
        class Net(Base):
            scale = property(operator.attrgetter("training"))
            def post(self, x): return x * self.scale
        """,
        "computes it",
    ),
    "default_of_a_gradient": Case(
        """
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 1.0
            @staticmethod
            def backward(ctx, gradient, rates=[1.0]): return gradient * rates[0]
        class Net(Base):
            def post(self, x): return Scale.apply(x)
        def change(number): Scale.backward.__defaults__[0][0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "default_of_a_hook": Case(
        """
        scale = {"now": 1.0}
        def hook(module, given, out, scale=scale): return out * scale["now"]
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.layer.register_forward_hook(hook)
            def post(self, x): return x
        def change(number): scale["now"] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "checkpointed": Case(
        """
        from torch.utils.checkpoint import checkpoint
        class Net(Base):
            def body(self, x, scale=[1.0]): return (x * scale[0]).tanh()
            def post(self, x): return checkpoint(self.body, x, use_reentrant=False)
        def change(number): Net.body.__defaults__[0][0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "registry_of_single_dispatch": Case(
        """
        class Kind: pass
        @functools.singledispatch
        def act(kind, x): return x
        class Net(Base):
            kind = Kind()
            def post(self, x): return act(self.kind, x)
        def change(number):
            if number == 2: act.register(Kind, lambda kind, x: x * 0.1)
        """,
        captures=2,
    ),
    "stack_of_a_context_manager": Case(
        """
        stack, rate = [1.0], [0.5]
        @contextlib.contextmanager
        def scaled(by):
            stack.append(by)
            try: yield
            finally: stack.pop()
        class Net(Base):
            def post(self, x):
                with scaled(rate[0]): return x * stack[-1]
        def change(number): rate[0] = 0.5 / (1 + number)
        """,
        captures=4,
    ),
    "dataclass": Case(
        """
        @dataclasses.dataclass
        class Config:
            scale: float = 1.0
            parts: list = dataclasses.field(default_factory=lambda: {"a": [1.0]})
        class Net(Base):
            config = Config()
            def post(self, x): return x * self.config.scale * self.config.parts["a"][0]
        def change(number): Net.config.parts["a"][0] = 1.0 / (1 + number)
        """,
        captures=4,
    ),
    "handed_to_torch": Case(
        """
        rates, rows = [1.0], [0, 1]
        class Net(Base):
            def post(self, x): return x[rows] * torch.tensor(rates)
        def change(number): rates[0], rows[1] = 1.0 / (1 + number), number
        """,
        captures=4,
    ),
    "code_is_replaced": Case(
        """
        def act(x): return x
        def other(x): return x * 0.1
        class Net(Base):
            def post(self, x): return act(x)
        def change(number):
            if number == 2: act.__code__ = other.__code__
        """,
        captures=2,
    ),
    "decorator_of_the_users_step": Case(
        """
        def counted(function, calls=[0]):
            def wrapper(*given):
                calls[0] += 1
                return function(*given) / calls[0]
            return wrapper
        class Net(Base):
            def post(self, x): return x
        decorate = counted
        """,
        CHANGES,
    ),
    "made_by_the_step": Case("""
        def counted(function):
            calls = []
            @functools.wraps(function)
            def wrapper(*given):
                calls.append(1)
                wrapper.number = len(calls)
                return function(*given) / wrapper.number
            return wrapper
        class Net(Base):
            def post(self, x):
                twice = counted(lambda y, ws=[x]: y + ws[0])
                return twice(twice(x))
        """),
    "generator": Case(
        """
        def numbers():
            for number in range(1, 100): yield 1.0 / number
        made = numbers()
        class Net(Base):
            def post(self, x): return x * next(made)
        """,
        "could draw from it",
    ),
    "nested_deeply": Case(
        """
        class Link:
            def __init__(self, after): self.after = after
        chain = None
        for _ in range(5000): chain = Link(chain)
        class Net(Base):
            def post(self, x): return x * 2.0 if chain.after else x
        """,
        "nested too deeply",
    ),
}


def installed(folder: Path, name: str, text: str) -> Any:
    (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(text))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    for known in (is_library_file, _recorded):
        known.cache_clear()
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.fixture
def install(no_captures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Installs packages, each under a name of its own."""
    numbers = itertools.count()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda text: installed(tmp_path, f"labs_package_{next(numbers)}", text)
    for name in [name for name in sys.modules if name.startswith("labs_package_")]:
        del sys.modules[name]
    is_library_file.cache_clear(), _recorded.cache_clear()


def trained(package: Any, captured: bool) -> tuple[list[torch.Tensor], wf.Step | None]:
    """Losses, and last the weights."""
    torch.manual_seed(0)
    model = package.Net()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def compute(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).pow(2).mean()

    compute = getattr(package, "decorate", lambda function: function)(compute)
    step = wf.Step(model, step=compute, optimizer=optimizer) if captured else None
    seen = []
    for number, batch in enumerate(images(STEPS)):
        package.change(number)
        if hasattr(package, "register") and number in (1, 3):
            package.register(lambda x, scale=1.0 / (1 + number): x * scale)
        if step is not None:
            seen.append(step(batch).detach().clone())
        else:
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    return [*seen, *(one.detach() for one in model.parameters())], step


@pytest.mark.parametrize("name", CASES)
def test_what_a_package_holds(name: str, install: Callable[[str], Any], no_captures: Any) -> None:
    """Losses and weights have the bits of eager training, and what can be guarded is captured."""
    case = CASES[name]
    theirs, _ = trained(install(case.text), captured=False)
    mine, step = trained(install(case.text), captured=True)
    assert all(map(same_bits, mine, theirs)), [(a.tolist(), b.tolist()) for a, b in zip(mine[:STEPS], theirs)]
    assert step is not None
    if case.why is None:
        assert step.opaque_reason is None and no_captures.captures == (case.captures or no_captures.captures)
    else:
        assert case.why in (step.opaque_reason or "")


def test_jobs_share_a_capture_while_it_holds(install: Callable[[str], Any], no_captures: Any) -> None:
    """What the second job finds there counts for it, whoever has captured."""
    package = install("""
        class Net(Base):
            ws = [1.0]
            def post(self, x): return x * self.ws[0]
        """)
    (batch,), losses = images(1), []

    def compute(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).pow(2).mean()

    for scale, captures in ((1.0, 1), (1.0, 1), (0.5, 2), (0.5, 2)):
        torch.manual_seed(0)
        model = package.Net()
        package.Net.ws[0] = scale * float(len(losses) >= 0)  # another object of the same bits
        step = wf.Step(model, step=compute, optimizer=SGD(model.parameters(), lr=0.0, fused=True))
        losses.append(step(batch).item())
        assert losses[-1] == compute(model, batch).item() and no_captures.captures == captures


def test_objects_that_python_does_not_show(install: Callable[[str], Any]) -> None:
    package = install(CASES["default_argument"].text)
    model = package.Net()
    step = wf.Step(model, step=lambda m, b: m(b[0]).mean(), optimizer=SGD(model.parameters(), lr=0.1))
    gc.freeze()
    try:
        for batch in images(STEPS):
            step(batch)
    finally:
        gc.unfreeze()
    assert "gc.unfreeze() before the step" in (step.opaque_reason or "")


def test_a_package_that_the_step_imports(install: Callable[[str], Any], no_captures: Any) -> None:
    """Its first step runs eagerly: of what is made while a step is traced nobody can tell what the package holds."""
    helper = install(CASES["counter_in_a_closure"].text)
    name = helper.__name__
    del sys.modules[name]
    package = install(f"""
        class Net(Base):
            def post(self, x):
                from {name} import change
                change(0)
                return x
        """)
    model = package.Net()
    step = wf.Step(model, step=lambda m, b: m(b[0]).mean(), optimizer=SGD(model.parameters(), lr=0.1))
    for batch in images(3):
        step(batch)
    assert step.opaque_reason is None and step.eager_steps == 1


def test_handlers_of_what_a_library_logs(install: Callable[[str], Any]) -> None:
    """A package's record factory and handler are the process's, and no part of the step."""
    package = install("""
        import logging, time
        seen = []
        def factory(*args, **kwargs):
            return stamped(logging.LogRecord(*args, **kwargs))
        def stamped(record):
            seen.append(time.perf_counter())
            return record
        """)

    def speak(x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("waterflow.tests.speak").error("said")
        return x * 2

    code = speak.__code__.replace(co_filename=torch.__file__)
    library = types.FunctionType(code, {"logging": logging, "__name__": "torch.nn.functional"}, "speak")
    model, before = torch.nn.Linear(3, 4), logging.getLogRecordFactory()
    step = wf.Step(model, step=lambda m, b: library(m(b)).mean(), optimizer=SGD(model.parameters(), lr=0.1))
    logging.setLogRecordFactory(package.factory)
    try:
        step(torch.ones(2, 3))
    finally:
        logging.setLogRecordFactory(before)
    assert package.seen and step.opaque_reason is None
