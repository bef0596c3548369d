"""The exceptions that users can catch."""

from __future__ import annotations


class WaterflowError(Exception):
    """Base of all errors that waterflow raises on purpose."""


def told(error: BaseException | None) -> str:
    """What an error says, with its notes: such as which job and which line of the user's it comes from."""
    return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])


class InvalidJobError(WaterflowError, ValueError):
    """A job, or a set of jobs, that cannot be trained as it was handed in."""


class CaptureError(WaterflowError):
    """A step that cannot be captured as one graph; it then runs eagerly, as an opaque job."""

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason = reason
        self.where = where
        super().__init__(f"{reason} ({where})" if where else reason)


class MemoryLimitError(WaterflowError, MemoryError):
    """A job that does not fit into the memory limit, whatever else runs.

    Attributes are bytes; ``largest_batch`` is the largest first dimension of the batch that fits, or None where
    it is not known.
    """

    def __init__(self, message: str, *, needed: int, limit: int, largest_batch: int | None = None) -> None:
        self.needed = needed
        self.limit = limit
        self.largest_batch = largest_batch
        super().__init__(message)


class StepError(WaterflowError, RuntimeError):
    """An operation failed in the middle of a captured step; the message names it and the user's line."""


class StepIndexError(StepError, IndexError):
    """The same, where eager training raises an IndexError."""


class StepValueError(StepError, ValueError):
    """The same, where torch.distributions finds an argument that is not valid."""


class AuditError(WaterflowError, RuntimeError):
    """A captured step has differed from the eager one, which is a fault of waterflow, and steps before it were not compared."""


class NonFiniteLossError(WaterflowError, ArithmeticError):
    """The loss became NaN or infinite."""


class JobCancelled(WaterflowError):
    """The job was stopped at a group boundary: pruned, interrupted, or removed."""


class JobTimeoutError(WaterflowError, TimeoutError):
    """A job, or a trial, that ran longer than its time limit; the message says which, and where it stood."""


class StudyError(WaterflowError, ValueError):
    """A study, or its settings, that cannot be run as asked."""


class ClusterError(WaterflowError, RuntimeError):
    """A cluster that cannot be reached, or that cannot do what it was asked for; the message says why."""


class CheckpointError(WaterflowError):
    """A checkpoint that cannot be made, read, or gone on from: damaged, of another version, or of another job."""


class SubmissionError(WaterflowError, ValueError):
    """A submission that the cluster can never run."""


class WorkloadError(WaterflowError, ValueError):
    """A workload, or a table that its simulation needs, that cannot be read, or cannot be simulated as asked."""
