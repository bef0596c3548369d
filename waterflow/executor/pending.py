"""A step on its way: what ``Step.submit`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from waterflow import _C
from waterflow.executor.first_updates import Begun
from waterflow.executor.variant import Variant

if TYPE_CHECKING:
    from waterflow.step import Step


@dataclass(eq=False)
class Pending:
    """A step that was handed to the engine. ``result()`` waits for it."""

    step: Step
    run: _C.StepRun
    variant: Variant | None
    profiled: bool
    micro: int  # its place among the steps of an update
    first: Begun  # first updates that it makes
    returned: list[Any] = field(default_factory=list)  # by a step that ran eagerly
    gathered: frozenset[str] | None = None  # the parameters with gradients from calls before it; None: it runs eagerly

    def wait(self) -> None:
        """Until the step has ended, well or not."""
        if self.step.engine is not None:
            self.step.engine.native.wait(self.run)

    def result(self) -> Any:
        """The loss, or ``(loss, metrics)`` where the step function returned both. Raises what the step raised."""
        return self.step._finish(self)


@dataclass(frozen=True)
class Done:
    """A step that its caller has run at once."""

    returned: Any

    def wait(self) -> None:
        """It has ended well."""

    def result(self) -> Any:
        """The same as of a ``Pending``."""
        return self.returned
