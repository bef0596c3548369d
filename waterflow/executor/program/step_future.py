"""Step futures: the results of ``Step.submit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.executor.engine import Engine
from waterflow.executor.program.bound_step import BoundStep
from waterflow.executor.program.first_updates import Begun


def taken(result: Any) -> Any:
    """Return a step's result, whose memory is given to no other step before the calling thread's stream has read it."""
    # The step has ended, so that nothing need wait for it; but its memory is known to be of its lane's stream alone.
    if torch.cuda._initialized:
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.is_cuda and one.layout == torch.strided:
                one.record_stream(torch.cuda.current_stream(one.device))
    return result


@dataclass(eq=False)
class StepFuture:
    """A step that was submitted to the engine. ``result()`` waits for it."""

    engine: Engine | None  # None: the caller runs the step
    finish: Callable[[StepFuture], Any]  # waits for the step, and makes its result
    run: _C.StepRun
    bound_step: BoundStep | None
    profiled: bool
    micro: int  # its number among the steps of an update
    first: Begun  # the state that it updates for the first time
    returned: list[Any] = field(default_factory=list)  # the result of a step that ran eagerly
    gathered: frozenset[str] | None = None  # parameters with gradient sums before it; None: it runs eagerly

    def wait(self) -> None:
        """Wait until the step has ended or failed; raise nothing of the step."""
        if self.engine is not None:
            self.engine.native.wait(self.run)

    def result(self) -> Any:
        """Wait; return the loss, or ``(loss, metrics)`` if the step function returned both. Raises what the step raised."""
        return taken(self.finish(self))


@dataclass(frozen=True)
class Done:
    """The future of a step that its caller has already run."""

    returned: Any

    def wait(self) -> None:
        """Return at once, as the step has ended."""

    def result(self) -> Any:
        """Return the loss, or ``(loss, metrics)``."""
        return taken(self.returned)
