"""Step: one training step of a model, captured at its first call and then run from the capture."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError, InvalidJobError, JobCancelled, StepError, StepIndexError, StepValueError, explained
from waterflow.executor.audit import Audit
from waterflow.executor.cancel import has_limit
from waterflow.executor.data.copies import OwnBatches, brought
from waterflow.executor.engine import EagerWork, Engine, current_engine, current_worker, here
from waterflow.executor.memory_limit import parse_recompute
from waterflow.executor.program import beside, eager, ownership
from waterflow.executor.program.bound_step import BoundStep, BoundSteps
from waterflow.executor.program.capture_budget import CaptureBudget, Horizon, NewKind
from waterflow.executor.program.capture_cache import Faulty, PlannedStep, storage_bytes
from waterflow.executor.program.ownership import Hold, holders, made_here
from waterflow.executor.program.reserve_step import StepClaims
from waterflow.executor.program.settled import Counts, Settled
from waterflow.executor.program.step_future import Done, StepFuture
from waterflow.executor.reservations import Reservations
from waterflow.executor.stats import WAITING, Account
from waterflow.partition.capture.optimizers import parameters_of
from waterflow.partition.capture.reasons import shown_line
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.substitution import surrounding_autocast
from waterflow.partition.guards.batch_reads import CHECK
from waterflow.partition.guards.step_key import flatten, of_torch
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.offsets import Footprint
from waterflow.partition.plan.plan import Plan
from waterflow.partition.plan.profile import StepProfile
from waterflow.planner.search import what_fits
from waterflow.step_arguments import check_arguments, check_device, device_of, own_generator

logger = logging.getLogger("waterflow")
NEW_KINDS = "batches of ever new kinds; pad them to a few sizes, and make numbers tensors"
CHANGES = "what the step reads changes ever again; make it a buffer that is changed in place, or pass it in the batch"


def default_name(model: Any) -> str:
    """Return the model's class, and the trial of a study that trains it."""
    name, trial = type(model).__name__, current_worker()
    return name if trial is None else f"{name} of trial {trial}"


_told_of_studies = False


def _tell_of_plain_study() -> None:
    """Tell, once in a process, that a trial of plain ``study.optimize`` makes a step."""
    global _told_of_studies
    frame = None if _told_of_studies or "optuna" not in sys.modules else sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "optuna.study._optimize":
        frame = frame.f_back
    if frame is not None:
        _told_of_studies = True
        logger.warning(
            "study.optimize runs the wf.Step of each trial alone; wf.optimize(study, objective, ...) in its place runs steps of "
            "several trials side by side"
        )


def node_error(step: str, node: fx.Node, error: _C.NodeError) -> StepError:
    """Return the error of a captured operation that failed, with its phase and the user's line."""
    where = f" ({shown_line(node.meta['line'])})" if "line" in node.meta else ""
    if node.target is CHECK:
        return StepValueError(f"step {step!r}: {str(error).strip()}{where}")
    phase = node.meta.get("phase", "")
    kind = StepIndexError if isinstance(error, _C.NodeIndexError) else StepError
    return kind(f"{node.target} in the {phase} of step {step!r} failed: {str(error).strip()}{where}")


def may_run_eagerly(reservations: Reservations, job: int, spec: StepSpec, leaves: list[Any]) -> bool:
    """Return True if a step on such a batch is sure to be small, as far as weights, batch and other jobs' steps tell.

    An eager step has no plan: the first one runs with all the memory that is left, and none can be brought below its need.
    """
    policy = reservations.policy_of(job)
    if policy.opportunistic or policy.quota is not None:
        return False
    state = WEIGHT_COPIES * storage_bytes(spec.model.parameters()) + storage_bytes(spec.model.buffers())
    return LARGE_SHARE * reservations.room > state + max(BATCH_COPIES * storage_bytes(leaves), reservations.highest)


# A step that may take more than this share of the memory is captured at once: weights, gradients and two moments, and activations,
# of which images have some ten times their own bytes in each stage.
LARGE_SHARE, WEIGHT_COPIES, BATCH_COPIES = 0.25, 4, 32
Batch = Any  # tensors, and tuples, lists or dicts of them
LossFunction = Callable[..., torch.Tensor]
StepFunction = Callable[[nn.Module, Batch], Any]


class Step:
    """A training step of ``model``: forward, loss, backward and update in one call.

    Calling it with a batch returns the loss, an ordinary scalar tensor that the caller may keep, or ``(loss, metrics)`` if the step
    function returns a dict of tensors beside the loss. On the CPU the call returns when the step is done; it releases the
    interpreter lock meanwhile. Parameters, buffers and optimizer state are changed in place. ``p.grad`` is ignored, and is None
    afterwards: do not call ``loss.backward()``, ``optimizer.step()`` or a GradScaler beside a step (see ``clip_grad_norm``). Batches are
    brought to the GPU on which the model is.

    The step is captured at the first call with a batch of a new shape, in a study or a job once that is expected to pay; until then it
    runs eagerly, with the same bits. Steps of equal models share captures. SGD, Adam and AdamW run in their fused form unless made
    with ``fused=False`` or ``foreach=``. A step that cannot be captured runs eagerly; then ``opaque_reason`` says why.

    Inside an engine (``waterflow.optimize``, ``waterflow.train``) the step runs on one of its lanes, beside other jobs. Outside it
    runs alone, on the calling thread. Not thread-safe: one thread calls a step at a time.

    Args:
        model: The module to train, in training mode, on the engine's device.
        loss: ``loss(output, target)``, for batches ``(input, ..., target)``; a function whose first parameter is called ``model`` is
            taken as ``step``. None: the loss is the model's output, or its attribute ``loss``.
        step: ``step(model, batch)`` that returns the loss or ``(loss, dict_of_metrics)``; instead of ``loss``. It gets NumPy's
            arrays in a batch as they are; with ``loss`` they are tensors over the same memory.
        optimizer: A ``torch.optim`` optimizer over the model's parameters. Its groups' numbers, and its state, are read at each call.
        accumulate: Update at every n-th call, with the mean of the n gradients.
        clip_grad_norm: Largest total norm of the gradients of an update, over the optimizer's groups in their order. If the step
            function returns metrics, those of a call that updates have the norm before that, ``grad_norm``; ``math.inf`` clips nothing.
        clip_grad_value: Largest absolute value of a gradient's entry in an update.
        autocast: A data type (``torch.bfloat16``) to run forward and loss in, as under ``torch.autocast``.
        early_updates: Update parameters as soon as their gradients are complete, if gradients would else be live at the step's peak.
            No bit differs; a step that fails in its backward pass may have updated some parameters by then.
        generator: Random operations draw from it. Default: the process's; inside an engine a copy of that, made with the step.
        recompute: Frees activations after the forward pass and recomputes the cheapest of them in the backward pass, with the same
            bits, until the step is at most this many bytes high (``"2GiB"``; without temporaries of kernels). ``"auto"`` does so
            only if the step would not fit into its engine's memory. ``recomputed`` has the cost.
        audit: Run every n-th step eagerly, too, and compare both bit by bit. Default: the environment's ``WATERFLOW_AUDIT``. Its
            default ``first`` audits each new capture at its first step in a process and soon after, then in each job ever more
            rarely; ``all`` does all of that in each job; ``off`` nothing. If a step differs, which is a fault of waterflow,
            this code runs eagerly from then on. Only on the CPU; opaque steps are not audited.
        name: Shown in messages and plans.
        engine: The step runs on this engine's lanes. Default: the calling thread's engine, if any.

    Raises:
        InvalidJobError: Settings contradict each other, or the model, or ``generator``, is on another device.
    """

    steps = property(lambda self: int(self.account["steps"]), doc="Steps that have completed.")
    eager_steps = property(lambda self: int(self.account["eager steps"]), doc="Completed steps that ran eagerly.")

    @explained("Step", "Step(model, loss=F.cross_entropy, optimizer=optimizer)", InvalidJobError)
    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction | nn.Module | None = None,
        step: StepFunction | None = None,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        autocast: torch.dtype | None = None,
        early_updates: bool = True,
        generator: torch.Generator | None = None,
        recompute: int | float | str | None = None,
        audit: int | None = None,
        name: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine if engine is not None else current_engine()
        self.name = name or default_name(model)
        self._worker = current_worker()
        self.account = Account(self.name if self._worker is None else self._worker)
        self.predicted_height = 0
        self.measured_height = 0  # bytes above persistent state, as profiled; 0 before that
        self.most_offloaded = 0  # most bytes that a step held in host memory
        self.planned_requests = self.missed_requests = 0  # served at planned offsets, or by torch's allocator
        self.recomputed: Recomputed | None = None  # what the last step recomputed, and its cost
        self._last_plan: Plan | None = None
        clips = {"clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value}
        check_arguments(model, optimizer, accumulate, loss, step, clips, autocast)
        beside.watch(optimizer)
        ownership.add(optimizer)
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.opaque_reason: str | None = None
        holder, compute_loss = eager.compose(model, loss, step)
        self._takes_arrays = not isinstance(compute_loss, eager.OfTensors)
        self._hold: Hold | None = None
        if self.engine is None:
            _tell_of_plain_study()
        else:
            # Before anything reads the model's tensors: while another thread captures the model, it has stand-ins for them.
            self._hold = Hold(self.name, self.engine.over)
            self._release = weakref.finalize(self, self._hold.release)
            holders.check(self._hold, holder, parameters_of(optimizer))
        self._spec = self._as_run(
            StepSpec(
                model=holder,
                compute_loss=compute_loss,
                optimizer=optimizer,
                update=True,
                accumulate=accumulate,
                clip_norm=clip_grad_norm,
                clip_value=clip_grad_value,
                autocast=autocast,
                device=device_of(model, optimizer),
                early_updates=early_updates,
            )
        )
        check_device(self.name, self._spec.device, self.engine)
        self.generator = generator = own_generator(generator, self._spec.device, self.engine)
        self._on_gpu = self._spec.device.type == "cuda"
        # For what the user's code in an eager step draws on the CPU.
        on_host = own_generator(None, torch.device("cpu"), self.engine) if self._on_gpu else None
        self.generators = [one for one in (on_host, generator) if one is not None]
        self._threads = threads = self.engine.threads_per_lane if self.engine is not None else torch.get_num_threads()
        # In a deterministic study what a job claims follows from its own steps, not from a neighbour's profile.
        ordered = self.engine is not None and self.engine.reservations.clock is not None
        self.recompute = parse_recompute(recompute)
        # With exact=False the bits of an eager step are others.
        exact = self.engine is None or self.engine.exact
        self._budget = CaptureBudget(ordered, account=self.account)
        forms = (self.recompute, exact, self._budget)
        self._bound_steps = BoundSteps(self._spec, generator, threads, type(model).__name__, ordered, self._hold, *forms)
        self._under_way: deque[StepFuture] = deque()
        self._settled: Settled | None = None  # the last step's kind
        self._micro = 0
        self._told: Counter[str] = Counter() if self.engine is None else self.engine.told
        self._eager_step = eager.EagerStep(self._spec, self.generators, self.name)
        self.second_look: eager.SecondLook | None = None  # while it runs eagerly
        self._looked = 0.0  # seconds of the last look that was in vain
        self.audit = Audit(audit, self.name, generator, self._spec.device)
        self._closed = False
        self.own_batches: OwnBatches | None = None  # set if other jobs may read the same batches
        self.job: int | None = None
        self.batches_ahead = 1
        self.waited_for = False  # the caller of submit() waits for the step next, and so runs it itself
        if self.engine is not None:
            self.job = self.engine.add_job(self.name)
            self.engine.accounts.append(self.account)
            if here.policy is not None:
                self.engine.set_policy(self.job, here.policy)
            # A user's own loop may drop a step without close(): its memory must come back to the engine.
            self._finalizer = weakref.finalize(self, self.engine.remove_job, self.job)
            lengths, whose = self.engine.lengths, (self.account.who, self.name)
            if exact and not (ordered or self._on_gpu or self.recompute is not None or self._spec.shards > 1):
                small = partial(may_run_eagerly, self.engine.reservations, self.job, self._spec)
                self._budget.horizon = Horizon(self.account, whose, lengths, self.engine.kinds, small)
            self._ends = weakref.finalize(self, lengths.ended, whose, self.account) if lengths is not None else lambda: None
            made_here.add(self)

    # -- what a caller sees

    @explained("step", "step((input, target)): one batch, as the loader gives it", InvalidJobError)
    def __call__(self, batch: Batch) -> Any:
        """Train on one batch and return the loss, or ``(loss, metrics)``; see the class."""
        if here.before_step is not None:
            here.before_step()
        ahead, began = len(self._under_way), self.account.begin_call()
        try:
            if self._settled is not None and not ahead and (result := self._run_settled(batch)) is not None:
                return beside.handed_out(result)
            return beside.handed_out(self._submit(batch, by_caller=True).result())
        except BaseException:
            # Ctrl-C may arrive after the step was submitted and before it is waited for: cancel it.
            if len(self._under_way) > ahead:
                self._fall(self._under_way[ahead])
            if self.engine is not None and self.job is not None:
                self.engine.native.leave(self.job)
            raise
        finally:
            self.account.end_call(began)

    @property
    def plan(self) -> Plan:
        """The plan for the batch shape that was trained last. Raises RuntimeError before the first call."""
        if self._last_plan is None:
            raise RuntimeError(f"step {self.name!r} has no plan before its first call")
        # Steps of equal models share captures and plans, which have another step's name.
        return self._last_plan.renamed(self.name)

    def plan_for(self, batch: Batch, recompute: int | None = None) -> Plan:
        """Return the plan of a step on batches like this one without training, at most ``recompute`` bytes high.

        Raises CaptureError if the step would run as an opaque job, which has no plan before it has run, and MemoryLimitError if
        it cannot be lowered to that height; its ``needed`` is the lowest height that was found.
        """
        captured = self._bound_steps.captured(*self._flat(batch), recompute)
        return captured.plans(self._threads).plan.renamed(self.name)

    def footprint_for(self, batch: Batch, recompute: int | None = None) -> Footprint:
        """Return the memory requests of such a step; its ``offsets()`` places them. Arguments and errors as ``plan_for``."""
        return self._bound_steps.captured(*self._flat(batch), recompute).footprint()

    def recomputed_for(self, batch: Batch, recompute: int | None = None) -> Recomputed | None:
        """Return what a step on batches like this one would recompute; None for nothing. Otherwise as ``plan_for``."""
        return self._bound_steps.captured(*self._flat(batch), recompute).recomputed

    def close(self) -> None:
        """Leave the engine: cancel queued steps and release the memory. Idempotent.

        Inside a step that the engine runs, this one included, it does not wait for running steps.
        """
        self._budget.horizon = None  # which may know its job
        self._closed, self._settled = True, None
        ownership.discard(self.optimizer)
        if self.engine is not None:
            self._finalizer()
            self._ends()
            self._release()
        made_here.discard(self)
        self._bound_steps.clear()

    def least_plan(self, wanted: Plan | None, quota: int | None) -> Plan:
        """Return the plan that a suspended job needs to come back.

        That is ``wanted``, or its last step in the form that fits into ``quota`` bytes. Raises RuntimeError before the first
        call.
        """
        if self.opaque_reason is None:
            wanted = self._bound_steps.least_plan(wanted, quota, self.batches_ahead)
        return wanted or self.plan

    def expect(self, steps_left: Callable[[], int | None]) -> None:
        """Let ``steps_left()`` tell how many steps are to come, None if nobody knows: a capture is made if they pay for it."""
        if self._budget.horizon is not None:
            self._budget.horizon.left = steps_left

    def hold_batches(self, count: int) -> None:
        """Reserve memory for ``count`` batches from the next call on: steps are submitted before results are read."""
        self.batches_ahead, self._settled = max(self.batches_ahead, count), None

    def __reduce__(self) -> Any:
        raise TypeError(
            f"step {self.name!r} cannot be copied or pickled: copy its model, and the optimizer's state_dict(), and make a new Step"
        )

    # -- what a kind of step may change

    def _as_run(self, spec: StepSpec) -> StepSpec:
        return spec

    def _will_write(self, buffers: Iterable[str]) -> None:
        """Called before a step that writes these buffers of the model."""

    # -- one call

    def submit(self, batch: Batch) -> StepFuture | Done:
        """Submit a batch without waiting for its step. Take results in order.

        A step that runs eagerly has ended when this returns: its caller runs it.
        """
        if here.before_step is not None:
            here.before_step()
        if self._settled is not None and (future := self._submit_settled(batch)) is not None:
            return future
        return self._submit(batch, by_caller=self.waited_for)

    @property
    def settled(self) -> BoundStep | None:
        """The kind of step that may ``run_ahead``, if the next one is of it and nothing has changed; None if Python must see each."""
        settled = self._settled if here.before_step is None else None
        return settled.bound_step if settled is not None and settled.holds() else None

    def run_ahead(self, batches: Sequence[Batch], flag: _C.Flag, losses: list[torch.Tensor]) -> None:
        """Run ``settled`` steps on the first of these batches, until ``flag`` is raised, and append their losses.

        Only while no other step is under way. It ends before a batch of another kind, and before a step that Python must see.
        Raises what a step raises.
        """
        assert self._settled is not None and not self._under_way
        settled, before = self._settled, len(losses)
        try:
            settled.call.run_all(batches[: settled.left], flag, losses)
        except BaseException as error:
            self._settled = None
            self.audit.steps += 1
            raise self._users(error, settled.bound_step, settled.call.failed_node) from None
        finally:
            self._count_settled(settled, len(losses) - before)

    def _run_settled(self, batch: Batch) -> Any:
        # What the step returns; None if Python must see it.
        settled = self._settled
        assert settled is not None
        if not settled.holds():
            return None
        try:
            outputs = settled.call.run(batch)
        except BaseException as error:
            self._settled = None
            self.audit.steps += 1
            raise self._users(error, settled.bound_step, settled.call.failed_node) from None
        if outputs is None:
            return None
        self._count_settled(settled, 1)
        return self._returned(settled.bound_step, outputs)

    def _submit_settled(self, batch: Batch) -> StepFuture | None:
        settled = self._settled
        assert settled is not None
        before = self._under_way[-1].run if self._under_way else None
        if not settled.holds() or (run := settled.call.submit(batch, self.waited_for, before)) is None:
            return None
        self.audit.steps += 1
        future = StepFuture(self.engine, self._finish, run, settled.bound_step, False, 0, {}, gathered=frozenset())
        self._under_way.append(future)
        return future

    def _count_settled(self, settled: Settled, steps: int) -> None:
        self.audit.steps += steps
        self.account["steps"] += steps
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn of a missing optimizer.step()
        if self.engine is not None:
            self.engine.poll(self.job)
            planned, missed = settled.call.take_requests()
            self.planned_requests += planned
            plans = settled.bound_step.plans
            if steps > (missed > 0):  # a run ends with the first step that misses any
                plans.count_misses(0)
            if missed:
                self.missed_requests, self._settled = self.missed_requests + missed, None
                plans.count_misses(missed)

    def _submit(self, batch: Batch, by_caller: bool, update: bool | None = None) -> StepFuture | Done:
        self._settled = None
        if self._closed:
            raise JobCancelled(f"step {self.name!r} was closed")
        # It would wait for the lane and the memory that its caller holds: for ever.
        if self.engine is not None and (self.engine.native.on_a_lane or self.engine.lent_to):
            self.engine.refuse_inside(f"step {self.name!r}")
        if update is None:
            update = (self._micro + 1) % self.accumulate == 0
        # The virtual clock of a deterministic study counts steps that were begun.
        if self._worker is not None and self.engine is not None and self.engine.reservations.clock is not None:
            self.engine.reservations.clock.advance(self._worker)
        own = self.own_batches
        if self._on_gpu and (there := brought(batch, self._spec.device, self._takes_arrays)) is not batch:
            batch, own = there, None
        if self.opaque_reason is not None and not self._may_be_captured_now(batch, update):
            return self._submit_opaque(batch, own, update)
        refused = done = None
        counts, began = Counts.now(self.engine), time.perf_counter()
        try:
            leaves, batch_spec, key = flatten(batch, self._takes_arrays)
            bound_step = self._bound_steps.find(leaves, batch_spec, key, update)
            given = batch
            if own is not None and bound_step.captured.changed_leaves:
                leaves = pytree.tree_leaves(given := own.of(batch, self._as_taken))
            bound_step, _ = self._claimed(bound_step, leaves, batch_spec)  # before its audit, which runs the step
            self._will_write(bound_step.captured.written_buffers)
            done = self._audited(bound_step, leaves, given) if self.audit.due(bound_step) else None
        except CaptureError as error:
            refused = self.audit.refused(error).with_traceback(None)  # its frames would keep the user's tensors alive
            refused.__context__ = refused.__cause__ = None
            self._looked = time.perf_counter() - began
        if refused is not None:
            # Only after it has run eagerly is the step opaque; if that fails, too, the batch was at fault.
            return self._submit_opaque(batch, own, update, refused)
        if done is not None:
            return self._hand_in_captured(*done, bound_step, bound_step.plans.plan, update)
        future = self._submit_captured(bound_step, leaves, batch_spec, update, by_caller)
        if own is None or not bound_step.captured.changed_leaves:
            self._settle(future, counts, batch)
        return future

    def _settle(self, future: StepFuture, counts: Counts, batch: Batch) -> None:
        # What it has decided holds for the next step of its kind, too, unless steps add up or go by values of their batches.
        if self._spec.has_sums or self._on_gpu or future.bound_step is None or not self._bound_steps.keeps(future.bound_step):
            return
        given = self.audit, counts, -1 if self.job is None else self.job, self._threads, batch
        self._settled = Settled.of(future.bound_step, future.bound_step.plans.now, *given)

    def _flat(self, batch: Batch) -> tuple[list[Any], pytree.TreeSpec | None, Hashable]:
        there = brought(batch, self._spec.device, self._takes_arrays) if self._on_gpu else batch
        return flatten(there, self._takes_arrays)

    def _as_taken(self, batch: Batch) -> Batch:
        return batch if self._takes_arrays else of_torch(batch)

    def _audited(self, bound_step: BoundStep, leaves: list[Any], batch: Batch) -> tuple[_C.StepRun, bool] | None:
        """Audit a step that is about to be submitted. Returns its run, and if it was profiled, if the audit ran the step."""
        # The eager twin must start from the state that all earlier steps leave.
        for before in self._under_way:
            before.wait()
        keep = not any(one.run.failed for one in self._under_way)
        own = self._bound_steps.sums, self.engine, self.job, self.batches_ahead
        return self.audit.compare(bound_step, leaves, self._as_taken(batch), *own, keep)

    def _claimed(
        self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None
    ) -> tuple[BoundStep, PlannedStep]:
        planned = bound_step.plans.now
        if self.engine is None or self.job is None:
            return bound_step, planned
        if not bound_step.reduced and self.engine.reservations.covers(self.job, planned.plan, self.batches_ahead):
            return bound_step, planned
        # Only if the reservation fails: what would fit takes captures to find, and improves the error's text.
        search = partial(what_fits, self, self.engine.reservations.room, self.batches_ahead)
        with self.account.spending("waiting for memory"):
            claims = StepClaims(self.engine, self.job, self.name, self._bound_steps, self._under_way)
            return claims.claim(self.batches_ahead, bound_step, leaves, batch_spec, search)

    def _submit_captured(
        self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, update: bool, by_caller: bool
    ) -> StepFuture:
        bound_step, planned = self._claimed(bound_step, leaves, batch_spec)
        profiled = bound_step.plans.wants_profile
        # Guards read values that the step before may still write: they are checked after it has ended.
        behind = bound_step.guarded and self.engine is not None and self._under_way
        wait = partial(self.engine.native.wait, self._under_way[-1].run) if behind else None  # type: ignore[union-attr]
        run = bound_step.binding.run(planned.native, bound_step.given(leaves, wait), bound_step.slots, profiled)
        run.by_caller = by_caller and (self._on_gpu or torch.get_num_threads() == self._threads)
        return self._hand_in_captured(run, profiled, bound_step, planned.plan, update)

    def _hand_in_captured(self, run: _C.StepRun, profiled: bool, bound_step: BoundStep, plan: Plan, update: bool) -> StepFuture:
        if self.engine is not None and self.job is not None:
            self.engine.runs_eagerly(self.job, False)
        first = self._bound_steps.begin_update(bound_step) if update else {}
        future = StepFuture(
            self.engine,
            self._finish,
            run,
            bound_step,
            profiled,
            self._micro,
            first,
            gathered=self._bound_steps.gather(bound_step),
        )
        self._note(bound_step, plan)
        return self._hand_in(future, plan, update)

    def _hand_in(self, future: StepFuture, plan: Plan | None, update: bool) -> StepFuture:
        before = self._under_way[-1].run if self._under_way else None
        self._under_way.append(future)
        # Counted at once, as the next step may be submitted before this one ends; _fall() undoes it.
        self._micro = 0 if update else self._micro + 1
        try:
            if future.run.done:  # by its audit
                return future
            if plan is None or self.engine is None or self.job is None:
                # If the step before has failed, this one is dropped with it, as in an engine.
                if before is None or not before.failed:
                    future.run.run_alone()
            else:
                self.engine.submit(self.job, future.run, plan, before)
        except BaseException:
            self._fall(future)
            raise
        return future

    def _finish(self, future: StepFuture) -> Any:
        run = future.run
        try:
            if self.engine is not None:
                self.engine.native.wait(run)
                self.engine.poll(self.job)
            elif not run.done:
                raise JobCancelled(f"step {self.name!r}: an earlier step of this job failed")
            outputs = run.outputs()
        except BaseException as error:
            self._fall(future)
            told = self._users(error, future.bound_step, run.failed_node)
            if told is error:
                raise
            raise told from None
        # Results may be read twice; a step counts once.
        if future in self._under_way:
            self._under_way.remove(future)
            self.account["steps"] += 1
            self.account["eager steps"] += future.bound_step is None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn of a missing optimizer.step()
        if future.bound_step is None:
            return future.returned[0]
        self._note_run(run, future.bound_step, future.profiled)
        return self._returned(future.bound_step, outputs)

    def _returned(self, bound_step: BoundStep, outputs: list[torch.Tensor]) -> Any:
        names = bound_step.captured.capture.metrics
        return outputs[0] if names is None else (outputs[0], dict(zip(names, outputs[1:])))

    def _users(self, error: BaseException, bound_step: BoundStep | None, failed_node: int) -> BaseException:
        """Return the error of a step as its user is told it."""
        if isinstance(error, _C.Cancelled):
            return JobCancelled(str(error))
        if isinstance(error, _C.NodeError) and bound_step is not None:
            return node_error(self.name, bound_step.captured.lowered.instructions[failed_node], error)
        return error

    def _fall(self, future: StepFuture) -> None:
        # A failed step takes the steps submitted after it along: their counters are undone from the last one back, as
        # if none of them had been submitted.
        self._settled = None
        if future not in self._under_way:
            return
        self._micro = future.micro
        while True:
            last = self._under_way.pop()
            self._bound_steps.undo_update(last.first, last.gathered, ended=last.run.failed)
            if last is future:
                return

    # -- opaque

    def _tell_eager(self, error: CaptureError, told: Counter[str]) -> None:
        # One warning per cause in an engine: a study of a hundred trials must not say the same a hundred times.
        how, cause = "eagerly", str(error)
        if isinstance(error, NewKind):
            how, cause = ("eagerly for now", CHANGES) if error.changed else ("batches of new kinds eagerly", NEW_KINDS)
        self.account.cause = cause
        told[cause] += 1
        if told[cause] == 1:
            logger.warning("step %r runs %s, about as fast as without waterflow: %s", self.name, how, error)

    def _note(self, bound_step: BoundStep, plan: Plan) -> None:
        # Plans are frozen and shared: with the same plan there is nothing new to record.
        if self._last_plan is plan:
            return
        if (now := bound_step.captured.recomputed) != self.recomputed:
            self.recomputed = now
            logger.info("step %r recomputes: %s", self.name, now or "nothing")
        self._last_plan = plan
        self.predicted_height = max(self.predicted_height, bound_step.captured.predicted.height)
        self.measured_height = max(self.measured_height, bound_step.plans.measured_height)
        self.most_offloaded = max(self.most_offloaded, plan.offloaded)

    def _note_run(self, run: _C.StepRun, bound_step: BoundStep, profiled: bool) -> None:
        plans = bound_step.plans
        if profiled:
            plans.add_profile(StepProfile.of(run, bound_step.owner.spec.device))
        elif run.planned or run.missed:
            self.planned_requests += run.planned
            self.missed_requests += run.missed
            plans.count_misses(run.missed)
        self.measured_height = max(self.measured_height, plans.measured_height)

    def _is_ordinary(self, batch: Batch) -> bool:
        # The fast path of eager steps: memory is reserved, no other step is queued, and the batch is as the last one.
        # Then the step runs at once, without a reservation or a future.
        if self.engine is not None and self.job is not None:
            known = self._eager_step.plan_before
            claims = self.engine.reservations
            if claims.clock is not None or known is None or not claims.covers(self.job, known, self.batches_ahead):
                return False
        return not self._under_way and self._eager_step.is_as_before(batch)

    def _eagerly(self, batch: Batch, update: bool, tries_again: bool) -> Any:
        surrounding = surrounding_autocast(self._spec.device.type)
        if tries_again:
            self._eager_step.put_sums(self._bound_steps.before_eager())
        if self.engine is None or self.job is None:
            returned = self._eager_step(batch, update, surrounding)
        else:
            returned = self._eager_step.admitted(self.engine, self.job, batch, update, surrounding)
        if tries_again:
            self._bound_steps.after_eager(self._eager_step.take_sums())
        self._micro = 0 if update else self._micro + 1
        self.account["steps"] += 1
        self.account["eager steps"] += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return returned

    def _may_be_captured_now(self, batch: Batch, update: bool) -> bool:
        # What kept the step from being captured (a hook, a print while debugging) may be gone.
        look = self.second_look
        if look is None or not look.due() or not all(future.run.done for future in self._under_way):
            return False
        with look.looking():
            self._bound_steps.after_eager({})
            try:
                leaves, batch_spec, key = flatten(batch, self._takes_arrays)
                self._claimed(self._bound_steps.find(leaves, batch_spec, key, update), leaves, batch_spec)
            except (CaptureError, InvalidJobError, MemoryError, torch.OutOfMemoryError):  # it trains as it is
                self._bound_steps.before_eager()
                self._bound_steps.clear()
                return False
        logger.info("step %r is captured from now on; it ran eagerly: %s", self.name, self.opaque_reason)
        self.opaque_reason = self.second_look = None
        return True

    def _go_opaque(self, error: CaptureError) -> None:
        self.opaque_reason, self._settled = str(error), None
        lasts = self._spec.has_sums or self._spec.shards > 1 or self._budget.own or isinstance(error, Faulty)
        self.second_look = None if lasts else eager.SecondLook(self._looked)
        self._tell_eager(error, self._told)
        self._bound_steps.clear()
        self._begins_on_one_lane()

    def _begins_on_one_lane(self) -> None:
        # A job with a time limit may hang, and would block the lane.
        if self.engine is not None and self.job is not None and not has_limit():
            self.engine.runs_eagerly(self.job, True)

    def _submit_opaque(
        self, batch: Batch, own: OwnBatches | None, update: bool, refused: CaptureError | None = None
    ) -> StepFuture | Done:
        new_kind = isinstance(refused, NewKind)
        self._will_write(name for name, _ in self._spec.model.named_buffers())
        if isinstance(refused, NewKind):
            if str(refused):
                self._tell_eager(refused, self._told)
            elif not self._budget.captured:
                self._begins_on_one_lane()
            self.account[WAITING] += self.account.cause is None
        if own is None and (refused is None or new_kind) and self._is_ordinary(batch):
            return Done(self._eagerly(batch, update, new_kind))
        given = self._as_taken(batch)
        surrounding = surrounding_autocast(self._spec.device.type)
        returned: list[Any] = []
        size = storage_bytes(pytree.tree_leaves(given))

        def train(batch: Batch) -> tuple[Any, int]:
            return self._eager_step.now_and_then_metered(batch, update, surrounding, size)

        # Only here is it known if the step succeeds eagerly, and so is opaque.
        def work() -> None:
            if refused is not None:
                self._eager_step.put_sums(self._bound_steps.before_eager())
            made, height = train(given) if own is None else own.run(train, batch, self._as_taken)
            returned.append(made)
            if self._on_gpu:
                returned.append(given)  # until the GPU has read it
            self.measured_height = max(self.measured_height, height)
            if refused is not None and self._bound_steps.may_try_again(refused):
                self._bound_steps.after_eager(self._eager_step.take_sums())
            elif refused is not None:
                self._go_opaque(refused)

        if self.engine is None or self.job is None:
            run = _C.opaque_run(0, work)
            return self._hand_in(StepFuture(self.engine, self._finish, run, None, False, self._micro, {}, returned), None, update)
        known = self.measured_height > 0 and (refused is None or (new_kind and size <= self._eager_step.largest))
        plan = self._eager_step.plan(self.measured_height, size)
        if not self.engine.reservations.covers(self.job, plan, self.batches_ahead):
            last = self._under_way[-1].run if self._under_way else None
            with self.account.spending("waiting for memory"):
                self.engine.reservations.claim(self.job, plan, batches=self.batches_ahead, last=last)
        self._last_plan = plan
        # The memory of a job's first eager step is unknown: it runs with all that is left, and is measured.
        with contextlib.ExitStack() as around:
            looking = self.engine.reservations.looking(self.job)
            height = plan.height if known else around.enter_context(looking)
            eager = EagerWork(self.engine, self.job, height, work)
            future = self._hand_in(
                StepFuture(self.engine, self._finish, eager.run, None, False, self._micro, {}, returned), plan, update
            )
            eager.do()
        return future
