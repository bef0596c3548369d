"""What newcomers do by hand around a step, or write otherwise than it is called: told in a sentence with the remedy."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, Optimizer, RMSprop

import waterflow as wf
from tests.support import MiB, Net, images, same_bits
from waterflow.executor import memory_limit
from waterflow.executor.engine import Engine


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


def made(kind: Callable[..., Optimizer] = AdamW, **settings: Any) -> tuple[nn.Module, Optimizer, wf.Step]:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    return model, optimizer, wf.Step(model, **({"loss": F.cross_entropy} | settings), optimizer=optimizer)


def peeking(model: nn.Module, batch: Any) -> Any:
    """Cannot be captured; has metrics."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return (loss if loss.item() > 0 else -loss), {"twice": 2 * loss}


early_by_value = nn.utils.clip_grad_value_
early = nn.utils.clip_grad_norm_  # as whoever has imported it before any step
KINDS: dict[str, dict[str, Any]] = {"captured": {}, "eager": {"loss": None, "step": peeking}}


# -- the loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_of_a_loss_was_done(kind: str, engine: Engine | None) -> None:
    _, _, step = made(**KINDS[kind], engine=engine)
    for batch in images(4):
        returned = step(batch)
        loss = returned[0] if kind == "eager" else returned
        with pytest.raises(wf.InvalidJobError, match=r"has done backward and update already; leave out loss\.backward\(\)"):
            loss.backward()
    assert (step.opaque_reason is None) == (kind == "captured")


def test_a_loss_is_an_ordinary_tensor_all_the_same() -> None:
    _, _, step = made()
    loss = step(images(1)[0])
    assert type(loss) is torch.Tensor and not loss.requires_grad and loss.shape == () and loss.numpy() == loss.item()
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=True)["loss"], pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert type(other) is torch.Tensor and torch.equal(other, loss)
    assert not pickle.loads(pickle.dumps(loss)).__dict__
    (loss * torch.ones((), requires_grad=True)).backward()  # what is computed from it has a backward pass of its own


def test_a_step_needs_no_scaler() -> None:
    _, _, step = made()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(wf.InvalidJobError, match=r"a step needs no GradScaler.* Step\(autocast=torch\.bfloat16\)"):
        scaler.scale(step(images(1)[0]))
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert off.scale(step(images(1)[0])).isfinite()


def test_scalers_scale_what_comes_from_elsewhere() -> None:
    made()
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = images(1)[0]
    before = [p.detach().clone() for p in model.parameters()]
    loss = F.cross_entropy(model(x), y)
    assert torch.equal(scaler.scale(loss), 8 * loss)
    assert [torch.equal(one, 8 * loss) for one in scaler.scale([loss, loss])] == [True, True]
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def penalty(model: nn.Module) -> torch.Tensor:
    return 1e-2 * sum(p.abs().sum() for p in model.parameters())  # type: ignore[return-value]


SUMS: dict[str, Callable[[torch.Tensor, nn.Module], torch.Tensor]] = {
    "before": lambda loss, model: loss + penalty(model),
    "behind": lambda loss, model: penalty(model) + loss,
    "less": lambda loss, model: loss - penalty(model),
    "half": lambda loss, model: (0.5 * loss + 2 * penalty(model)) / 2,
    "stacked": lambda loss, model: torch.stack([loss, penalty(model)]).sum(),
    "summed": lambda loss, model: sum([loss, penalty(model), penalty(model)]),  # type: ignore[return-value]
    "forward": lambda loss, model: loss + model(images(1)[0][0]).square().mean(),
    "scaled": lambda loss, model: torch.amp.GradScaler("cpu").scale(loss + penalty(model)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SUMS)
def test_a_backward_pass_of_a_sum_with_a_loss_is_told_once(how: str, kind: str) -> None:
    model, optimizer, step = made(**KINDS[kind])
    with pytest.warns(UserWarning, match=r"backward\(\) of a sum .* Add penalties to the loss inside the step") as caught:
        for batch in images(3):
            optimizer.zero_grad()
            returned = step(batch)
            SUMS[how](returned[0] if kind == "eager" else returned, model).backward()
            optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    if kind == "captured":
        assert step.opaque_reason is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_beside_a_step_without_its_loss_says_nothing(kind: str) -> None:
    """A generator against a step's model, a second model with a constant in its loss, metrics of losses, hand-made updates."""
    discriminator, own, step = made(**KINDS[kind])
    generator = nn.Linear(6, 6)
    optimizer = AdamW(generator.parameters(), lr=0.01)
    other = RMSprop((second := Net()).parameters(), lr=0.01)
    total = torch.zeros(())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in images(3):
            returned = step((x, y))
            loss = returned[0] if kind == "eager" else returned
            (F.cross_entropy(discriminator(generator(x)), y) + 0.1 * generator.weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            (loss + F.cross_entropy(second(x), y)).backward()  # a number for another model
            nn.utils.clip_grad_norm_(second.parameters(), 1.0)
            nn.utils.clip_grad_value_(second.parameters(), 1.0)
            other.step()
            other.zero_grad()
            with torch.no_grad():
                total += loss
            own.zero_grad()
            (F.cross_entropy(discriminator(x), y) / 2).backward()
            own.step()


def constant(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1]) + torch.ones(())
    return loss if loss.item() > 0 else -loss


def test_an_eager_step_may_add_what_has_no_gradient() -> None:
    _, _, step = made(loss=None, step=constant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(images(1)[0])
    assert step.opaque_reason is not None


# -- the optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [AdamW, SGD, RMSprop])
def test_an_update_by_hand_that_finds_no_gradient_is_told_once(kind: str, optimizer: Any) -> None:
    model, own, step = made(optimizer, **KINDS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step's own updates say nothing
        for batch in images(4):
            step(batch)
    with pytest.warns(UserWarning, match="clipped nothing"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"found no gradient.*Leave out optimizer\.step\(\).*clip_grad_norm=") as caught:
        own.step()
        own.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    if optimizer is not RMSprop and kind == "captured":
        assert step.opaque_reason is None


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_hand_that_finds_no_gradient_is_told_once(kind: str) -> None:
    model, _, step = made(**KINDS[kind], clip_grad_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step's own clipping says nothing
        step(images(1)[0])
    with pytest.warns(UserWarning, match=r"found no gradient, and clipped nothing.*Step\(clip_grad_norm=\)") as caught:
        early(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_([*model.parameters()], 1.0)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_value_and_a_scalers_step_are_told(kind: str) -> None:
    model, optimizer, step = made(**KINDS[kind], clip_grad_value=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(images(1)[0])
    with pytest.warns(UserWarning, match=r"clip_grad_value_\(\) found no gradient.*Step\(clip_grad_value=\)") as caught:
        early_by_value(model.parameters(), 1.0)
        nn.utils.clip_grad_value_([*model.parameters()], 1.0)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(wf.InvalidJobError, match="a step needs no GradScaler"):
        torch.amp.GradScaler("cpu").step(optimizer)


def test_clipping_of_ones_own_gradients_says_nothing() -> None:
    model, _, step = made(clip_grad_norm=1.0)
    x, y = images(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early(Net().parameters(), 1.0)  # no Step's
        F.cross_entropy(model(x), y).backward()
        assert early(model.parameters(), 0.1) > 0.1
        assert sum(float(p.grad.square().sum()) for p in model.parameters()) < 0.0101  # type: ignore[union-attr]
        step.close()
        step.optimizer.zero_grad()
        early(model.parameters(), 1.0)


def test_an_update_of_ones_own_gradients_says_nothing() -> None:
    model, optimizer, step = made()
    step(images(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = images(1)[0]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step((x, y))
        copy.deepcopy(optimizer).step()  # another optimizer
        other = LBFGS(Net().parameters())
        other.step(lambda: torch.zeros(()))


def test_a_closure_that_makes_gradients_says_nothing() -> None:
    model, optimizer, step = made(SGD)
    x, y = images(1)[0]
    step((x, y))

    def closure() -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step(closure=closure)


def test_schedulers_and_hooks_of_the_user_are_as_ever() -> None:
    _, optimizer, step = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(images(1)[0])
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.005 and step.opaque_reason is None


@pytest.mark.parametrize("when", ["before the first step", "between steps"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_the_user_run_with_every_step(kind: str, when: str) -> None:
    """Also where an equal job's step was captured, and where there were none before."""
    a_step()(images(1)[0])
    _, optimizer, step = made()
    if when == "between steps":
        step(images(1)[0])
    seen: list[int] = []
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: seen.append(1))
    for batch in images(2):
        step(batch)
    assert seen == [1, 1] and "step hooks" in str(step.opaque_reason)


# -- calls


def a_step(**settings: Any) -> wf.Step:
    return made(**settings)[2]


def trained(**settings: Any) -> Any:
    return wf.train([Net()], **{"loss": F.cross_entropy, "optimizer": AdamW, "data": images(1)} | settings)


BY_POSITION = r"\(\) takes 1 argument by position; got "
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "two arguments": (lambda: a_step()(*images(1)[0]), rf"step{BY_POSITION}2\. Write step\(\(input, target\)\)"),
    "named tensors": (lambda: a_step()(ids=1), r"step\(\) has no ids\. Write step\(\(input, target\)\)"),
    "no batch": (lambda: a_step()(), r"missing a required argument: 'batch'\. Write step\(\(input"),
    "by position": (lambda: wf.Step(Net(), F.cross_entropy, 1), rf"Step{BY_POSITION}3\. Write Step\(model, loss="),
    "a rate": (lambda: a_step(lr=0.1), r"has no lr: .*AdamW\(params, lr=0\.1\)"),
    "no optimizer": (lambda: wf.Step(Net()), r"missing a required argument: 'optimizer'\. Write Step"),
    "a class": (lambda: wf.Step(Net(), optimizer=AdamW), r"got the class AdamW\. Make it .*AdamW\(model\.parameters"),
    "a loss's value": (lambda: a_step(loss=torch.ones(())), "got Tensor; pass the function itself"),
    "a loss's name": (lambda: a_step(loss="ce"), r"function of \(output, target\), such as .*; got 'ce'"),
    "a step of the batch": (
        lambda: a_step(loss=None, step=lambda batch: 0),
        r"step is called with \(model, batch\), and <lambda> \(\S+by_hand.py:\d+\) takes \(batch\)\. Write .*model\(batch\[0\]\)",
    ),
    "a loss of the output": (lambda: a_step(loss=lambda output: 0), r"called with \(output, target\), .* takes \(output\)\."),
    "train: by position": (lambda: wf.train([Net()], images(1)), rf"train{BY_POSITION}2\. Write train\(\["),
    "train: nothing": (lambda: wf.train(), r"train\(\) missing a required argument: 'jobs'"),
    "train: n_jobs": (lambda: trained(n_jobs=2), "no setting n_jobs: .* is max_concurrent=2"),
    "train: epoch": (lambda: trained(epoch=3), "no setting epoch: .* is epochs=3"),
    "train: lane": (lambda: trained(lane=3), r"no setting lane; did you mean lanes=\? Settings"),
    "train: one batch": (lambda: trained(data=images(1)[0]), r"needs brackets: \[batch\]"),
    "train: a loss's value": (lambda: trained(loss=torch.ones(())), "got Tensor; pass the function itself"),
    "Job: epoch": (
        lambda: wf.Job("a", Net, images(1), AdamW, epoch=3),
        r"Job\(\) has no epoch: .* is epochs=3\. Write that in its place$",
    ),  # type: ignore[call-arg]
    "Job: spelt": (lambda: wf.Job("a", Net, images(1), optimiser=AdamW), r"has no optimiser; did you mean optimizer=\? W"),  # type: ignore[call-arg]
    "Job: nothing": (lambda: wf.Job("a"), r"Job\(\) missing a required argument: 'model'\. Write Job\(name, model="),  # type: ignore[call-arg]
    "Engine": (lambda: wf.Engine(memroy="2GiB"), r"Engine\(\) has no memroy; did you mean memory=\? Write Engine"),  # type: ignore[call-arg]
    "SharedData": (lambda: wf.SharedData(images(1), sed=0), r"SharedData\(\) has no sed; did you mean seed=\? Write"),  # type: ignore[call-arg]
    "max_batch_size": (lambda: wf.max_batch_size([], gpus="v100-32g"), r"has no gpus; did you mean gpu=\? Write max"),  # type: ignore[call-arg]
    "train: no parameters": (lambda: trained(optimizer=lambda: 1), r"optimizer is called with \(params\), .* takes \(\)"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_explained(kind: str) -> None:
    call, text = CALLS[kind]
    with pytest.raises(wf.InvalidJobError, match=text) as caught:
        call()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("memory", [4, "24", 2048.0])
def test_a_limit_without_a_unit_is_explained_at_once(memory: int | float | str) -> None:
    with pytest.raises(wf.InvalidJobError, match=rf"memory={memory!r} is \d+ B; did you mean '{memory}GiB'"):
        wf.Engine(memory=memory)
    with wf.Engine(memory="4000B") as engine:
        assert engine.limit == 4000


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        ((torch.randn(4, 6), torch.zeros(4)), r"\(float32\[4, 6\],\) goes to the model and float32\[4\] is the target"),
        (
            (torch.randn(4, 6), torch.zeros(2), torch.zeros(4).long()),
            r"float32\[2\]\) goes to the model and int64\[4\] is the target",
        ),
    ],
)
def test_what_a_loss_was_given_is_told(batch: Any, given: str) -> None:
    _, _, step = made()
    with pytest.raises((RuntimeError, TypeError)) as caught:
        step(batch)
    assert re.fullmatch(rf"in step 'Net', given a batch of which .*{given}", *caught.value.__notes__)


def test_a_mapping_is_a_batch_of_names() -> None:
    class Named(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": F.cross_entropy(super().forward(x), y)}

    x, y = images(1)[0]
    losses = []
    for batch in ({"x": x, "y": y}, UserDict(x=x, y=y)):
        torch.manual_seed(0)
        model = Named()
        step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1))
        losses.append(step(batch))
    assert same_bits(*losses) and str(step.opaque_reason).endswith("a capture cannot look; pass dict(batch)")


def test_a_type_error_inside_of_a_call_stays_what_it_is() -> None:
    def wrong(model: nn.Module, batch: Any) -> Any:
        return model(batch[0], batch[1], batch[2])

    _, _, step = made(loss=None, step=wrong)
    with pytest.raises((TypeError, IndexError)):
        step(images(1)[0])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_jobs": 2}, r"optimize\(\) has no n_jobs: .* is max_concurrent=2\. Write that in its place$"),
        ({"n_trails": 2}, r"has no n_trails; did you mean n_trials=\? Write"),
    ],
)
def test_optunas_names_are_explained(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(wf.StudyError, match=text):
        wf.optimize(optuna.create_study(), lambda trial: 1.0, **settings)


@pytest.mark.parametrize("optimizer", [AdamW, SGD, RMSprop])
def test_an_optimizer_may_be_a_class(optimizer: Any) -> None:
    (result,) = wf.train([Net()], loss=F.cross_entropy, optimizer=optimizer, data=images(2))
    assert result.status == "completed" and result.steps == 2


# -- a batch that does not fit the model


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # the line


PLACE = r"\(in step 'wide', module 'body\.0' \(Linear\), .*test_step_by_hand\.py:\d+, in forward: return self\.body\(x\)"


def wide() -> wf.Job:
    return wf.Job("wide", Deep, data=images(1, shape=(7,)), optimizer=AdamW, loss=F.cross_entropy)


def test_a_wrong_width_is_told_with_the_job_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="waterflow")
    (result,) = wf.train([wide()], on_error="continue")
    assert type(result.error) is RuntimeError
    assert re.search("shapes cannot be multiplied.*" + PLACE, result.to_dict()["error"])
    assert "job 'wide' failed: mat1 and mat2" in caplog.text and "in step 'wide'" in caplog.text
    assert result.traceback is not None and "in step 'wide', module 'body.0' (Linear)" in result.traceback
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        wf.train([wide()])
    assert len(caught.value.__notes__) == 1


def test_the_same_for_a_step(engine: Engine | None) -> None:
    model = Deep()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()), engine=engine, name="wide")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            step(images(1, shape=(7,))[0])
        assert [note.startswith("in step 'wide', module 'body.0'") for note in caught.value.__notes__] == [True]


# -- memory


def test_a_limit_that_the_machine_has_not_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from waterflow.executor import engine as engines

    monkeypatch.setattr(engines, "free_memory", lambda: 16 << 30)
    caplog.set_level("WARNING", logger="waterflow")
    for memory in ("1GiB", 0.8, None, "80%", 16 << 30):
        Engine(memory=memory).close()
    assert not caplog.records
    Engine(memory="2000GiB").close()
    assert "memory='2000GiB' is more than is free here, 16.0 GiB" in caplog.text and "memory=0.8" in caplog.text


@pytest.mark.parametrize(
    ("memory", "bytes_"),
    [("4 GB", 4 * 10**9), ("4gib", 4 << 30), ("4G", 4 * 10**9), ("80%", 80), (" 12.5 % ", 12), ("100%", 100), ("0.5", 50)],
)
def test_memory_is_read_as_people_write_it(memory: str, bytes_: int) -> None:
    assert memory_limit.parse_memory(memory, 100) == bytes_


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (0, "must be positive; got 0"),
        (-1, "must be positive; got -1"),
        (1.5, r"did you mean '1\.5GiB'\? .*share in \(0, 1\]"),
        ("150%", r"cannot read '150%' as memory; write '4GiB', .*a share up to 1 such as '80%'"),
        ("0%", "cannot read '0%' as memory"),
        ("x%", "cannot read 'x%' as memory"),
    ],
)
def test_memory_that_cannot_be_is_explained(memory: Any, text: str) -> None:
    with pytest.raises(wf.InvalidJobError, match=text):
        memory_limit.parse_memory(memory, 100)
