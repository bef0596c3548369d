"""First updates: the optimizer's state that a captured step needs before its first update has made it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import torch
from torch.optim import Optimizer

from waterflow.errors import CaptureError
from waterflow.executor.program.capture_cache import CapturedStep
from waterflow.partition.capture.optimizers import FIRST_STEP_FLAG

Members = tuple[tuple[torch.Tensor, ...], ...]  # by group: the parameters whose state a step's update reads
Begun = dict[torch.Tensor, dict[str, torch.Tensor]]  # entries of the optimizer's state by parameter
_KEY = "momentum_buffer"


class HalfBegun(CaptureError):
    """An update has parameters with momentum and parameters without, which one fused call cannot update."""


def members_of(captured: CapturedStep, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> Members:
    """Return by group the parameters, from ``tensors`` by name, whose state the update of a captured step reads."""
    nodes = (node for node in captured.capture.graph.nodes if node.op == "placeholder")
    moved = {
        id(tensors[given.name]) for node, given in zip(nodes, captured.capture.inputs) if given.kind == "state" and node.users
    }
    return tuple(tuple(p for p in group["params"] if id(p) in moved) for group in optimizer.param_groups)


class FirstUpdates:
    """Optimizer state that was allocated for a captured step, and counts as missing until its first update was submitted."""

    # A captured step needs the state as an input, where an eager one creates it in its update. SGD's first update sets the
    # momentum to the gradient itself, so each group has a flag that says that it is the first.

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._laid_out: Begun = {}  # allocated entries that no update has reached
        self._told: dict[Hashable, tuple[Members, dict[str, bool]]] = {}

    def flags(self, members: Members) -> dict[str, bool]:
        """Return the groups' flags, a dict that is kept up to date. Raises HalfBegun for a group that no flag is right for."""
        if (group := self.half_begun(members)) is not None:
            raise HalfBegun(f"some parameters of group {group} are updated for the first time, beside others that have momentum")
        key = tuple(tuple(map(id, group)) for group in members)
        self._told[key] = members, (flags := self._told[key][1] if key in self._told else {})
        self.look_again()
        return flags

    def half_begun(self, members: Members) -> int | None:
        """Return the number of a group in which some parameters have momentum and others have not, or None."""
        if not isinstance(self._optimizer, torch.optim.SGD):
            return None
        return next((n for n, group in enumerate(members) if len(set(map(self._has_begun, group))) > 1), None)

    @contextlib.contextmanager
    def laying_out(self, members: Members) -> Iterator[None]:
        """Record the state entries of ``members`` that are created inside the context."""
        state = self._optimizer.state
        before = {p: {k for k, v in state.get(p, {}).items() if v is not None} for group in members for p in group}
        yield
        for parameter, there in before.items():
            if new := {key: value for key, value in state[parameter].items() if key not in there}:
                self._laid_out.setdefault(parameter, {}).update(new)

    def begin(self, members: Members) -> Begun:
        """Note that an update of ``members`` was submitted; return the state that is updated for the first time by it."""
        begun = {p: self._laid_out.pop(p) for group in members for p in group if p in self._laid_out}
        if begun:
            self.look_again()
        return begun

    def undo(self, begun: Begun, ended: bool) -> None:
        """Undo ``begin``, as that update failed. If it has ``ended``, state that it did not reach is removed again."""
        self._laid_out.update(begun)
        if ended:
            self.take_back(begun)
        if begun:
            self.look_again()

    def take_back(self, begun: Begun | None = None) -> None:
        """Remove allocated state, of ``begun`` or of all parameters, that no update has reached."""
        for parameter, laid in [*(self._laid_out if begun is None else begun).items()]:
            entries = self._optimizer.state.get(parameter, {})
            # A value that is not zero was reached by the update, or set by the user: it stays.
            same = all(entries.get(key) is value for key, value in laid.items())
            if same and not any(value.count_nonzero() for value in laid.values()):
                self._laid_out.pop(parameter, None)
                for key in laid:
                    del entries[key]
                if not entries:
                    del self._optimizer.state[parameter]

    def look_again(self) -> None:
        """Compute all flags anew, as after an update by the optimizer's own ``step()``."""
        for members, flags in self._told.values():
            for number, group in enumerate(members):
                flags[f"{FIRST_STEP_FLAG}:{number}"] = bool(group) and not any(map(self._has_begun, group))

    def _has_begun(self, parameter: torch.Tensor) -> bool:
        if not isinstance(self._optimizer, torch.optim.SGD):
            return True
        buffer = self._optimizer.state.get(parameter, {}).get(_KEY)
        return buffer is not None and buffer is not self._laid_out.get(parameter, {}).get(_KEY)
