"""Eager steps: the reference that captured steps must equal, and the form of steps that cannot be captured."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import InvalidJobError, JobCancelled, WaterflowError
from waterflow.executor.cancel import doing
from waterflow.executor.engine import EagerWork, Engine
from waterflow.executor.program.beside import in_step
from waterflow.executor.program.capture_cache import persistent_bytes, storage_bytes
from waterflow.executor.rng import own_numbers
from waterflow.partition.capture.optimizers import WATCHER, captured_form, hooks_of, parameters_of
from waterflow.partition.capture.reasons import user_place
from waterflow.partition.capture.spec import StepSpec, split_result
from waterflow.partition.capture.substitution import in_forward
from waterflow.partition.guards.step_key import flat_leaves
from waterflow.partition.plan.plan import Plan, opaque_plan

# The first eager steps are metered, and then one of many: counting bytes takes a notable part of the time of a small step.
FIRST_METERED, METERED_EVERY = 3, 32
# A step that runs eagerly is looked at again behind so many times as long as the last look took; a look counts for 50 steps at most.
LOOK_AGAIN_AFTER, STEPS_OF_A_LOOK, LEAST_OFTEN = 10, 50, 160

_NOTHING = contextlib.nullcontext()
_NOTHING_TO_SET = contextlib.nullcontext(_NOTHING)


class SecondLook:
    """When a step that runs eagerly is looked at again, as what kept it from being captured may be gone.

    ``seconds`` took the first look, its capture; the first of a process imports much of torch, so steps are counted, too. Each time
    that a look is in vain the next one waits twice as often as long as it took, up to a bound: most look at what is known.
    """

    def __init__(self, seconds: float) -> None:
        self._times, self._steps = LOOK_AGAIN_AFTER, 0
        self._next = time.perf_counter() + self._times * seconds

    def due(self) -> bool:
        """Count a step; return True if it is to be looked at."""
        self._steps += 1
        return self._steps >= self._times * STEPS_OF_A_LOOK or time.perf_counter() >= self._next

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """A look, inside the context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._times, self._steps = min(2 * self._times, LEAST_OFTEN), 0
            now = time.perf_counter()
            self._next = now + self._times * (now - began)


class ModelAndLoss(nn.Module):
    """A module that contains a model and a loss module with tensors of its own (class weights, margins)."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = model.training


class OfTensors:
    """A step function of waterflow's own: model and loss get tensors where the batch holds NumPy's arrays, as from a loader."""


class _OfTarget(OfTensors):
    """A step function that calls ``loss(output, target)``."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise InvalidJobError(
                f"loss(output, target) needs batches (input, target); got {type(batch).__name__}. "
                "Pass step=, a function of (model, batch), for other batches; data= that is one batch needs brackets: [batch]"
            )
        return self.loss(model(*batch[:-1]), batch[-1])


class _OfHeldLoss(OfTensors):
    """A step function that calls the loss module of a ``ModelAndLoss``."""

    def __call__(self, holder: nn.Module, batch: Any) -> Any:
        assert isinstance(holder, ModelAndLoss)
        return _OfTarget(holder.loss)(holder.model, batch)


class OfPart:
    """A step function of (part of a batch, weight), whose loss counts by its weight; and of (loss,), for an update alone."""

    def __init__(self, compute_loss: Callable[[nn.Module, Any], Any]) -> None:
        self.compute_loss = compute_loss

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the weighted loss of the part, or the loss that was given."""
        if len(batch) == 1:
            return batch[0]  # type: ignore[no-any-return]
        part, weight = batch
        return split_result(self.compute_loss(model, part), numbers=True)[0] * weight


class _OfOutput(OfTensors):
    """A step function for a model that computes its loss itself, as Hugging Face's do."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        named, given = (
            (batch, ()) if isinstance(batch, Mapping) else ({}, batch if isinstance(batch, (tuple, list)) else (batch,))
        )
        if not model._forward_pre_hooks:  # they may change what forward is given
            _check_call(model, given, named)
        output = model(*given, **named)
        if isinstance(output, dict) and "loss" in output:
            return output["loss"]
        return getattr(output, "loss", output)


def _check_call(model: nn.Module, given: Any, named: Any) -> None:
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except ValueError:
        pass  # a forward that does not say what it takes
    except TypeError as error:
        raise InvalidJobError(
            f"without loss= and step= the model is called with the whole batch, and {type(model).__name__} does not "
            f"take it ({error}). Pass loss=, a function of (output, target), or step=, one of (model, batch)"
        ) from None


def compose(
    model: nn.Module, loss: Any, step: Callable[[nn.Module, Any], Any] | None
) -> tuple[nn.Module, Callable[[nn.Module, Any], Any]]:
    """Return the module to train, and the function of (module, batch) for its loss."""
    if step is None and loss is not None and not isinstance(loss, nn.Module) and wants_model(loss):
        step = loss
    if step is not None:
        return model, step
    if loss is None:
        return model, _OfOutput()
    if isinstance(loss, nn.Module) and any(True for _ in [*loss.parameters(), *loss.buffers()]):
        return ModelAndLoss(model, loss), _OfHeldLoss()
    return model, _OfTarget(loss)


def wants_model(function: Any) -> bool:
    """Return True if a loss is in fact a step function: its first parameter is called ``model``."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "model"


@doing("in a step")
class EagerStep:
    """One training step through autograd and the optimizer's own ``step()``. Errors get a note with ``name`` and the place.

    ``sums`` are the gradients that earlier calls of an accumulating step have added up for the next update. Gradients that a
    parameter of the model received before the optimizer had it count in its first update. All other gradients that are in
    ``.grad`` of the optimizer's parameters, from another backward pass, are dropped.
    """

    def __init__(self, spec: StepSpec, generators: Sequence[torch.Generator], name: str) -> None:
        self._spec = spec
        self._numbers = own_numbers(*generators) if generators else _NOTHING
        self._name = name
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self._calls, self.largest = 0, -1  # bytes of the largest batch
        self._persistent = (-1, -1), 0
        self.plan_before: Plan | None = None
        self._trained: list[torch.Tensor] | None = None  # by the last step

    def metered(self, batch: Any, update: bool, surrounding: torch.dtype | None) -> tuple[Any, int]:
        """Run the step as ``__call__`` does; return its result, and the most bytes that it took at once."""
        return _C.metered(lambda: self(batch, update, surrounding), self._spec.device.type == "cuda")

    def now_and_then_metered(self, batch: Any, update: bool, surrounding: torch.dtype | None, size: int) -> tuple[Any, int]:
        """Run the step; return its result and its bytes: 0, not metered, for most batches (``size`` bytes) no larger than before."""
        wanted = self._is_metered() or size > self.largest
        self._calls, self.largest = self._calls + 1, max(size, self.largest)
        if wanted:
            return self.metered(batch, update, surrounding)
        return self(batch, update, surrounding), 0

    def _is_metered(self) -> bool:
        return self._calls < FIRST_METERED or self._calls % METERED_EVERY == 0

    def is_as_before(self, batch: Any) -> bool:
        """Return True, and count the step, if its memory need not be metered: another of at least its size was lately."""
        leaves = flat_leaves(batch)
        if self._is_metered() or leaves is None or storage_bytes(leaves) > self.largest:
            return False
        self._calls += 1
        return True

    def persistent_bytes(self) -> int:
        """Return the bytes that persist, with the state that a first update will make.

        They are counted anew if the optimizer has more or fewer tensors than before.
        """
        groups, state = self._spec.optimizer.param_groups, self._spec.optimizer.state
        size = sum(len(group["params"]) for group in groups), sum(map(len, state.values()))
        if size != self._persistent[0]:
            copies = self._spec.more_sums + 1 if self._spec.shards > 1 else 0
            sums = copies * storage_bytes(parameters_of(self._spec.optimizer))
            defaults = self._spec.optimizer.defaults
            to_come = 0 if size[1] else 2 if "betas" in defaults else 1 if defaults.get("momentum") else 0
            state = to_come * storage_bytes(parameters_of(self._spec.optimizer))
            self._persistent = size, persistent_bytes(self._spec.model, self._spec.optimizer) + sums + state
        return self._persistent[1]

    def plan(self, height: int, batch: int) -> Plan:
        """Return the plan of a step of ``height`` bytes on a batch of ``batch`` bytes; the same object if nothing has changed."""
        persistent, known = self.persistent_bytes(), self.plan_before
        if known is None or (height, persistent, batch) != (known.height, known.persistent, known.batch):
            known = self.plan_before = opaque_plan(self._name, height, persistent=persistent, batch=batch)
        return known

    def admitted(self, engine: Engine, job: int, batch: Any, update: bool, surrounding: torch.dtype | None) -> Any:
        """Run the job's only step under way in the place of a lane, by the plan of the one before. Raises what the step raises."""
        plan = self.plan_before
        assert plan is not None
        returned: list[Any] = []
        work = EagerWork(engine, job, plan.height, lambda: returned.append(self(batch, update, surrounding)))
        engine.submit(job, work.run, plan, None)
        try:
            work.do()
            work.run.outputs()
        except _C.Cancelled as error:
            raise JobCancelled(str(error)) from None
        engine.poll(job)
        return returned[0]

    def named_sums(self) -> dict[str, torch.Tensor]:
        """Return the gradient sums by the parameter's name."""
        named = self._spec.model.named_parameters() if self.sums else ()
        return {name: self.sums[p] for name, p in named if p in self.sums}

    def take_sums(self) -> dict[str, torch.Tensor]:
        """Return the gradient sums by name, and drop them here, as another object goes on from them."""
        taken, self.sums = self.named_sums(), {}
        return taken

    def put_sums(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Go on from copies of the gradient sums of another object."""
        parameters = dict(self._spec.model.named_parameters()) if sums else {}
        self.sums = {parameters[name]: one.clone() for name, one in sums.items()}

    def __call__(self, batch: Any, update: bool, surrounding: torch.dtype | None = None) -> Any:
        """Train on ``batch``; returns the loss, or (loss, metrics).

        ``surrounding`` is the data type of the autocast around the caller, which may be on another thread.
        """
        in_step.now = True
        try:
            return self._train(batch, update, surrounding)
        except Exception as error:
            place = list(user_place(error.__traceback__, self._spec.model))
            if not (place or isinstance(error, WaterflowError)) and isinstance(self._spec.compute_loss, (_OfTarget, _OfHeldLoss)):
                place = [f"given a batch of which {_shown(batch[:-1])} goes to the model and {_shown(batch[-1])} is the target"]
            if "backward through the graph a second time" in str(error):
                place += [
                    "a step function returns its loss: leave out backward() and update, and detach() what it keeps for the next"
                ]
            note = ", ".join([f"in step {self._name!r}", *place])
            if not isinstance(error, WaterflowError) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        finally:
            in_step.now = False

    def _train(self, batch: Any, update: bool, surrounding: torch.dtype | None) -> Any:
        spec = self._spec
        trained = parameters_of(spec.optimizer)
        if self.sums or any(parameter.grad is not None for parameter in trained):
            # The optimizer's parameters are known from the last step: their gradients are replaced by our sums. A parameter
            # that has joined since keeps the gradient that it has.
            known = set(map(id, trained if self._trained is None else self._trained))
            for parameter in trained:
                if parameter.grad is None or id(parameter) in known:
                    parameter.grad = self.sums.get(parameter)
        self._trained = trained
        with self._numbers, _NOTHING if torch.is_grad_enabled() else torch.enable_grad(), self._casts(surrounding) as cast:
            with cast:
                result = spec.compute_loss(spec.model, batch)
            loss, metrics = split_result(result, numbers=True)
            if not (update and spec.shards > 1):
                (loss / spec.accumulate if spec.accumulate > 1 else loss).backward()
        if update:
            reached = [p for p in trained if p.grad is not None]
            if spec.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(reached, spec.clip_norm)
                if metrics is not None:
                    metrics = {**metrics, "grad_norm": metrics.get("grad_norm", norm)}
            if spec.clip_value is not None:
                nn.utils.clip_grad_value_(reached, spec.clip_value)
            with captured_form(spec.optimizer):
                _step(spec.optimizer)
        if update and type(spec.optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            self.sums = {}  # as torch's zero_grad() would leave it; calling that takes a notable part of a small step
        else:
            if update:
                spec.optimizer.zero_grad(set_to_none=True)
            self.sums = {p: gradient for p in trained if (gradient := p.grad) is not None}
        for parameter in trained:
            parameter.grad = None
        if metrics is not None:
            return loss.detach(), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, metrics)
        return loss.detach()

    def _casts(self, surrounding: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        # ``in_forward`` costs time of small steps, and mostly there is nothing to set.
        kind = self._spec.device.type
        set_already = torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled(kind)
        if self._spec.autocast is None and surrounding is None and set_already:
            return _NOTHING_TO_SET
        return in_forward(self._spec, surrounding)


def _shown(given: Any) -> str:
    shown = pytree.tree_map_only(torch.Tensor, lambda one: f"{str(one.dtype)[6:]}{list(one.shape)}", given)
    return str(shown).replace("'", "")


_RECORDED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # torch's wrapper of each ``step()``


def _step(optimizer: torch.optim.Optimizer) -> None:
    # torch wraps each ``step()`` in a record for profilers, which takes a tenth of a small step. It is left out where it has no
    # effect: no profiler is on, no hook but ours is there, and neither class nor instance has a ``step`` of the user's.
    step, patched = type(optimizer).step, vars(optimizer).get("step")
    listens = any(hooks.keys() - {WATCHER} for hooks in hooks_of(optimizer))
    by_scheduler = patched is None or getattr(patched, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler"
    torchs = by_scheduler and getattr(step, "__code__", None) is _RECORDED
    if listens or not torchs or torch.autograd.profiler._is_profiler_enabled:
        optimizer.step()
    else:
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
