"""Traces one training step over fake tensors into one flat graph: forward pass, backward pass and update."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.capture import fake_rules, rng_ops
from waterflow.partition.capture.formulas import in_eager_form
from waterflow.partition.capture.leaks import taken_back
from waterflow.partition.capture.optimizers import check_optimizer, fake_optimizer, state_keys, update_groups
from waterflow.partition.capture.reasons import reason_of, user_place
from waterflow.partition.capture.recorder import Asking, Recorder, constants_of
from waterflow.partition.capture.spec import GraphInput, StepSpec, split_result
from waterflow.partition.capture.substitution import (
    Carried,
    Substitution,
    as_in_eager,
    check_hooks,
    in_forward,
    no_reports,
    noting_lines,
    substituted,
    undisturbed,
)
from waterflow.partition.guards.batch_reads import Question, StandIn, Unread, question_of
from waterflow.partition.guards.beside_leaves import NOTHING, Beside, rebuilt
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.purity import ClosedWorld
from waterflow.partition.guards.reads import NamedValue
from waterflow.partition.guards.step_key import check_plain, check_unchanged, lie_apart, structure_key
from waterflow.partition.passes.cleanup import clean_up
from waterflow.partition.passes.gradient_memory import sum_in_place, update_early
from waterflow.partition.passes.operators import storage_id, tensors_in, with_lazy_bits


def gradients_of(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], graph: fx.Graph, replaced: list[Any]
) -> tuple[Sequence[torch.Tensor | None], list[torch.Tensor]]:
    """Return the gradients of ``leaves``, and the other leaves that an eager backward pass would leave gradients in.

    Records the backward pass in ``graph``; see ``in_eager_form`` for ``replaced``.

    Works as ``torch.autograd.grad`` with ``allow_unused``, which would switch function modes off for the backward pass.
    A gradient is None where the loss does not depend on the leaf. Raises CaptureError where the step itself puts
    gradients into its parameters (``backward()`` inside the step): the captured step would lose them.
    """
    one = torch.ones_like(loss, memory_format=torch.preserve_format)
    nodes = _nodes_before(loss.grad_fn)
    # The backward pass of checkpoint(use_reentrant=True) reaches parameters although no edge of the graph leads to
    # them. It refuses to run where single gradients are asked for, so asking for the other leaves, too, makes the
    # capture fail, and the step opaque.
    own = set(map(id, leaves))
    others = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in own]
    wanted = (*leaves, *(others if any(isinstance(node, BackwardCFunction) for node in nodes) else ()))
    with in_eager_form(nodes, graph, replaced):
        found = _engine_run_backward((loss,), (one,), False, False, wanted, True, accumulate_grad=False)
    if any(leaf.grad is not None for leaf in leaves):
        raise CaptureError("the step calls backward() inside, whose gradients add to its own; use torch.autograd.grad")
    return found[: len(leaves)], others


def _nodes_before(last: Any) -> list[Any]:
    waiting, seen, nodes = [last], {last}, []
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        nodes.append(node)
        fresh = {after for after, _ in node.next_functions} - seen
        seen |= fresh
        waiting += fresh
    return nodes


def check_history(inputs: Iterable[tuple[fx.Node, torch.Tensor]]) -> None:
    """Raise CaptureError where the graph computes with an input that already has a gradient history before the step."""
    for node, real in inputs:
        overwritten = (user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        if real.grad_fn is not None and not all(overwritten):
            raise CaptureError("the step computes with a tensor that carries gradients from before the step")


def no_gradient(parameter: torch.Tensor) -> float | complex:
    """Return the value of a gradient sum before the first addition: -0.0, as -0.0 + x has the bits of x for every x."""
    return complex(-0.0, -0.0) if parameter.is_complex() else -0.0


def to_be_changed(
    gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients in a form that may be changed in place: each has its parameter's strides, and memory of its own.

    Copies every gradient that does not, as autograd does when it puts gradients into ``.grad``. ``others`` are the
    step's inputs and results, whose memory a gradient must not share. Strides matter to bits: a sum over a gradient (a
    norm) adds up in memory order.
    """
    taken = set(map(storage_id, others))
    changed = {}
    for name, gradient in gradients.items():
        like = parameters[name]
        if not (like.is_contiguous() and gradient.is_contiguous()):
            like = torch.empty_like(like, memory_format=torch.preserve_format)
        if storage_id(gradient) in taken or not _lies_as(gradient, like):
            gradient = gradient.new_empty_strided(like.shape, like.stride()).copy_(gradient)
        taken.add(storage_id(gradient))
        changed[name] = gradient
    return changed


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape) if size > 1)


one_at_a_time = threading.RLock()  # tracing patches torch's globals

Traced = tuple[fx.Graph, dict[str, torch.Tensor]]  # with the constants that it gets by name


@dataclass(frozen=True)
class Capture:
    """A captured step: a flat graph with one placeholder for each of ``inputs``, in this order.

    Every node carries ``meta["phase"]``: ``forward``, ``backward`` or ``update``.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[GraphInput, ...]
    metrics: tuple[str, ...] | None  # None: the step returns the loss alone
    update_groups: dict[str, int]
    early_updates: int  # places before the step's end where parameters change
    apart: bool  # no two of the step's tensors lie on the same bytes
    seconds: float
    gradients: tuple[str, ...] = ()  # the parameters that the backward pass reaches
    reached: tuple[GraphInput, ...] = ()  # what else it reaches: it would leave gradients there
    entries: tuple[NamedValue, ...] = ()  # of modules and libraries, which its code read
    questions: tuple[Question, ...] = ()  # what it asked of the batch's values
    more_sums: int = 0  # ``StepSpec.more_sums``
    number: int = field(default_factory=itertools.count().__next__)  # no other capture of the process has it

    def holds(self) -> bool:
        """Return whether every module entry and setting that the trace read still has the value that it read."""
        return all(entry.holds() for entry in self.entries)

    @property
    def nodes(self) -> int:
        """The number of operations in the graph."""
        return sum(node.op == "call_function" for node in self.graph.nodes)


def capture_step(
    spec: StepSpec,
    leaves: Sequence[Any],
    batch_spec: pytree.TreeSpec | None,
    fingerprint: Fingerprint | None = None,
    unread: Collection[int] = (),
    beside: Beside = NOTHING,
) -> Capture:
    """Trace one step over ``leaves``, the flattened batch, clean up the graph, and return the capture.

    ``fingerprint`` is the one that the step's key was made from, if the caller has it. ``unread`` are the positions of
    leaves (numbers, text) that the capture must not depend on: LeafRead is raised where the step reads one of them.
    ``beside`` is what the batch holds beside its leaves.

    Raises CaptureError where the step cannot become one graph: control flow that depends on data, an optimizer that is
    not known, a model that changes itself from step to step. A process captures one step at a time; other threads wait.
    """
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "anomaly detection (torch.autograd.set_detect_anomaly) watches each operation of an eager step; turn it off"
        )
    check_optimizer(spec.optimizer)
    check_plain(("a tensor of the batch", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    if fingerprint is None:
        _, fingerprint = structure_key(spec)
    check_hooks(fingerprint.modules())
    with one_at_a_time, _C.ThreadGenerators([]):  # not this thread's generators: any job may run the graph
        start = time.perf_counter()
        given = spec, leaves, batch_spec, fingerprint, beside
        try:
            tracer, graph, constants = _trace(_StepTracer.record, _StepTracer(*given), unread)
        except CaptureError:
            raise
        except Exception:
            # The recorder gave up, or the step raised in it. make_fx is three times slower, and its error is the one to
            # tell the user.
            tracer, graph, constants = _trace(_StepTracer.make_fx, _StepTracer(*given), unread)
        tracer.tag_phases(graph)
        tracer.check_strangers(graph, constants)
        groups = update_groups(graph, tracer.inputs, tracer.group_names)
        clean_up(graph)
        sum_in_place(graph)
        # Early updates and answers about a batch are sound only where no input shows another input's changes.
        apart = lie_apart(spec, fingerprint)
        if tracer.questions and not apart:
            raise CaptureError("the step asks for values of its batch, and tensors of its own share bytes")
        early = update_early(graph, groups) if spec.early_updates and apart else 0
        return Capture(
            graph=graph,
            constants=constants,
            inputs=tuple(tracer.inputs),
            metrics=tracer.metric_names,
            update_groups=groups,
            gradients=tracer.gradients,
            reached=tracer.reached,
            entries=tracer.world.entries,
            questions=tuple(tracer.questions),
            more_sums=0 if spec.update else spec.more_sums,
            early_updates=early,
            apart=apart,
            seconds=time.perf_counter() - start,
        )


def _trace(
    way: Callable[[_StepTracer], Traced], tracer: _StepTracer, places: Collection[int]
) -> tuple[_StepTracer, fx.Graph, dict[str, torch.Tensor]]:
    """Run the step once. ``way`` is ``record``, or ``make_fx``, whose errors become CaptureErrors."""
    tracer.world.unread = unread = Unread(tracer.fingerprint, places)
    # torch notes what its nodes are for in one table of the process; selective checkpointing leaves its notes there.
    notes = fx_traceback.preserve_node_meta(fx_traceback.has_preserved_node_meta())
    with taken_back(tracer.mode) as kept, notes:
        try:
            graph, constants = tracer.trace(way)
            unread.check()  # also where the user's code went on without it
        except BaseException as error:
            # The error's traceback refers to the tracer, and would keep every fake tensor of the trace alive.
            vars(tracer).clear()  # of its tensors
            unread.check(error)
            raise
        del tracer._graph, tracer.batch, tracer.batch_leaves
        tracer.world.reads.forget()
        kept += (*tracer.fakes, *constants.values())
        kept += (value for node in graph.nodes for value in tensors_in(node.meta.get("val")))
    return tracer, graph, constants


def _form_of(fake: torch.Tensor) -> tuple[int, Any, Any]:
    return fake._version, fake.shape, (fake.stride(), fake.storage_offset())


class _StepTracer:
    """Lays out fake inputs, runs the step over them once, and remembers what each input was."""

    def __init__(
        self, spec: StepSpec, leaves: Sequence[Any], batch_spec: pytree.TreeSpec | None, fingerprint: Fingerprint, beside: Beside
    ) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.leaves = list(leaves)
        self.batch_spec = batch_spec
        self.beside = beside
        self.inputs: list[GraphInput] = []
        self.fakes: list[torch.Tensor] = []
        self._forms: list[tuple[int, Any, Any]] = []  # of the fakes: the version, sizes and strides that they were made with
        self.fakes_by_id: dict[int, torch.Tensor] = {}  # what stands for a real tensor
        self.metric_names: tuple[str, ...] | None = None
        self._carried = Carried()
        self.mode = fake_rules.TracingMode(allow_non_fake_inputs=True)
        self._trained = spec.trained()
        self.gradients, self.reached = tuple[str, ...](), tuple[GraphInput, ...]()
        self.world = ClosedWorld(fingerprint, leaves, batch_spec)
        self._marks: list[int] = []
        self.questions: list[Question] = []
        self._graph: Callable[[], fx.Graph]
        # Made outside of the mode, where touching something real would be a detour of 0.2 ms each time.
        self._single = torch.empty((), dtype=torch.float32, device=spec.device)

    # -- inputs

    def _add(self, given: GraphInput, like: torch.Tensor) -> torch.Tensor:
        looked_at = given.kind in ("parameter", "buffer", "external", "batch")  # by the user's code
        wants = looked_at and like.requires_grad
        fake: torch.Tensor = self.mode.like(like).requires_grad_(wants)
        if looked_at:
            fake = with_lazy_bits(fake, like)
            self._carried.give(fake, like)
        self.inputs.append(given)
        self.fakes.append(fake)
        self._forms.append(_form_of(fake))
        return fake

    def _note_changes(self) -> None:
        # The fakes were changed as an eager step changes the real tensors, through whatever operator or view.
        for number, (fake, (version, *form)) in enumerate(zip(self.fakes, self._forms)):
            now, *left = _form_of(fake)
            self.inputs[number] = replace(self.inputs[number], raised=now - version, resized=left != form)

    def _lay_out(self) -> None:
        spec = self.spec
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in spec.model.named_parameters():
            self.tensors[name] = self._add(GraphInput("parameter", name), parameter)
        for name, buffer in spec.model.named_buffers():
            self.tensors[name] = self._add(GraphInput("buffer", name), buffer)
        for name, tensor in (*spec.model.named_parameters(), *spec.model.named_buffers()):
            self.fakes_by_id[id(tensor)] = self.tensors[name]
        for number, tensor in enumerate(self.fingerprint.external_tensors):
            self.fakes_by_id[id(tensor)] = self._add(GraphInput("external", leaf=number), tensor)
        updated = spec.updated()
        names = {id(p): name for name, p in updated.items()}
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.group_names: list[list[str]] = []
        for group in spec.optimizer.param_groups:
            members = [names[id(p)] for p in group["params"] if id(p) in names]
            self.group_names.append(members)
            if not spec.update:
                continue
            for name in members:
                parameter = updated[name]
                entries = {}
                for key in state_keys(spec.optimizer, group):
                    like = self._single if key == "step" else parameter
                    entries[key] = self._add(GraphInput("state", name, key), like)
                self.state[name] = entries
        self.accumulators: dict[str, torch.Tensor] = {}
        if spec.has_sums:
            for name, parameter in updated.items():
                self.accumulators[name] = self._add(GraphInput("accumulator", name), parameter)
        self.rates: list[torch.Tensor | float] = []
        if spec.update:
            for number, group in enumerate(spec.optimizer.param_groups):
                rate = group["lr"]
                if isinstance(rate, torch.Tensor):
                    rate = self._add(GraphInput("rate", key="lr", group=number), rate)
                self.rates.append(rate)
        shown: dict[int, torch.Tensor] = {}  # a tensor that is there twice is one for the step, too
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in shown:
                shown[id(leaf)] = self._add(GraphInput("batch", leaf=position), leaf)
        self.batch_leaves = batch = [shown.get(id(leaf), leaf) for leaf in self.world.unread.shown(self.leaves)]
        self.mode.made += (weakref.ref(leaf) for leaf in batch if issubclass(type(leaf), StandIn))
        self.batch = tuple(batch) if self.batch_spec is None else rebuilt(batch, self.batch_spec, self.beside)

    # -- the step

    def _step(self, *_: torch.Tensor) -> list[torch.Tensor]:
        spec = self.spec
        trained = {id(p) for p in self._trained.values()}
        self.world.reads.give(self.batch, self.fakes_by_id, self.fakes)
        # Autocast ends with the forward pass, as in an eager loop: backward operations take the types of the forward
        # ones.
        with substituted(spec.model, self.fakes_by_id, trained), torch.enable_grad(), in_forward(spec) as cast:
            shown = Substitution(self.fakes_by_id)
            with cast, shown, noting_lines(self._graph(), spec.model), self.world.watching():
                self.world.unread.call(spec.compute_loss, [self.batch], self.world.is_observed)
                result = spec.compute_loss(spec.model, self.batch)
            # The batch's containers are not inputs of the graph: a captured step would not change them.
            check_unchanged(self.batch, self.batch_spec, self.batch_leaves, self.beside)
            loss, metrics = split_result(result)
            self._keep_assigned_buffers()
            self._mark()
            leaves = [] if spec.update and spec.shards > 1 else [self.tensors[name] for name in self._trained]
            scaled = loss / spec.accumulate if spec.accumulate > 1 else loss
            with shown, self.world.watching():  # backward passes of users' functions, hooks, and what is computed again
                given = self._graph(), self.mode.replaced
                gradients, others = gradients_of(scaled, leaves, *given) if leaves else ((), [])
            shown.check()
            self._carried.check()
        if self.mode.refused is not None:  # also where the user's code went on without it
            raise self.mode.refused
        self._mark()
        self.reached = tuple(self._reached_by(others))
        by_name = {name: g for name, g in zip(self._trained, gradients) if g is not None}
        self.gradients = tuple(by_name)
        results = [loss.detach(), *(value.detach() for value in (metrics or {}).values())]
        with torch.no_grad():
            norm = self._update(by_name, results)
        self._note_changes()
        self.metric_names = None if metrics is None else tuple(metrics)
        if norm is not None and self.metric_names is not None and "grad_norm" not in self.metric_names:
            self.metric_names, results = (*self.metric_names, "grad_norm"), [*results, norm]
        return results

    def _reached_by(self, others: Sequence[torch.Tensor]) -> Iterator[GraphInput]:
        # Leaves that the step made itself are no inputs; their gradients end with the step.
        given = {id(fake): given for fake, given in zip(self.fakes, self.inputs)}
        yield from (given[id(leaf)] for leaf in others if id(leaf) in given)

    def _keep_assigned_buffers(self) -> None:
        # A buffer that forward assigned anew (self.mean = ...) is copied into the old one's memory, in which the next
        # step will look for it.
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, buffer in self.spec.model.named_buffers():
            given = self.tensors.get(name)
            if given is None:
                raise CaptureError(f"a step adds the buffer {name}")
            if (buffer := self.fakes_by_id.get(id(buffer), buffer)) is given:  # real ones: of a frozen module
                continue
            if buffer.shape != given.shape or buffer.dtype != given.dtype:
                raise CaptureError(f"a step changes the shape or type of the buffer {name}")
            moved.append((given, buffer))
        with torch.no_grad():
            if len(moved) > 1:  # they may have changed places
                moved = [(given, buffer.clone()) for given, buffer in moved]
            for given, buffer in moved:
                given.copy_(buffer)

    def _mark(self) -> None:
        self._marks.append(len(self._graph().nodes))

    def _update(self, gradients: dict[str, torch.Tensor], results: Sequence[torch.Tensor]) -> torch.Tensor | None:
        spec, norm = self.spec, None
        if spec.has_sums:
            for name, gradient in gradients.items():
                self.accumulators[name].add_(gradient)
            gradients = {name: self.accumulators[name] for name in {*gradients, *spec.gathered} & {*self.accumulators}}
        if not spec.update:
            return None
        # As a loop over the optimizer's parameters has them: a norm of all is a sum in this order.
        gradients = {name: gradients[name] for names in self.group_names for name in names if name in gradients}
        parameters = {name: self.tensors[name] for name in gradients}
        if not spec.has_sums and (spec.clip_norm is not None or spec.clip_value is not None):
            gradients = to_be_changed(gradients, parameters, (*self.fakes, *results))
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        if spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(list(parameters.values()), spec.clip_norm)
        if spec.clip_value is not None:
            nn.utils.clip_grad_value_(list(parameters.values()), spec.clip_value)
        members = ([self.tensors[name] for name in names] for names in self.group_names)
        state = {self.tensors[name]: dict(state) for name, state in self.state.items()}
        # Not the instance's step: schedulers wrap that one.
        type(spec.optimizer).step(fake_optimizer(spec.optimizer, members, self.rates, state))
        if spec.has_sums:
            for gradient in gradients.values():
                gradient.fill_(no_gradient(gradient))
        for parameter in parameters.values():
            parameter.grad = None
        return norm

    # -- tracing

    def trace(self, way: Callable[[_StepTracer], Traced]) -> Traced:
        """Run the step once by ``way``, with the model, random states and autograd set up for a trace, and undone after it."""
        # Backward passes for a GPU else run on threads of their own, where user code is not observed.
        disturbed = undisturbed(self.fingerprint, self.fakes_by_id, self.world.writes)
        with disturbed as self.world.reads.installed.before, torch.autograd.set_multithreading_enabled(False):
            try:
                with rng_ops.shown(), as_in_eager(self.mode.refuse), self.mode, no_reports():
                    self._lay_out()
                    return way(self)
            except CaptureError:
                raise
            except Exception as error:
                if way is _StepTracer.record:
                    raise
                raise CaptureError(reason_of(error), ", ".join(user_place(error.__traceback__, self.spec.model))) from error

    def record(self) -> Traced:
        """Trace with the Recorder, which suffices for most steps. Raises NotPlain, or what the step raises."""
        recorder = Recorder(self._truth)
        self._graph = lambda: recorder.graph
        for number, fake in enumerate(self.fakes):
            recorder.add_input(number, fake)
        with recorder.recording():
            outputs = self._step()
        recorder.add_outputs(outputs)
        return recorder.graph, {}

    def _truth(self, graph: fx.Graph, target: Any, args: Sequence[Any]) -> bool | None:
        question = question_of(graph, target, args, self.inputs, self.leaves)
        self.questions += [question] if question is not None and question.leaves else ()
        return None if question is None else question.answer

    def make_fx(self) -> Traced:
        """Trace with ``make_fx``, for steps that the Recorder does not know."""
        self._graph = lambda: get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        # The module's Python source is not written out and compiled.
        with _use_lazy_graph_module(True), Asking(self._truth):
            module = make_fx(self._step, pre_dispatch=False)(*self.fakes)
        return module.graph, constants_of(module)

    def check_strangers(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        """Check the tensors that the step reached beside the model, its optimizer and its batch.

        Raises CaptureError where one has a gradient history, or where a tensor of the model became a constant.
        """
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        numbers = [(node, given.leaf) for node, given in zip(placeholders, self.inputs) if given.kind == "external"]
        check_history((node, self.fingerprint.external_tensors[number]) for node, number in numbers)
        for name, tensor in constants.items():
            if id(tensor) in self.fakes_by_id:
                raise CaptureError(f"the step reaches a tensor of the model in a way that is not seen ({name})")

    def tag_phases(self, graph: fx.Graph) -> None:
        """Set ``meta["phase"]`` of every node: forward, backward or update."""
        for position, node in enumerate(graph.nodes):
            node.meta["phase"] = ("forward", "backward", "update")[sum(position >= mark for mark in self._marks)]
