"""A step on its way: what ``Step.submit`` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from waterflow import _C
from waterflow.executor.engine import Engine
from waterflow.executor.program.bound_step import Begun, BoundStep


@dataclass(eq=False)
class StepFuture:
    """A step that was handed to the engine. ``result()`` waits for it."""

    engine: Engine | None  # None: its caller runs it
    finish: Callable[[StepFuture], Any]  # its step's: waits for it, and makes its result
    run: _C.StepRun
    bound_step: BoundStep | None
    profiled: bool
    micro: int  # its place among the steps of an update
    first: Begun  # first updates that it makes
    returned: list[Any] = field(default_factory=list)  # by a step that ran eagerly
    gathered: frozenset[str] | None = None  # the parameters with gradients from calls before it; None: it runs eagerly

    def wait(self) -> None:
        """Until the step has ended, well or not."""
        if self.engine is not None:
            self.engine.native.wait(self.run)

    def result(self) -> Any:
        """The loss, or ``(loss, metrics)`` where the step function returned both. Raises what the step raised."""
        return self.finish(self)


@dataclass(frozen=True)
class Done:
    """A step that its caller has run at once."""

    returned: Any

    def wait(self) -> None:
        """It has ended well."""

    def result(self) -> Any:
        """The same as of a ``StepFuture``."""
        return self.returned
