"""Audits: captured steps are compared with eager ones, and planted faults are found."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import fx, nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import waterflow as wf
from tests.support import assert_same, run_steps, same_bits, train_eager, train_step
from waterflow import _C
from waterflow.executor import audit
from waterflow.executor.audit import BothWays
from waterflow.executor.data.copies import OwnBatches, Ranges
from waterflow.executor.engine import Engine
from waterflow.executor.program import capture_cache

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
        capture = capture_cache.capture_step

        def changed(*args: Any) -> Any:
            made = capture(*args)
            change(made.graph)
            return made

        monkeypatch.setattr(capture_cache, "capture_step", changed)

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
    return [(torch.randn(rows, 1, 6, 6, generator=random), torch.randint(5, (rows,), generator=random)) for _ in range(count)]


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


class Resizing(nn.Module):
    """A kernel gives a buffer the batch's size, in memory of its own where it was smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(36, 5)
        self.register_buffer("buffer", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.add(x.flatten(1), 1.0, out=self.buffer)
        return self.out(x.flatten(1)) * self.buffer.mean()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("audit", [1, 1000])
def test_a_step_may_resize_what_it_is_given(audit: int, engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Resizing()
        return model, SGD(model.parameters(), lr=0.1, fused=True)

    given = [batches(1, rows)[0] for rows in (2, 900, 3, 2, 1800, 4, 900, 2, 3, 4, 2, 3, 4, 2, 3)]
    for steps in range(8, len(given)):  # a kind of batch that comes back finds the size that it left, or another one
        mine = train_step(make, given[:steps], audit=audit, engine=engine)
        assert_same(mine, train_eager(make, given[:steps]))
        assert mine.step is not None and mine.step.opaque_reason is None
        assert mine.step.audit.passed == (steps if audit == 1 else 1)


@pytest.mark.filterwarnings("ignore")
def test_observers_get_their_size_in_the_first_step(engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        quantization.prepare_qat(model.train(), inplace=True)
        return model, SGD(model.parameters(), lr=0.1, fused=True)

    mine = train_step(make, batches(), audit=1, engine=engine)
    assert_same(mine, train_eager(make, batches()))
    assert mine.step is not None and mine.step.audit.passed == 5


def test_the_eager_step_is_given_the_very_tensors(engine: Engine | None) -> None:
    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        more = 1.0 if batch[0] is batch[1] else 2.0
        return F.cross_entropy(model(batch[0]), batch[2]) * more

    (x, y), (other, _) = batches(2)
    given = [(x, again, y) for again in (x, other, x.clone(), other, x)]
    mine = train_step(net_and(Adam), given, step=compute, audit=1, engine=engine)
    assert_same(mine, train_eager(net_and(Adam), given, step=compute))
    assert mine.step is not None and mine.step.opaque_reason is None and mine.step.audit.passed == 5


def test_a_batch_that_other_jobs_read_is_not_changed(engine: Engine | None) -> None:
    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(2.0 if batch[0] is batch[1] else 3.0)
        return F.cross_entropy(model(batch[1]), batch[2])

    model, optimizer = net_and(Adam)()
    step = wf.Step(model, step=compute, optimizer=optimizer, audit=1, engine=engine)
    step.own_batches = OwnBatches(kept=False)
    x, y = batches(1)[0]
    before = x.clone()
    for _ in range(3):
        step((x, x, y))
    assert same_bits(x, before) and step.opaque_reason is None and step.audit.passed == 3


def frozen_and_adapter() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2000).requires_grad_(False), nn.Linear(2000, 5))
    return model, Adam(model[2].parameters(), fused=True)


def test_what_is_frozen_is_not_copied(engine: Engine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint: list[int] = []
    difference = BothWays.difference
    monkeypatch.setattr(BothWays, "difference", lambda self: fingerprint.append(self._before.bytes) or difference(self))
    mine = train_step(frozen_and_adapter, batches(), audit=1, engine=engine)
    assert_same(mine, train_eager(frozen_and_adapter, batches()))
    frozen, trained = 36 * 2000 * 4, 2005 * 5 * 4
    assert mine.step is not None and mine.step.audit.passed == 5 and max(fingerprint) < 3 * trained + 20_000 < frozen


def test_on_a_lane_the_captured_step_has_the_lanes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of which lies in one range of addresses; what torch's own allocator gives back may stay with the process."""
    apart: list[int] = []
    run_captured = BothWays._run_captured

    def noted(self: BothWays, generator: torch.Generator) -> Any:
        run, outcome = run_captured(self, generator)
        apart.append(abs(torch.empty(1000).data_ptr() - outcome.tensors["the loss"].data_ptr()))
        return run, outcome

    monkeypatch.setattr(BothWays, "_run_captured", noted)
    with Engine("cpu", memory="1GiB", lanes=1) as engine:
        train_step(net_and(Adam), batches(), audit=1, engine=engine)
    assert len(apart) == 5 and max(apart) < 16 << 20


# -- which steps


def steps_of_one_net(monkeypatch: pytest.MonkeyPatch, said: str, count: int, jobs: int) -> list[int]:
    """How many audits each of several equal jobs had after so many steps."""
    monkeypatch.setenv("WATERFLOW_AUDIT", said)
    return [_passed(train_step(net_and(Adam), batches(count), seed=job)) for job in range(jobs)]


def _passed(trained: Any) -> int:
    passed: int = trained.step.audit.passed
    return passed


def test_a_capture_is_audited_at_its_first_step_and_once_later(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    assert steps_of_one_net(monkeypatch, "first", 50, 3) == [2, 0, 0]


def test_the_second_audit_is_that_of_whoever_comes_to_its_place(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    monkeypatch.setattr(audit, "EARLIEST", 4)
    monkeypatch.setattr(audit, "LATEST", 4)
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    passed = [_passed(train_step(net_and(Adam), batches(count))) for count in (3, 2, 5, 5)]
    assert passed == [1, 0, 1, 0]


def test_each_job_has_audits_of_its_own_where_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_of_one_net(monkeypatch, "all", 50, 2) == [2, 2]


def tiny() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 1)
    return model, SGD(model.parameters(), lr=0.0, fused=True)


def compute_tiny(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).mean()
    return loss


def audited_steps(monkeypatch: pytest.MonkeyPatch, said: str, steps: int, jobs: int) -> list[list[int]]:
    """At which steps each of several equal jobs has its audits."""
    monkeypatch.setenv("WATERFLOW_AUDIT", said)
    monkeypatch.setattr(audit, "RARE", (20, 60))
    data = torch.ones(1, 2)
    found = []
    for seed in range(jobs):
        torch.manual_seed(seed)
        model, optimizer = tiny()
        step = wf.Step(model, step=compute_tiny, optimizer=optimizer)
        passed = [0]
        for _ in range(steps):
            step(data)
            passed.append(step.audit.passed)
        found.append([number for number in range(1, steps + 1) if passed[number] > passed[number - 1]])
    return found


def test_behind_those_two_audits_become_ever_rarer(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    found = audited_steps(monkeypatch, "first", 700, 3)
    (first, second, *rare), *others = found
    assert first == 1 and 2 <= second <= 50
    for places in (rare, *others):
        assert len(places) == 2 and 20 <= places[0] <= 60 and 200 <= places[1] <= 600
    assert len({tuple(places) for places in (rare, *others)}) == 3  # drawn from the job's seed
    assert audited_steps(monkeypatch, "first", 700, 3)[1:] == others
    assert all(len(places) == 4 for places in audited_steps(monkeypatch, "all", 700, 2))


def test_a_capture_that_comes_late_goes_on_with_the_jobs_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = audit.Audit(None, "one", torch.Generator().manual_seed(3), torch.device("cpu"))
    places = []
    for made.steps in (0, 99, 100, 501, 5_001, 5_000_001):
        places.append(made._rarely())
    assert places[0] == places[1] and 100 <= places[0] <= 500
    assert [len(str(place)) for place in places[3:]] == [4, 5, 8]


def test_a_late_difference_is_told(monkeypatch: pytest.MonkeyPatch, no_captures: Any, unlike: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.scale = nn.Linear(2, 1), 1.5
            self.kind = type(unlike()[0]).kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(x) * (self.scale + self.kind)
            return out

    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    blind(monkeypatch)
    model = Scaled()
    step = wf.Step(model, step=compute_tiny, optimizer=SGD(model.parameters(), lr=0.0, fused=True))
    x = torch.ones(1, 2)
    with pytest.raises(wf.AuditError):
        for number in range(1, 6001):
            if number == 300:
                model.scale = 2.0
            step(x)
    assert 300 <= number <= 5000


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
    [(other_constant, "the loss: cap"), (no_buffer, r"buffer 'mean': cap.*test_audit.py:"), (too_late, "the loss: cap")],
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


def test_a_frozen_tensor_that_only_eager_steps_change_ends_the_job(
    planted: Any, unlike: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted(no_buffer)
    monkeypatch.setattr(audit, "LARGE", 1)
    model, optimizer = unlike()
    with pytest.raises(wf.AuditError):
        run_steps(model, optimizer, batches(), audit=1)
    assert "The first difference is in buffer 'mean': only one of the two" in caplog.text


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


def test_trials_with_one_net_are_audited_once(monkeypatch: pytest.MonkeyPatch, no_captures: Any, outcomes: list[Any]) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    data = batches(20)

    def objective(trial: Any) -> float:
        model = Net()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=Adam(model.parameters(), trial.suggest_float("lr", 0, 1)))
        return float([step(batch) for batch in data][-1])

    wf.optimize(optuna.create_study(), objective, n_trials=8, memory="1GiB", max_concurrent=2)
    assert outcomes in ([None], [None, None])


# -- false alarms


@pytest.mark.parametrize(
    ("dtype", "bits", "nans"),
    [
        (torch.float32, torch.int32, [0x7FC00000, -0x400000, -1]),
        (torch.bfloat16, torch.int16, [0x7FC0, -0x40]),
        (torch.float64, torch.int64, [0x7FF8 << 48, -1]),
        (torch.float8_e4m3fn, torch.int8, [0x7F, -1]),
    ],
)
def test_a_nan_equals_a_nan(dtype: torch.dtype, bits: torch.dtype, nans: list[int]) -> None:
    many = [torch.tensor([1, nan, 2], dtype=bits).view(dtype) for nan in nans]
    assert [audit._differing(many[0], other) for other in many] == [""] * len(many)
    assert "at 1 of 3" in audit._differing(many[0], torch.tensor([1, 1, 2], dtype=bits).view(dtype))
    assert "at 2 of 3" in audit._differing(many[0], torch.tensor([1, nans[-1], 3], dtype=bits).view(dtype))


def test_a_complex_nan_differs_by_its_other_part() -> None:
    one, other = torch.tensor([1, complex(float("nan"), 2)]), torch.tensor([1, complex(float("nan"), 3)])
    assert audit._differing(one, one.clone()) == "" and "at 1 of 2" in audit._differing(one, other)


def tweedie(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (target * output**-0.5 / 0.5 + output**0.5 / 0.5).mean()


def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log = F.log_softmax(output, 1).gather(1, target[:, None])
    return -((1 - log.exp()) ** 0.5 * log).mean()


def test_trials_that_diverge_fail_alone(no_captures: Any, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(64) % 3
    losses = {"mse": (F.mse_loss, x[:, :3]), "tweedie": (tweedie, x[:, :3].abs())}
    losses |= {"cross-entropy": (F.cross_entropy, classes), "focal": (focal, classes)}
    reasons = []

    def objective(trial: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
        nn.init.constant_(model[2].bias, 3.0)
        loss, target = losses[trial.suggest_categorical("loss", list(losses))]
        optimizer = SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e6, log=True))
        step = wf.Step(model, loss=loss, optimizer=optimizer)
        result = [step((x, target)) for _ in range(60)][-1]
        reasons.append(step.opaque_reason)
        return float(result)

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    for number, loss in enumerate([*losses] * 10):
        study.enqueue_trial({"loss": loss, "lr": 10.0 ** (number // 4 - 3)})
    summary = wf.optimize(study, objective, n_trials=40, memory="1GiB")
    states = Counter(trial.state.name for trial in study.trials)
    assert states["COMPLETE"] + states["FAIL"] == 40 and states["FAIL"] >= 5 and states["COMPLETE"] >= 15
    assert reasons == [None] * 40 and summary.stats is not None
    assert "audit" not in caplog.text


def disturbed(monkeypatch: pytest.MonkeyPatch, way: str, disturb: Callable[[BothWays, int], None]) -> None:
    """Something of the user's acts behind each of an audit's runs in one of the two ways; it is told how many there were."""
    run, calls = getattr(BothWays, way), [0]

    def and_disturb(self: BothWays, *args: Any) -> Any:
        made = run(self, *args)
        calls[0] += 1
        disturb(self, calls[0])
        return made

    monkeypatch.setattr(BothWays, way, and_disturb)


def test_other_threads_draw_from_the_same_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is drawn twice, and what a step draws does not depend on its audit."""
    drawn: list[float] = []
    for way in ("_run_captured", "_run_eagerly"):
        disturbed(monkeypatch, way, lambda ways, calls: drawn.append(torch.rand(()).item()))
    torch.manual_seed(3)
    model, optimizer = net_and(SGD, lr=0.1)()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, audit=1)
    for batch in batches():
        step(batch)
    assert step.opaque_reason is None and step.audit.passed == 5
    assert len(drawn) == len(set(drawn)) == 10


@pytest.mark.parametrize("way", ["_run_captured", "_run_eagerly"])
def test_what_another_thread_changes_meanwhile_is_no_fault(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Engine | None
) -> None:
    caplog.set_level(logging.INFO, logger="waterflow")

    def once(ways: BothWays, calls: int) -> None:
        if calls == 1:
            with torch.no_grad():
                ways.owner.tensors["out.weight"].add_(1.0)

    disturbed(monkeypatch, way, once)
    mine = train_step(net_and(Adam), batches(), audit=1, engine=engine)
    assert mine.step is not None and mine.step.opaque_reason is None and mine.step.audit.passed == 4
    assert "differs from itself" in caplog.text and "fault of waterflow" not in caplog.text


def test_what_another_thread_writes_is_seen_by_its_version(
    monkeypatch: pytest.MonkeyPatch, planted: Any, unlike: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the values stay as they were: nobody knows what was read meanwhile."""
    planted(other_constant)
    outcomes: list[Any] = []
    run = BothWays._run_eagerly

    def disturbed_run(self: BothWays, numbers: torch.Tensor) -> Any:
        outcomes.append(made := run(self, numbers))
        made.versions["buffer 'mean'"] += len(outcomes) == 2
        return made

    monkeypatch.setattr(BothWays, "_run_eagerly", disturbed_run)
    mine = train_step(unlike, batches(1), audit=1)
    assert len(outcomes) == 2 and mine.step is not None and mine.step.opaque_reason is None
    assert "fault of waterflow" not in caplog.text


def test_a_frozen_tensor_that_another_thread_changes_is_no_fault(monkeypatch: pytest.MonkeyPatch, engine: Engine | None) -> None:
    monkeypatch.setattr(audit, "LARGE", 1)

    def once(ways: BothWays, calls: int) -> None:
        if calls == 1:
            ways.owner.tensors["1.weight"].data[0, 0] = 7.0

    disturbed(monkeypatch, "_run_eagerly", once)
    mine = train_step(frozen_and_adapter, batches(), audit=1, engine=engine)
    assert mine.step is not None and mine.step.opaque_reason is None and mine.model[1].weight[0, 0] == 7.0  # type: ignore[index]


def test_what_other_processes_may_change_is_not_audited(caplog: pytest.LogCaptureFixture, no_captures: Any) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net().share_memory()
        return model, SGD(model.parameters(), lr=0.1)

    caplog.set_level(logging.WARNING, logger="waterflow")
    mine = train_step(make, batches(), audit=1)
    assert mine.step is not None and mine.step.opaque_reason is None and mine.step.audit.passed == 0
    told = [r.getMessage() for r in caplog.records if "shared memory" in r.getMessage()]
    assert len(told) == 1 and "was not audited: buffer 'mean' lies in shared memory" in told[0]


# -- what a fault costs


def test_a_fault_costs_no_study(planted: Any, unlike: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of two kinds: the faulty one's run eagerly, or fail where they had taken steps on trust."""
    planted(lambda graph: other_constant(graph) if any(1.5 in node.args for node in graph.nodes) else None)
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    data = batches(20)
    reasons: dict[int, Any] = {}

    def objective(trial: Any) -> float:
        model = unlike()[0] if trial.suggest_categorical("kind", ["faulty", "healthy"]) == "faulty" else frozen_and_adapter()[0]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        step = wf.Step(model, loss=F.cross_entropy, optimizer=Adam(trained))
        result = float([step(batch) for batch in data][-1])
        reasons[trial.number] = step.opaque_reason
        return result

    study = optuna.create_study()
    for number in range(8):
        study.enqueue_trial({"kind": ("faulty", "healthy")[number % 2]})
    wf.optimize(study, objective, n_trials=8, memory="1GiB", max_concurrent=2)
    assert [trial.state.name for trial in study.trials].count("COMPLETE") >= 7
    assert all(reasons[number] is None for number in (1, 3, 5, 7)) and "not the eager one" in str(reasons.get(6, reasons.get(4)))


@pytest.mark.parametrize("catch", [(), (ValueError,)])
def test_a_trial_that_took_faulty_steps_on_trust_fails_alone(
    catch: Any, monkeypatch: pytest.MonkeyPatch, no_captures: Any, unlike: Any
) -> None:
    blind(monkeypatch)

    def objective(trial: Any) -> float:
        model, optimizer = unlike()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, audit=4)
        for number, batch in enumerate(batches()):
            if number == 3:
                model.scale = 2.0
            loss = step(batch)
        return float(loss)

    study = optuna.create_study()
    summary = wf.optimize(study, objective, n_trials=3, memory="1GiB", max_concurrent=1, catch=catch)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"] and summary.trials == 3


def test_a_job_that_took_faulty_steps_on_trust_fails_alone(
    monkeypatch: pytest.MonkeyPatch, no_captures: Any, unlike: Any
) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "first")
    monkeypatch.setattr(audit, "EARLIEST", 4)
    monkeypatch.setattr(audit, "LATEST", 4)
    blind(monkeypatch)

    def changing() -> Iterator[Any]:
        for number, batch in enumerate(batches(6)):
            if number == 2:
                model.scale = 2.0
            yield batch

    model = unlike()[0]
    one = wf.Job(name="one", model=model, data=changing, loss=F.cross_entropy, optimizer=lambda p: SGD(p, lr=0.1), seed=0)
    other = wf.Job(
        name="other",
        model=lambda: frozen_and_adapter()[0],
        data=batches(6),
        loss=F.cross_entropy,
        optimizer=lambda p: SGD(p, lr=0.1),
        seed=0,
    )
    results = wf.train([one, other], memory="1GiB", max_concurrent=1)
    assert [result.status for result in results] == ["failed", "completed"]
    assert isinstance(results[0].error, wf.AuditError)


# -- the memory of a state


def test_memory_is_that_of_the_tensors_alone() -> None:
    whole = torch.arange(40, dtype=torch.float32)
    odd = torch.arange(30, dtype=torch.uint8)
    tensors = [whole[3:7], whole[5:11].view(2, 3).t(), whole[20:21], odd[1:4], torch.tensor(2, dtype=torch.int64)]
    memory, before = _C.StateBytes(tensors), [t.clone() for t in tensors]
    memory.keep()
    assert all(map(same_bits, before, map(memory.kept, tensors)))
    sum_before = memory.checksum()
    assert memory.is_as()
    for tensor in tensors:
        tensor.add_(1)
    whole[0] = whole[12] = odd[7] = 100
    assert not memory.is_as() and memory.checksum() != sum_before
    memory.put()
    assert all(map(same_bits, before, tensors)) and memory.is_as() and memory.checksum() == sum_before
    assert whole[0] == whole[12] == odd[7] == 100


def test_memory_of_tensors_that_were_resized_is_brought_back() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.empty(0), torch.arange(4), torch.zeros(()), torch.arange(5.0)]
    memory, before = _C.StateBytes(tensors), [t.clone() for t in tensors]
    memory.keep()
    tensors[0].resize_(1000, 3).fill_(7.0)
    tensors[1].resize_(8).fill_(7.0)
    tensors[2].resize_(1).fill_(7)
    tensors[4].data = torch.ones(7)
    assert not memory.is_as() and all(map(same_bits, before, map(memory.kept, tensors)))
    memory.put()
    assert all(map(same_bits, before, tensors)) and memory.is_as()


@pytest.mark.parametrize("size", [1, 31, 32, 4097])
def test_a_checksum_tells_each_byte(size: int) -> None:
    tensor = torch.arange(size).to(torch.uint8)
    memory = _C.StateBytes([tensor])
    sums = {memory.checksum()}
    for place in {0, size // 2, size - 1}:
        tensor[place] ^= 0x80
        sums.add(memory.checksum())
        tensor[place] ^= 0x80
    assert len(sums) == 1 + len({0, size // 2, size - 1}) and memory.checksum() in sums


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_lies_in_memory_that_cannot_be_written_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    tensor = torch.from_numpy(np.memmap(path, mode="r", dtype=np.float32))
    memory = _C.StateBytes([tensor])
    memory.keep()
    memory.put()
    assert memory.is_as()


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


def test_a_batch_on_the_bytes_of_a_parameter_is_no_difference() -> None:
    """Through a storage of its own, and behind a smaller tensor that begins later."""
    weight = torch.zeros(8, 8)
    ranges = Ranges([weight, weight[1, :2]])
    assert ranges.have(torch.from_numpy(weight.numpy()[3])) and not ranges.have(torch.zeros(8))
