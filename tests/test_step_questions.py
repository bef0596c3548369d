"""Steps that ask what their tensors are, or what values the batch has: they go the way that the eager step goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, compare, train_eager
from waterflow.executor.engine import Engine
from waterflow.executor.program.capture_cache import CaptureCache
from waterflow.partition.capture.substitution import as_in_eager
from waterflow.partition.guards.batch_reads import MOST_WAYS


def making(model: Any = Net, optimizer: Any = AdamW, **options: Any) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model(**options)
        return made, optimizer(made.parameters(), lr=1e-2, fused=True)

    return make


WAYS = (0, 1, 0, 2, 1, 3, 0, 2)


def masked(count: int = len(WAYS), width: int = 6) -> list[dict[str, torch.Tensor]]:
    """Batches whose first ``WAYS`` entries of the mask are not set."""
    random = torch.Generator().manual_seed(3)
    batches = []
    for off in WAYS[:count]:
        mask = torch.ones(4, width, dtype=torch.long)
        mask[0, :off] = 0
        x, y = torch.randn(4, width, generator=random), torch.randint(4, (4,), generator=random)
        batches.append({"x": x, "y": y, "mask": mask})
    return batches


def drops_mask(model: nn.Module, batch: Any) -> torch.Tensor:
    if batch["mask"].all():
        return F.cross_entropy(model(batch["x"]), batch["y"])
    return F.cross_entropy(model(batch["x"] * batch["mask"] / batch["mask"].float().mean()), batch["y"])


def asks_twice(model: nn.Module, batch: Any) -> torch.Tensor:
    x, mask = batch["x"], batch["mask"]
    if (mask == 0).sum() > 1:
        x = x * 2 if mask[0, 2] == 1 else x * 3
    elif bool(torch.all(mask == 1)):
        x = x * 5
    return F.cross_entropy(model(x), batch["y"])


def equal_halves(model: nn.Module, batch: Any) -> torch.Tensor:
    rows = batch["mask"].chunk(2)
    return F.cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if torch.equal(*rows) else 1.0)


def no_nan(model: nn.Module, batch: Any) -> torch.Tensor:
    if torch.isnan(batch["x"]).any():
        return F.cross_entropy(model(torch.nan_to_num(batch["x"])), batch["y"])
    return F.cross_entropy(model(batch["x"]), batch["y"])


def with_a_constant(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step that only the thorough way of tracing takes."""
    return drops_mask(model, batch) * torch.tensor(2.0)


@pytest.mark.parametrize(
    ("step", "ways"),
    [(drops_mask, 2), (asks_twice, 4), (equal_halves, 2), (no_nan, 1), (with_a_constant, 2)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_answers_are_part_of_the_key(no_captures: CaptureCache, step: Any, ways: int) -> None:
    compare(making(Net, dropout=0.2), masked(), step=step)
    assert no_captures.captures == ways


def test_answers_in_an_engine(no_captures: CaptureCache) -> None:
    with Engine(memory=256 * MiB, lanes=2) as engine:
        compare(making(Net, dropout=0.2), masked(), step=asks_twice, engine=engine)
    assert no_captures.captures == 4


def test_the_way_of_a_batch_that_comes_later(no_captures: CaptureCache) -> None:
    """Another job, whose first batch has another answer than that which the capture was made of."""
    compare(making(Net), masked(4), step=drops_mask)
    compare(making(Net), masked(4)[1:], step=drops_mask)
    assert no_captures.captures == 2


def test_steps_handed_in_ahead() -> None:
    batches = masked()
    eager = train_eager(making(Net), batches, step=drops_mask)
    torch.manual_seed(5)
    model, optimizer = making(Net)()
    with wf.Engine(memory=256 * MiB, lanes=1) as engine:
        step = wf.Step(model, step=drops_mask, optimizer=optimizer, engine=engine)
        step.hold_batches(len(batches))
        pending = [step.submit(batch) for batch in batches]
        assert_same(Trained([one.result() for one in pending], model, optimizer), eager)
        assert step.opaque_reason is None


def test_plans_are_those_of_the_way() -> None:
    model, optimizer = making(Net)()
    step = wf.Step(model, step=drops_mask, optimizer=optimizer)
    whole, part = masked(2)
    nodes = [len(step._bound_steps.captured(*wf.step.flatten(batch)).lowered.instructions) for batch in (whole, part)]  # type: ignore[attr-defined]
    assert nodes[0] < nodes[1] and step.plan_for(part).height >= step.plan_for(whole).height


# -- what is asked and cannot be a question of the batch alone


def of_a_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if batch["x"].sum() > 0 else 1.0)


def of_a_weight(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    return loss * 2 if (next(model.parameters())[0, 0] > 0) & batch["mask"].all() else loss


def of_a_change(model: nn.Module, batch: Any) -> torch.Tensor:
    mask = batch["mask"].clone()
    mask.mul_(0)
    return F.cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if mask.all() else 1.0)


def of_chance(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if torch.randint(2, (1,)) > 0 else 1.0)


def of_a_number(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) * int(batch["mask"].sum())


@pytest.mark.parametrize("step", [of_a_sum, of_a_weight, of_a_change, of_chance, of_a_number])
def test_what_else_is_asked_runs_eagerly(step: Any) -> None:
    compare(making(Net), masked(4), step=step, opaque="step reads the values")


def test_a_batch_that_the_step_changes() -> None:
    def clears(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) * (2.0 if batch["mask"].all() else 1.0)
        batch["mask"].zero_()
        return loss

    def same_twice() -> list[Any]:
        (one,) = masked(1)
        return [one, one, one]

    eager = train_eager(making(Net), same_twice(), step=clears)
    torch.manual_seed(5)
    model, optimizer = making(Net)()
    step = wf.Step(model, step=clears, optimizer=optimizer)
    assert_same(Trained([step(batch) for batch in same_twice()], model, optimizer), eager)
    assert step.opaque_reason is not None and "pass a copy" in step.opaque_reason


def test_a_batch_that_lies_in_a_buffer() -> None:
    class Closing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("open", torch.ones(6, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.open.mul_(0)
            return super().forward(x)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (2.0 if batch[2].all() else 1.0)

    ends = []
    for captured in (True, False):
        torch.manual_seed(5)
        model, optimizer = making(Closing)()
        job = wf.Step(model, step=step, optimizer=optimizer) if captured else None
        losses = []
        for batch in masked(3):
            given = (batch["x"], batch["y"], model.open[:])
            if job is not None:
                losses.append(job(given))
                continue
            losses.append(step(model, given))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(Trained(losses, model, optimizer, job))
    assert_same(*ends)
    assert "pass a copy" in str(ends[0].step.opaque_reason)  # type: ignore[union-attr]


def test_a_step_with_too_many_ways(no_captures: CaptureCache) -> None:
    def bits(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        for place in range(4):
            loss = loss * 2 if batch["mask"][0, place] == 1 else loss * 3
        return loss

    batches = [dict(masked(1)[0], mask=torch.tensor([[(i >> b) & 1 for b in range(4)]])) for i in range(16)]
    compare(making(Net), batches, step=bits)
    assert no_captures.captures <= MOST_WAYS + 1


# -- what tensors are


@pytest.mark.needs_time("transformers is imported")
def test_a_mask_that_hugging_face_drops(no_captures: CaptureCache) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip

    def make() -> tuple[nn.Module, Optimizer]:
        model = transformers.LlamaForCausalLM(config).train()
        return model, AdamW(model.parameters(), lr=1e-2)

    ids = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids, "attention_mask": one["mask"]} for one in masked(6)]
    compare(make, batches, step=lambda model, batch: model(**batch).loss)
    assert no_captures.captures == 2


def frozen(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(2)
    if kind == "lstm":
        lstm = nn.LSTM(8, 8, batch_first=True).eval()
        return lambda x: lstm(x)[0]
    if kind == "attention":
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        return lambda x: attention(x, x, x, need_weights=False)[0]
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "attention", "encoder"])
def test_what_trains_nothing_has_the_eager_kernels(kind: str, thorough: bool) -> None:
    teacher = frozen(kind)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted * (torch.tensor(2.0) if thorough else 2.0))

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(8, 8)
        return model, SGD(model.parameters(), lr=0.1, fused=True)

    batches = [(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
    compare(make, batches, step=step, opaque="call it outside, and detach" if kind == "lstm" else None)


def test_other_threads_hear_what_their_tensors_are() -> None:
    class Own(torch.Tensor):
        """Has functions of its own."""

    mode = torch._subclasses.FakeTensorMode()
    fake, own = mode.from_tensor(torch.ones(1)), torch.ones(1).as_subclass(Own)
    asks = torch.overrides.has_torch_function
    heard: list[bool] = []
    with as_in_eager(pytest.fail):  # type: ignore[arg-type]
        other = threading.Thread(target=lambda: heard.append(torch.overrides.has_torch_function((fake,))))
        other.start()
        other.join()
        heard += [torch.overrides.has_torch_function(one) for one in ((fake, None, 1), (own,))]
    assert heard == [asks((fake,)), False, True] and torch.overrides.has_torch_function is asks


@pytest.mark.needs_time("torch compiles")
@pytest.mark.filterwarnings("ignore")
def test_torch_cond_works_in_a_step_and_behind_it() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        h = model(batch[0])
        return torch.cond(batch[1].sum() > 0, lambda h: h * 2, lambda h: h * 0.5, (h,)).pow(2).mean()  # type: ignore[no-any-return]

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(8, 4)
        return model, SGD(model.parameters(), lr=0.01, fused=True)

    batches = [(torch.randn(4, 8), torch.full((1,), sign)) for sign in (1.0, -1.0)]
    model, _ = make()
    torch.manual_seed(5)
    step_first = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.01, fused=True))
    step_first(batches[0])
    assert "torch.cond" in str(step_first.opaque_reason)
    assert torch.cond(torch.tensor(True), lambda h: h * 2, lambda h: h * 3, (torch.ones(1),)).item() == 2
    compare(make, batches, step=step, opaque="torch.cond")
