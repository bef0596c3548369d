"""Audits: captured steps are compared with eager ones, and planted faults are found."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import waterflow as wf
from tests.support import assert_same, run_steps, same_bits, train_eager, train_step
from waterflow import _C
from waterflow.executor import audit, captured
from waterflow.executor.both_ways import BothWays
from waterflow.executor.engine import Engine

Change = Callable[[fx.Graph], None]


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine("cpu", memory="1GiB", lanes=2) as made:
        yield made


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What audits have found, in order."""
    found: list[Any] = []
    difference = BothWays.difference

    def noted(self: BothWays) -> Any:
        found.append(difference(self))
        return found[-1]

    monkeypatch.setattr(BothWays, "difference", noted)
    return found


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> Callable[[Change], None]:
    """Steps that are captured from now on are changed behind their capture."""

    def plant(change: Change) -> None:
        capture = captured.capture_step

        def changed(*args: Any) -> Any:
            made = capture(*args)
            change(made.graph)
            return made

        monkeypatch.setattr(captured, "capture_step", changed)

    return plant


class Net(nn.Module):
    """Layers of most kinds that keep something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.dropout, self.out = nn.Dropout(0.3), nn.Linear(4 * 16, 5)
        self.register_buffer("mean", torch.ones(4, 4, 4))
        self.scale = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))) * self.scale
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.out(self.dropout(x - self.mean).flatten(1))


def net_and(optimizer: Callable[..., Optimizer], **options: Any) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        return model, optimizer(model.parameters(), **options)

    return make


def batches(count: int = 5, rows: int = 6) -> list[Any]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(rows, 1, 6, 6, generator=random), torch.randint(5, (rows,), generator=random))
        for _ in range(count)
    ]


# -- audits that pass


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "make",
    [net_and(Adam), net_and(AdamW, amsgrad=True), net_and(SGD, lr=0.1, momentum=0.9), net_and(SGD, lr=0.1)],
    ids=["adam", "amsgrad", "momentum", "plain"],
)
def test_a_step_that_is_audited_each_time_is_the_eager_one(
    make: Any, accumulate: int, clip: float | None, engine: Engine | None
) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "clip_grad_norm": clip}
    eager = train_eager(make, batches(6), **options)
    mine = train_step(make, batches(6), audit=1, engine=engine, **options)
    assert_same(mine, eager)
    assert mine.step is not None and mine.step.opaque_reason is None and mine.step.audit.passed == 6


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"recompute": 20_000}, {"early_updates": False}])
def test_forms_of_a_step(options: dict[str, Any], engine: Engine | None) -> None:
    make = net_and(Adam)
    plain = {name: value for name, value in options.items() if name == "autocast"}
    mine = train_step(make, batches(), audit=1, engine=engine, **options)
    assert_same(mine, train_eager(make, batches(), **plain))
    assert mine.step is not None and mine.step.audit.passed == 5


def test_of_jobs_that_may_round_their_exact_form_is_audited() -> None:
    with Engine("cpu", memory="1GiB", lanes=1, exact=False) as engine:
        audited = train_step(net_and(Adam), batches(), audit=1, engine=engine)
        alone = train_step(net_and(Adam), batches(), audit=100, engine=engine)
    assert audited.step is not None and audited.step.audit.passed == 5
    assert_same(audited, alone)


def test_nothing_of_an_audit_stays() -> None:
    """A parameter of another step's optimizer gets no gradient, modules keep their tensors, the generator its state."""
    torch.manual_seed(0)
    model = Net()
    frozen = model.out.weight
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("conv")]
    beside = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(rest, lr=0.1))
    step = wf.Step(model, loss=F.cross_entropy, optimizer=SGD([model.conv.weight, model.conv.bias], lr=0.1), audit=1)
    mean = model.mean
    for batch in batches():
        given = [tensor.clone() for tensor in batch]
        step(batch)
        assert all(map(same_bits, given, batch))
    assert model.mean is mean and frozen.grad is None and step.audit.passed == 5 and beside.steps == 0


def test_a_batch_that_the_step_changes_is_changed_once(engine: Engine | None) -> None:
    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(2.0)
        return F.cross_entropy(model(batch[0]), batch[1])

    given = [[t.clone() for t in batch] for batch in batches()]
    mine = train_step(net_and(Adam), [tuple(b) for b in given], step=compute, audit=1, engine=engine)
    reference = [[t.clone() for t in batch] for batch in batches()]
    assert_same(mine, train_eager(net_and(Adam), [tuple(b) for b in reference], step=compute))
    assert all(same_bits(one[0], other[0]) for one, other in zip(given, reference))
    assert mine.step is not None and mine.step.audit.passed == 5


# -- which steps


def steps_of_one_net(monkeypatch: pytest.MonkeyPatch, said: str, count: int, jobs: int) -> list[int]:
    """How many audits each of several equal jobs had after so many steps."""
    monkeypatch.setenv("WATERFLOW_AUDIT", said)
    return [_passed(train_step(net_and(Adam), batches(count), seed=job)) for job in range(jobs)]


def _passed(trained: Any) -> int:
    passed: int = trained.step.audit.passed
    return passed


def test_a_capture_is_audited_at_its_first_step_and_once_later(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any
) -> None:
    assert steps_of_one_net(monkeypatch, "first", 50, 3) == [2, 0, 0]


def test_the_second_audit_is_that_of_whoever_comes_to_its_place(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any
) -> None:
    monkeypatch.setattr(audit, "EARLIEST", 4)
    monkeypatch.setattr(audit, "LATEST", 4)
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    passed = [_passed(train_step(net_and(Adam), batches(count))) for count in (3, 2, 5, 5)]
    assert passed == [1, 0, 1, 0]


def test_each_job_has_audits_of_its_own_where_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_of_one_net(monkeypatch, "all", 50, 2) == [2, 2]


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_of_one_net(monkeypatch, "off", 50, 1) == [0]


def test_every_so_many_steps(engine: Engine | None) -> None:
    assert _passed(train_step(net_and(Adam), batches(7), audit=3, engine=engine)) == 3


def test_what_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = net_and(Adam)()
    for wrong in (0, -1, True, "all"):
        with pytest.raises(wf.InvalidJobError, match="audit must be a positive integer"):
            wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, audit=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("WATERFLOW_AUDIT", "often")
    with pytest.raises(wf.InvalidJobError, match="WATERFLOW_AUDIT must be 'all', 'first' or 'off'; got 'often'"):
        wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)


# -- planted faults


def other_constant(graph: fx.Graph) -> None:
    """The attribute ``scale`` is taken for another one."""
    node = next(n for n in graph.nodes if 1.5 in n.args)
    node.args = tuple(1.25 if arg == 1.5 else arg for arg in node.args)


def no_buffer(graph: fx.Graph) -> None:
    """The buffer that forward assigns is not written."""
    node = next(n for n in graph.nodes if "copy_" in str(n.target) and n.args[0].op == "placeholder")
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def too_late(graph: fx.Graph) -> None:
    """The buffer is written before it is read for the last time."""
    node = next(n for n in graph.nodes if "copy_" in str(n.target) and n.args[0].op == "placeholder")
    buffer = node.args[0]
    copy = graph.create_node("call_function", torch.ops.aten.mul_.Scalar, (buffer, 0.5))
    copy.meta = dict(node.meta, val=buffer.meta["val"])
    first = next(n for n in graph.nodes if n.op == "call_function")
    first.prepend(copy)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_constant, "the loss: cap"),
        (no_buffer, r"buffer 'mean': cap.*test_audit.py:"),
        (too_late, "the loss: cap"),
    ],
)
def test_a_fault_in_the_first_step_is_found(
    planted: Any, change: Change, told: str, engine: Engine | None, unlike: Any, caplog: pytest.LogCaptureFixture
) -> None:
    planted(change)
    make = unlike
    mine = train_step(make, batches(), audit=1000, engine=engine)
    assert_same(mine, train_eager(make, batches()))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and re.search(f"The first difference is in {told}", errors[0])
    for part in ("fault of waterflow", "(0x", torch.__version__, wf.__version__, "Unlike of", "Adam"):
        assert part in errors[0]
    assert mine.step is not None and "the captured step is not the eager one" in str(mine.step.opaque_reason)
    other = train_step(make, batches(rows=4), engine=engine)  # of the same code, with other batches
    assert_same(other, train_eager(make, batches(rows=4)))
    assert other.step is not None and other.step.opaque_reason == mine.step.opaque_reason
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody notices any more that something is replaced."""
    monkeypatch.setattr(_C.Binding, "current", lambda self: True)


def rescaled(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
    """The model's scale changes before its fourth step."""

    def act(number: int) -> None:
        if number == 3:
            model.scale = 2.0  # type: ignore[assignment]

    return act


def test_a_fault_in_a_later_step_is_found(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any, engine: Engine | None, unlike: Any
) -> None:
    blind(monkeypatch)
    mine = train_step(unlike, batches(), during=rescaled, audit=1, engine=engine)
    assert_same(mine, train_eager(unlike, batches(), during=rescaled))
    assert mine.step is not None and mine.step.opaque_reason is not None and mine.step.audit.passed == 3


def test_a_job_without_a_state_that_is_known_to_be_right_fails(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any, engine: Engine | None, unlike: Any
) -> None:
    blind(monkeypatch)
    make = unlike
    model, optimizer = make()
    with pytest.raises(wf.AuditError, match="Begin again: in this process the code now runs eagerly"):
        run_steps(model, optimizer, batches(), during=rescaled, audit=4, engine=engine)


def test_another_job_that_took_steps_of_faulty_code_fails(
    planted: Any, engine: Engine | None, unlike: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(other_constant)
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")
    steps = []
    for each in (None, 1):
        model, optimizer = unlike()
        steps.append(wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, audit=each, engine=engine))
    trusting, audited = steps
    first, second, *_ = batches()
    trusting(first)
    audited(first)
    assert audited.opaque_reason is not None
    for _ in range(2):
        with pytest.raises(wf.AuditError):
            trusting(second)


def test_the_sign_of_zero_is_a_difference(planted: Any, unlike: Any) -> None:
    def negative(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if "add" in str(n.target) and n.meta["phase"] == "forward")
        node.replace_all_uses_with(after := graph.call_function(torch.ops.aten.mul.Tensor, (node, -1.0)))
        after.args = (node, -1.0)
        after.meta = dict(node.meta)
        node.append(after)

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[0] * self.weight[0] + 0.0

    planted(negative)
    model = Zero()
    step = wf.Step(model, loss=lambda out, _: out, optimizer=SGD(model.parameters(), lr=0.0), audit=1)
    step((torch.zeros(3), torch.zeros(1)))
    assert step.opaque_reason is not None and "-0.0 (0x80000000)" in step.opaque_reason


@torch.library.custom_op("waterflow_tests::restless", mutates_args=())
def restless(x: torch.Tensor) -> torch.Tensor:
    """Another result each time."""
    global _calls
    _calls += 1
    return x + _calls


_calls = 0
restless.register_fake(lambda x: torch.empty_like(x))


def compute_restlessly(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        more = restless(batch[0])
    return F.cross_entropy(model(more), batch[1])


def test_an_operator_that_users_define_is_called_once_a_step(
    no_captures: Any, caplog: pytest.LogCaptureFixture, engine: Engine | None
) -> None:
    caplog.set_level(logging.INFO, logger="waterflow")
    before = _calls
    trained = train_step(net_and(Adam), batches(5), step=compute_restlessly, audit=1, engine=engine)
    assert trained.step is not None and trained.step.opaque_reason is None and _calls == before + 5
    assert any("waterflow_tests::restless" in r.getMessage() for r in caplog.records)


def test_eager_code_that_differs_from_itself_proves_nothing(
    no_captures: Any, caplog: pytest.LogCaptureFixture, engine: Engine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="waterflow")
    monkeypatch.setattr(audit, "_OPERATORS", audit._OPERATORS | {"waterflow_tests"})
    trained = train_step(net_and(Adam), batches(), step=compute_restlessly, audit=1, engine=engine)
    assert trained.step is not None and trained.step.opaque_reason is None and trained.step.audit.passed == 0
    told = [r.getMessage() for r in caplog.records if "differs from itself" in r.getMessage()]
    assert len(told) == 1


def test_an_audit_that_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture, no_captures: Any) -> None:
    caplog.set_level(logging.INFO, logger="waterflow")

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 20_000), nn.Linear(20_000, 5))
        return model, Adam(model.parameters())

    plan = train_step(make, batches(1)).step.plan  # type: ignore[union-attr]
    needed = plan.persistent + plan.batch + plan.height
    with Engine("cpu", memory=int(needed * 1.5), lanes=1, reserve=0) as engine:
        trained = train_step(make, batches(), audit=1, engine=engine)
    assert trained.step is not None and trained.step.audit.passed == 0 and trained.step.opaque_reason is None
    assert any("was not audited: it takes" in record.getMessage() for record in caplog.records)


def test_trials_with_one_net_are_audited_once(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any, outcomes: list[Any]
) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    data = batches(20)

    def objective(trial: Any) -> float:
        model = Net()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=Adam(model.parameters(), trial.suggest_float("lr", 0, 1)))
        return float([step(batch) for batch in data][-1])

    wf.optimize(optuna.create_study(), objective, n_trials=8, memory="1GiB", max_concurrent=2)
    assert outcomes in ([None], [None, None])


# -- the memory of a state


def test_memory_is_that_of_the_tensors_alone() -> None:
    whole = torch.arange(40, dtype=torch.float32)
    odd = torch.arange(30, dtype=torch.uint8)
    tensors = [whole[3:7], whole[5:11].view(2, 3).t(), whole[20:21], odd[1:4], torch.tensor(2, dtype=torch.int64)]
    memory = _C.StateBytes(tensors)
    copy, before = memory.copy(), [t.clone() for t in tensors]
    assert all(map(same_bits, before, (memory.then(copy, tensor) for tensor in tensors)))
    assert memory.is_as(copy)
    for tensor in tensors:
        tensor.add_(1)
    whole[0] = whole[12] = odd[7] = 100
    assert not memory.is_as(copy)
    memory.put(copy)
    assert all(map(same_bits, before, tensors)) and memory.is_as(copy)
    assert whole[0] == whole[12] == odd[7] == 100


@pytest.fixture
def unlike() -> Callable[[], tuple[nn.Module, Optimizer]]:
    """A net whose code no other test has: what was found to be faulty stays so in the process."""
    global _nets
    _nets += 1
    number = _nets

    class Unlike(Net):
        kind = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if self.kind else 0.5)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Unlike()
        return model, Adam(model.parameters(), fused=True)

    return make


_nets = 0
