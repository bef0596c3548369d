"""First updates of parameters: the optimizer's state is laid out before them, and SGD's momentum begins as the gradient itself."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import torch
from torch.optim import Optimizer

from waterflow.errors import CaptureError
from waterflow.executor.captured import CapturedStep
from waterflow.partition.optimizers import FIRST_STEP_FLAG

Members = tuple[tuple[torch.Tensor, ...], ...]  # of each group the parameters whose state a step's update reads
Begun = dict[torch.Tensor, dict[str, torch.Tensor]]  # entries of the state by parameter
_KEY = "momentum_buffer"


class HalfBegun(CaptureError):
    """One update has parameters that were updated before and others that were not, whose rule is another one."""


def members_of(captured: CapturedStep, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> Members:
    """The parameters, of ``tensors`` by name, whose state an update of a captured step reads."""
    nodes = (node for node in captured.capture.graph.nodes if node.op == "placeholder")
    moved = {
        id(tensors[given.name])
        for node, given in zip(nodes, captured.capture.inputs)
        if given.kind == "state" and node.users
    }
    return tuple(tuple(p for p in group["params"] if id(p) in moved) for group in optimizer.param_groups)


class FirstUpdates:
    """A captured step lays state out before it begins; until its update was handed in it counts as missing."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._laid_out: Begun = {}  # that no update has reached
        self._told: dict[Hashable, tuple[Members, dict[str, bool]]] = {}

    def flags(self, members: Members) -> dict[str, bool]:
        """The flag that each group's update reads, kept up to date. Raises HalfBegun where fused updates have none that is right."""
        if (group := self.half_begun(members)) is not None:
            raise HalfBegun(
                f"some parameters of group {group} are updated for the first time, beside others that have momentum"
            )
        key = tuple(tuple(map(id, group)) for group in members)
        self._told[key] = members, (flags := self._told[key][1] if key in self._told else {})
        self.look_again()
        return flags

    def half_begun(self, members: Members) -> int | None:
        """A group of which some parameters have momentum, and others have not."""
        if not isinstance(self._optimizer, torch.optim.SGD):
            return None
        return next((n for n, group in enumerate(members) if len(set(map(self._has_begun, group))) > 1), None)

    @contextlib.contextmanager
    def laying_out(self, members: Members) -> Iterator[None]:
        """Within, entries of the state come to be for ``members``."""
        state = self._optimizer.state
        before = {p: {k for k, v in state.get(p, {}).items() if v is not None} for group in members for p in group}
        yield
        for parameter, there in before.items():
            if new := {key: value for key, value in state[parameter].items() if key not in there}:
                self._laid_out.setdefault(parameter, {}).update(new)

    def begin(self, members: Members) -> Begun:
        """An update of ``members`` was handed in: returns those that begin by it."""
        begun = {p: self._laid_out.pop(p) for group in members for p in group if p in self._laid_out}
        if begun:
            self.look_again()
        return begun

    def undo(self, begun: Begun, ended: bool) -> None:
        """That update failed. Where it has ``ended``, state that it has not reached is taken back, as if it had not been laid out."""
        self._laid_out.update(begun)
        if ended:
            self.take_back(begun)
        if begun:
            self.look_again()

    def take_back(self, begun: Begun | None = None) -> None:
        """What was laid out, for ``begun`` or for all, and no update has reached, is no longer there."""
        for parameter, laid in [*(self._laid_out if begun is None else begun).items()]:
            entries = self._optimizer.state.get(parameter, {})
            same = all(entries.get(key) is value for key, value in laid.items())
            if same and not any(value.count_nonzero() for value in laid.values()):
                self._laid_out.pop(parameter, None)
                for key in laid:
                    del entries[key]
                if not entries:
                    del self._optimizer.state[parameter]

    def look_again(self) -> None:
        """Bring the flags up to date, as behind an update of the optimizer's own."""
        for members, flags in self._told.values():
            for number, group in enumerate(members):
                flags[f"{FIRST_STEP_FLAG}:{number}"] = bool(group) and not any(map(self._has_begun, group))

    def _has_begun(self, parameter: torch.Tensor) -> bool:
        if not isinstance(self._optimizer, torch.optim.SGD):
            return True
        buffer = self._optimizer.state.get(parameter, {}).get(_KEY)
        return buffer is not None and buffer is not self._laid_out.get(parameter, {}).get(_KEY)
