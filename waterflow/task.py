"""Task: work that runs on a device in the place of a job, such as a trial of a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from waterflow.checkpoint import Checkpoint
from waterflow.executor.engine import Engine


class Task(ABC):
    """Something with a name that can be pickled, and makes its runner where it runs."""

    name: str

    def check(self) -> None:  # noqa: B027
        """Raise InvalidJobError where a setting cannot be right."""

    @abstractmethod
    def runner(self, engine: Engine, seed: int, resume: Checkpoint | None) -> Any:
        """What runs it, with the methods of a ``JobRunner``; what it cannot do (a snapshot), it raises an error for."""
