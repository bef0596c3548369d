"""Bindings: fill the slots of a captured step with one job's tensors, and guard the objects that must not be replaced."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.executor.program.capture_cache import CapturedStep
from waterflow.partition.capture.optimizers import BY_ZERO, FIRST_STEP_FLAG, GROUP_NUMBERS, READ_EACH_STEP, hooks_of
from waterflow.partition.capture.spec import GraphInput, StepSpec
from waterflow.partition.capture.trace import no_gradient
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.reads import Held, Setting, Table


@dataclass(frozen=True)
class Owner:
    """The job whose tensors and numbers fill a step's inputs.

    ``accumulators`` are gradient sums by parameter name, created if missing; ``first_step`` contains the flags that the
    update reads; ``fingerprint`` is what the key of the job's step was made from; ``resized`` are the ids of tensors to which a
    step of the job may give another size.
    """

    spec: StepSpec
    accumulators: dict[str, torch.Tensor]
    first_step: dict[str, bool]
    fingerprint: Fingerprint
    resized: Set[int] = frozenset()
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        named = [*self.spec.model.named_parameters(), *self.spec.model.named_buffers()]
        object.__setattr__(self, "tensors", dict(named))

    def tensor(self, given: GraphInput) -> torch.Tensor:
        """Return the tensor of an input that is a parameter, a buffer or from outside of the model."""
        return self.fingerprint.external_tensors[given.leaf] if given.kind == "external" else self.tensors[given.name]

    def fill(self, binding: _C.Binding, slot: int, given: GraphInput) -> None:
        """Fill ``slot`` with the tensor or number of an input. Missing optimizer state is created, as the optimizer does.

        Raises CaptureError if a parameter's strides have changed since its gradient sum was created.
        """
        spec, groups = self.spec, self.spec.optimizer.param_groups
        if given.kind in ("parameter", "buffer", "external"):
            tensor = self.tensor(given)
            # Its size is passed on by a weak reference, with which torch.utils.swap_tensors refuses a tensor.
            binding.set_input(slot, tensor, may_resize=id(tensor) in self.resized)
        elif given.kind == "state":
            binding.set_input(slot, _state_entry(spec.optimizer, self.tensors[given.name], given.key))
        elif given.kind == "accumulator":
            if given.name not in self.accumulators:
                parameter = self.tensors[given.name].detach()
                self.accumulators[given.name] = torch.full_like(parameter, no_gradient(parameter))
            if self.accumulators[given.name].stride() != self.tensors[given.name].stride():
                raise CaptureError(f"parameter {given.name!r} was laid out anew between gradients that add up")
            binding.set_input(slot, self.accumulators[given.name])
        elif given.kind == "rate":
            binding.read(slot, groups[given.group], "lr", -1, _C.Binding.Kind.rate)
        elif given.kind == "number":
            key, index = GROUP_NUMBERS[given.key]
            binding.read(slot, groups[given.group], key, index, _C.Binding.Kind.number)
        else:
            key = f"{FIRST_STEP_FLAG}:{given.group}"
            self.first_step.setdefault(key, False)
            binding.read(slot, self.first_step, key, -1, _C.Binding.Kind.flag)

    def watch(self, binding: _C.Binding) -> None:
        """Register with ``binding`` every object that it was made from, so that it notices when one is replaced."""
        for tensor in (*self.tensors.values(), *self.fingerprint.external_tensors):
            if tensor.layout == torch.strided:
                binding.watch_form(tensor)
        for group in self.spec.optimizer.param_groups:
            for parameter in group["params"]:
                binding.own_gradient(parameter)
        for look in self.fingerprint.guarded_places:
            look.guard(binding.guards)
        for parameter in self.fingerprint.parameters.values():
            binding.guards.hooks(parameter)
        _guard_optimizer(binding.guards, self.spec.optimizer)


def bind(captured: CapturedStep, owner: Owner) -> tuple[_C.Binding, list[int], list[int]]:
    """Fill a program's persistent inputs from one job's model and optimizer.

    Returns the binding, the slots of the batch's tensors, and the leaf of the batch that fills each. Raises CaptureError as
    ``Owner.fill``.
    """
    lowered = captured.lowered
    binding = _C.Binding(lowered.program)
    slots: list[int] = []
    leaves: list[int] = []
    placeholders = [node for node in captured.capture.graph.nodes if node.op == "placeholder"]
    for slot, given in enumerate(lowered.inputs):
        if given.kind == "batch":
            slots.append(slot)
            leaves.append(given.leaf)
        elif slot >= len(placeholders) or placeholders[slot].users:  # an unused input is never read, and stays empty
            owner.fill(binding, slot, given)
    for slot, constant in lowered.constants:
        binding.set_input(slot, constant)
    owner.watch(binding)
    _guard_entries(binding.guards, captured)
    binding.finish_inputs()
    return binding, slots, leaves


def _state_entry(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
    state = optimizer.state[parameter]
    value = state.get(key)
    if value is None:
        if key == "step":
            value = torch.zeros((), dtype=torch.float32, device=parameter.device)
        else:
            value = torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)
        state[key] = value
    elif key == "step" and not isinstance(value, torch.Tensor):
        value = state[key] = torch.tensor(float(value), dtype=torch.float32, device=parameter.device)
    return value


def _guard_entries(guards: _C.Guards, captured: CapturedStep) -> None:
    # The places in modules and in libraries' classes that the step's code read.
    for entry in captured.capture.entries:
        if isinstance(entry, Setting):
            guards.setting(entry.container)
        elif isinstance(entry, Held):
            entry.container.guard(guards)
        elif isinstance(entry, Table):
            guards.dict(entry.container)
        elif isinstance(entry.container, type):
            guards.cls(entry.container)
        else:
            guards.entry(entry.container, entry.name)


def _guard_optimizer(guards: _C.Guards, optimizer: torch.optim.Optimizer) -> None:
    # Guarded are the groups, their parameters in their order, their settings, and all entries of the state. Numbers that the
    # program reads at each step are not; of others only the truth is, where the code asks no more.
    for name in ("state", "param_groups", "step"):
        guards.entry(optimizer.__dict__, name)
    for hooks in hooks_of(optimizer):
        guards.dict(hooks)
    guards.items(optimizer.param_groups, list)
    for group in optimizer.param_groups:
        guards.entry(group, "params")
        guards.items(group["params"], list)
        for name in optimizer.defaults:
            if name in BY_ZERO:
                guards.truth(group, name)
            elif name not in READ_EACH_STEP:
                guards.entry(group, name)
    guards.dict(optimizer.state)
    for entries in optimizer.state.values():
        guards.dict(entries)
