"""One graph for the steps of several equal jobs: every operation works on all of them at once.

Parameters, buffers and batches of the jobs are stacked along a new first dimension. Operations of the forward and backward
pass are taken through ``torch.vmap``, or through shorter rules where those are known, and recorded flat. What draws random
numbers, and the whole update, is called for each job on its slice: with the job's own generator, learning rate and state, by
the same kernels as alone. These calls are marked with their job (``meta["job"]``): where they are left out, as for a job
that has no batch, nothing of that job changes. What else changes buffers works on copies, which are taken over job by job.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError
from waterflow.partition.capture import Capture
from waterflow.partition.cleanup import clean_up
from waterflow.partition.default_generators import touches_state
from waterflow.partition.fake_rules import TracingMode
from waterflow.partition.operators import (
    is_random,
    is_view,
    lazy_bits,
    running_statistics,
    storage_id,
    tensors_in,
    written_by,
)
from waterflow.partition.recorder import NotPlain, Recorder
from waterflow.partition.spec import GraphInput
from waterflow.partition.stacking_rules import RULES, is_pointwise, pointwise

aten = torch.ops.aten

STACKED_INPUTS = ("parameter", "buffer", "batch")


@dataclass(frozen=True)
class _Value:
    """What a node of one job's step became: a tensor (or several) with all jobs in it, or one for all, or one for each."""

    made: Any
    stacked: bool = False
    apart: bool = False  # `made` has one entry for each job


def stack(capture: Capture, jobs: int) -> Capture:
    """The step of ``jobs`` jobs that share this capture.

    Inputs that the forward or backward pass reads are stacked, ``(jobs, *shape)``; those of the update alone are there once
    for each job (``GraphInput.job``). The loss, and each metric, is there once for each job, job by job.

    Raises CaptureError for a step whose jobs cannot share operations.
    """
    if jobs < 2:
        raise ValueError(f"at least two jobs are stacked; got {jobs}")
    started = time.perf_counter()
    strangers = [given.name for given in capture.inputs if given.kind == "stranger"]
    if strangers:
        raise CaptureError("jobs that compute with tensors from outside of their models are not fused")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap tells where it loops
            return _Stacking(capture, jobs).run(started)
    except CaptureError:
        raise
    except (RuntimeError, NotPlain, TypeError, ValueError, IndexError) as error:
        text = str(error).strip().splitlines()
        raise CaptureError(
            f"jobs cannot share operations: {type(error).__name__}: {text[0] if text else ''}"
        ) from error


class _Stacking:
    def __init__(self, capture: Capture, jobs: int) -> None:
        self.capture, self.jobs = capture, jobs
        self.recorder = Recorder()
        self.values: dict[fx.Node, _Value] = {}
        self.inputs: list[GraphInput] = []
        self.written = {
            storage_id(tensor)
            for node in capture.graph.nodes
            if node.op == "call_function"
            for source in written_by(node)
            for tensor in tensors_in(source.meta["val"])
        }
        self.buffers: list[fx.Node] = []
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, and copies in their place
        self.rates: dict[Any, torch.Tensor] = {}  # dropout rates of all jobs
        self.update_groups: dict[str, int] = {}
        self.dropout_rates: dict[tuple[str, str], tuple[str, str]] = {}

    def run(self, started: float) -> Capture:
        graph = self.capture.graph
        made = self.recorder.graph
        with TracingMode(allow_non_fake_inputs=True):
            self._lay_out()
            with self.recorder.recording():
                self._copy_buffers()
                for node in graph.nodes:
                    if node.op == "call_function":
                        before = next(reversed(made.nodes), None)
                        self.values[node] = self._step(node)
                        self._tag(node, before)
                self._take_over()
                (results,) = (node.args[0] for node in graph.nodes if node.op == "output")
                outputs = [self._of_job(result, job) for job in range(self.jobs) for result in results]
            self.recorder.add_outputs(outputs)
        for node in made.nodes:
            node.meta.setdefault("phase", "forward")
        clean_up(made)
        return replace(
            self.capture, graph=made, inputs=tuple(self.inputs), update_groups=self.update_groups,
            dropout_rates=self.dropout_rates, seconds=time.perf_counter() - started,
        )  # fmt: skip

    # -- inputs

    def _lay_out(self) -> None:
        placeholders = [node for node in self.capture.graph.nodes if node.op == "placeholder"]
        for node, given in zip(placeholders, self.capture.inputs):
            if any(lazy_bits(node.meta["val"])):
                raise CaptureError(f"{given.kind} {given.name!r} is a conjugate or negative view")
            computed = any(user.meta["phase"] != "update" for user in node.users)
            if given.kind in STACKED_INPUTS and (computed or given.kind != "buffer"):
                self.values[node] = _Value(self._input(node, given, stacked=True), stacked=True)
                if given.kind == "buffer":
                    self.buffers.append(node)
            elif computed:
                raise CaptureError(f"the forward pass reads {given.kind} {given.name!r}, which is not stacked")
            else:
                each = [self._input(node, replace(given, job=job)) for job in range(self.jobs)]
                self.values[node] = _Value(each, apart=True)
        for node in self.capture.graph.nodes:
            rate = self.rate_of(node)
            if rate is not None and rate not in self.rates and node.target is aten.div_.Scalar:
                self.rates[rate] = torch.empty(self.jobs, dtype=node.meta["val"].dtype)
                self.recorder.add_input(len(self.inputs), self.rates[rate])
                self.inputs.append(GraphInput("rates", name=rate[0], key=rate[1]))
        if any(node.op == "get_attr" for node in self.capture.graph.nodes):
            raise CaptureError("the step has constant tensors")

    def rate_of(self, node: fx.Node) -> tuple[str, str] | None:
        """The dropout rate that an operation divides by, or draws with: its module, and which share it is."""
        return next((rate for (name, _), rate in self.capture.dropout_rates.items() if name == node.name), None)

    def _input(self, node: fx.Node, given: GraphInput, stacked: bool = False) -> torch.Tensor:
        value = node.meta["val"]
        sizes, strides = list(value.shape), list(value.stride())
        if stacked:
            extent = value.untyped_storage().nbytes() // value.element_size()
            if extent != value.numel():
                raise CaptureError(f"{given.kind} {given.name!r} shares memory with other tensors")
            sizes, strides = [self.jobs, *sizes], [value.numel(), *strides]
        fake = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        self.recorder.add_input(len(self.inputs), fake)
        self.inputs.append(given)
        return fake

    def _copy_buffers(self) -> None:
        """In the place of those that the forward or backward pass changes."""
        changed = {
            source
            for node in self.capture.graph.nodes
            if node.op == "call_function" and node.meta["phase"] != "update"
            for source in (*written_by(node), *running_statistics(node))
        }
        for node, given in zip(self.capture.graph.nodes, self.capture.inputs):  # placeholders come first
            if given.kind in ("parameter", "batch") and any(_shares(one, node) for one in changed):
                what = f"{given.kind} {given.name!r}" if given.name else "its batch"
                raise CaptureError(
                    f"the forward pass changes {what}, which is a copy, or another job's, where jobs are one"
                )
        for node in self.buffers:
            if any(_shares(one, node) for one in changed):
                buffer = self.values[node].made
                copy = aten.clone.default(buffer)
                self.values[node] = _Value(copy, stacked=True)
                self.taken.append((buffer, copy))

    def _take_over(self) -> None:
        for buffer, copy in self.taken:
            for job in range(self.jobs):
                before = next(reversed(self.recorder.graph.nodes))
                aten.copy_.default(aten.select.int(buffer, 0, job), aten.select.int(copy, 0, job))
                for new in _behind(before):
                    new.meta |= {"job": job, "phase": "update"}

    # -- operations

    def _step(self, node: fx.Node) -> _Value:
        if node.target is operator.getitem:
            value, position = self.values[node.args[0]], node.args[1]  # type: ignore[index]
            if value.apart:
                return _Value([made[position] for made in value.made], apart=True)
            return replace(value, made=value.made[position])
        sources = [self.values[source] for source in node.all_input_nodes]
        changed = written_by(node)
        if node.meta["phase"] == "update" or any(self.values[c].apart for c in changed):
            return self._each(node)
        if touches_state(node.target):
            if any(not touches_state(user.target) for user in node.users):
                raise CaptureError(
                    "the step computes with the state of a generator, which would be missing with its job"
                )
            return self._each(node)
        if _draws(node):
            if not changed:
                raise CaptureError(f"{node.target} draws numbers for all jobs at once")
            return self._each(node)
        if not any(value.stacked or value.apart for value in sources):
            if changed:
                raise CaptureError(f"{node.target} changes what all jobs share")
            return _Value(self._call(node, lambda value: value.made))
        rule = RULES.get(node.target) or (pointwise if is_pointwise(node) else None)
        if rule is not None:
            made = rule(self, node)
            if made is not NotImplemented:
                return _Value(made, stacked=True)
        if not _has_batching_rule(node.target):
            return self._each(node)
        return _Value(self._vmap(node), stacked=True)

    def _call(self, node: fx.Node, show: Callable[[_Value], Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: show(self.values[source]))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _each(self, node: fx.Node) -> _Value:
        """One call for each job, on its slices."""
        if any(not (self.values[c].stacked or self.values[c].apart) for c in written_by(node)):
            raise CaptureError(f"{node.target} changes what all jobs share")
        computes = node.meta["phase"] != "update"
        if computes and written_by(node) and not _returns_what_it_changes(node.target):
            raise CaptureError(
                f"{node.target} changes one tensor and returns another, which would be missing with its job"
            )
        made = []
        for job in range(self.jobs):
            before = next(reversed(self.recorder.graph.nodes))
            made.append(self._call(node, functools.partial(self._slice, job=job)))
            for new in _behind(before):
                if node.meta["phase"] == "update" or written_by(node) or touches_state(node.target):
                    new.meta["job"] = job
                if new.target is node.target:
                    self._name(node, new)
        for source in written_by(node):
            if self.values[source].stacked and isinstance(node.meta.get("val"), torch.Tensor):
                return self.values[source]  # it has been written into, slice by slice
        if computes and any(storage_id(t) in self.written for t in tensors_in(node.meta.get("val"))):
            # What is written into must be one memory for all, as views of it would look at copies.
            if is_view(node.target):
                raise CaptureError(f"{node.target} is written through, and looks at one job at a time")
            if isinstance(node.meta["val"], torch.Tensor):
                return _Value(aten.stack.default(made), stacked=True)
            return _Value(
                tuple(aten.stack.default(list(m)) if m[0] is not None else None for m in zip(*made)), stacked=True
            )
        return _Value(made, apart=True)

    def _name(self, node: fx.Node, new: fx.Node) -> None:
        """What is known of a node by its name is known of those that stand for it."""
        if node.name in self.capture.update_groups:
            self.update_groups[new.name] = self.capture.update_groups[node.name]
        for (name, argument), rate in self.capture.dropout_rates.items():
            if name == node.name:
                self.dropout_rates[new.name, argument] = rate

    def _vmap(self, node: fx.Node) -> Any:
        leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
        sources = [self._whole(self.values[leaf]) if isinstance(leaf, fx.Node) else None for leaf in leaves]
        mapped = [value.made for value in sources if value is not None and value.stacked]

        missing: list[int] = []  # results that were not asked for

        def call(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            filled = [
                leaf if value is None else next(given) if value.stacked else value.made
                for leaf, value in zip(leaves, sources)
            ]
            args, kwargs = pytree.tree_unflatten(filled, structure)
            made = node.target(*args, **kwargs)  # type: ignore[operator]
            if isinstance(made, torch.Tensor):
                return made
            missing.extend(place for place, result in enumerate(made) if result is None)
            return tuple(result for result in made if result is not None)

        made = torch.vmap(call)(*mapped)
        if isinstance(made, torch.Tensor):
            return made
        results = list(made)
        for place in missing:
            results.insert(place, None)
        return tuple(results)

    def _whole(self, value: _Value) -> _Value:
        """With all jobs in one tensor, unless one stands for all."""
        if not value.apart:
            return value
        return _Value(aten.stack.default(value.made), stacked=True)

    def _slice(self, value: _Value, job: int) -> Any:
        if value.apart:
            return value.made[job]
        if not value.stacked:
            return value.made
        return pytree.tree_map(lambda tensor: aten.select.int(tensor, 0, job), value.made)

    def _of_job(self, result: Any, job: int) -> Any:
        return self._slice(self.values[result], job) if isinstance(result, fx.Node) else result

    def _tag(self, node: fx.Node, before: fx.Node | None) -> None:
        for new in _behind(before) if before is not None else self.recorder.graph.nodes:
            new.meta["phase"] = node.meta["phase"]
            if "line" in node.meta:
                new.meta["line"] = node.meta["line"]

    # -- what rules are made of

    def stacked_args(self, node: fx.Node, rank: int | None = None) -> list[Any]:
        """Arguments with all jobs in them; tensors of lower rank than ``rank`` (of one job's) get ones behind the first."""

        def show(source: fx.Node) -> Any:
            value = self._whole(self.values[source])
            tensor = value.made
            if value.stacked and rank is not None and isinstance(tensor, torch.Tensor) and tensor.dim() - 1 < rank:
                ones = [1] * (rank - tensor.dim() + 1)
                tensor = aten.view.default(tensor, [tensor.shape[0], *ones, *tensor.shape[1:]])
            return tensor

        return list(fx.node.map_arg(node.args, show))

    def all_stacked(self, *sources: Any) -> bool:
        """Whether each is a node that has all jobs in it, or becomes so."""
        return all(
            isinstance(source, fx.Node) and (self.values[source].stacked or self.values[source].apart)
            for source in sources
        )


def _shares(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes look at one memory."""
    return storage_id(one.meta["val"]) == storage_id(other.meta["val"])


def _behind(node: fx.Node) -> list[fx.Node]:
    """The nodes that were recorded after this one."""
    found = []
    node = node.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers: attention that drops nothing does not, whatever its schema says."""
    if not is_random(node.target):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    given = {a.name: value for a, value in zip(schema.arguments, node.args)} | dict(node.kwargs)
    return "dropout_p" not in defaults or bool(given.get("dropout_p", defaults["dropout_p"]))


def _returns_what_it_changes(target: Any) -> bool:
    returns = target._schema.returns
    return all(r.alias_info is not None and r.alias_info.is_write for r in returns)


def _has_batching_rule(target: Any) -> bool:
    name = target.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        has(name, "FuncTorchBatched")
        or has(name, "CompositeImplicitAutograd")
        or has(name, "FuncTorchBatchedDecomposition")
    )
