"""Job and JobResult: what a user passes in and gets back."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from waterflow.errors import InvalidJobError, explained_class, told
from waterflow.run_stats import RunStats
from waterflow.units import Priority, check_priority

if TYPE_CHECKING:
    import pandas

    from waterflow.executor.data.shared import SharedData
    from waterflow.partition.passes.rematerialize import Recomputed


Status = Literal["completed", "failed", "pruned", "cancelled", "paused", "unfinished"]
Metrics = dict[str, float]


@explained_class(
    "Job", "Job(name, model=make_model, data=loader, loss=F.cross_entropy, optimizer=make_optimizer)", InvalidJobError
)
@dataclass
class Job:
    """One model to train.

    Args:
        name: Shown in results, messages and pictures.
        model: A function that makes the module (it is called once, with the job's own random numbers), or a module. Parts that
            are in evaluation mode (``model[1].eval()``) stay in it; see ``train_mode``.
        data: Batches: a DataLoader, any iterable that can be read once an epoch, or a function that makes one. A
            function that makes an iterator is called for each epoch.
            A DataLoader that several jobs share is shuffled for each with the job's own random numbers; an iterable
            that keeps a generator of its own is better made by a function. One ``SharedData`` of several jobs is read once.
        optimizer: A function of the parameters that makes a ``torch.optim`` optimizer.
        loss: ``loss(output, target)`` for batches ``(input, ..., target)``, or a function of (model, batch).
        step: ``step(model, batch)`` that returns the loss or ``(loss, dict_of_metrics)``; instead of ``loss``.
        scheduler: A function of the optimizer that makes a learning-rate scheduler.
        scheduler_interval: The scheduler steps after each ``epoch`` (default) or after each ``step``.
        evaluate: A function of the model that returns a number or a dict of numbers. It is called after each epoch
            with the model in evaluation mode and without gradients. The first number is the job's ``value``. Afterwards every
            module has its training flag of before; a module that ``evaluate`` added has the flag of its parent. On a GPU an
            operation that gets tensors of the CPU beside the model's is given copies on the GPU.
        read_ahead: True if a batch may be read while earlier steps still run: it depends on no model, and the next batch is not
            written to its memory. ``None`` reads ahead only data of which that is known: lists, tensors, torch's own data
            sets in a DataLoader, and a DataLoader with workers. No batch is read beside a step that runs eagerly, or writes to its data.
        epochs: The number of passes over the data.
        seed: Seed of initialization, shuffling and dropout, on the CPU and on a GPU. Default: drawn from torch's generator.
        accumulate, clip_grad_norm, clip_grad_value, autocast, recompute: As in ``Step``.
        allow_non_finite: Train on after a NaN or infinite loss; else the job fails at the end of that epoch.
        priority: ``"opportunistic"`` runs on lanes and memory that guaranteed jobs leave, at a rate that does not slow their steps. It is
            suspended while they need its memory, and then goes on.
        quota: Memory, in bytes, as text like ``"4GiB"`` or as a share of the engine's limit. It is kept for a guaranteed job,
            used or not; it is the most that an opportunistic job may hold. If its step needs more, the step recomputes
            activations, then offloads them to host memory, with the same bits. If that is not enough, or the step is not
            captured, a job whose quota was lowered is suspended to host memory until there is enough; a new job is refused.
        train_mode: ``"auto"`` keeps the flags of a model that is in training mode, and calls ``train()``, with a warning, on a
            model that is in evaluation mode as a whole, as ``from_pretrained`` returns it. ``"as_is"`` keeps all flags.
        timeout: Seconds of wall time that a run of the job may take. Waits for lanes and memory count; time while it is
            suspended, or waits for first evaluations of other jobs (one at a time), does not. A job that takes longer fails with
            a JobTimeoutError, at its next group boundary or by an exception in its own code; other jobs are not affected.
            Code that blocks outside the interpreter, or catches all errors, is waited for; a warning names its line.
        shards: The number of parts into which each batch is cut by rows. Each part has a gradient of its own, random numbers that follow
            from the seed, and buffers (running statistics) of its own, of which the first part's are in ``state_dict``; the mean of
            the gradients, weighed by rows, is the update's. The bits follow from this number, not from the devices that compute the
            parts. Losses that are no mean over rows are computed within each part, as under ``DistributedDataParallel``.
        loss_weight: A function of a part of the batch that returns how much its loss counts, in place of its rows; the number of
            tokens, say, for a loss that is a mean over tokens.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    data: Iterable[Any] | Callable[[], Iterable[Any]] | SharedData
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[..., Any] | nn.Module | None = None
    step: Callable[[nn.Module, Any], Any] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    evaluate: Callable[[nn.Module], Any] | None = None
    epochs: int = 1
    seed: int | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    autocast: torch.dtype | None = None
    recompute: int | float | str | None = None
    allow_non_finite: bool = False
    read_ahead: bool | None = None
    priority: Priority = "guaranteed"
    quota: int | float | str | None = None
    train_mode: Literal["auto", "as_is"] = "auto"
    timeout: float | None = None
    shards: int = 1
    loss_weight: Callable[[Any], Any] | None = None

    def check(self) -> None:
        """Raise InvalidJobError if a setting is invalid."""
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise InvalidJobError(f"job {self.name!r}: epochs must be a positive integer; got {self.epochs!r}")
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise InvalidJobError(
                f"job {self.name!r}: model must be a module or a function that makes one; got {_shown(self.model)}"
            )
        for name in _CALLED_WITH:
            if (rule := why_not_called(name, getattr(self, name))) is not None:
                raise InvalidJobError(f"job {self.name!r}: {rule}")
        # functools.partial(torch.optim.LBFGS) has the class in func: refuse it before the model is made.
        if (rule := why_no_step(getattr(self.optimizer, "func", self.optimizer))) is not None:
            raise InvalidJobError(f"job {self.name!r}: {rule}")
        if not callable(self.data) and not hasattr(self.data, "__iter__") and not hasattr(self.data, "reader"):
            advice = "; read it through a DataLoader" if isinstance(self.data, Dataset) else ""
            raise InvalidJobError(
                f"job {self.name!r}: data must be iterable or a function that makes an iterable; got {_shown(self.data)}{advice}"
            )
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise InvalidJobError(f"job {self.name!r}: seed must be an integer or None; got {self.seed!r}")
        if self.scheduler_interval not in ("epoch", "step"):
            raise InvalidJobError(
                f"job {self.name!r}: scheduler_interval must be 'epoch' or 'step'; got {self.scheduler_interval!r}"
            )
        if (rule := why_no_limit(self.timeout)) is not None:
            raise InvalidJobError(f"job {self.name!r}: timeout {rule}")
        if self.train_mode not in ("auto", "as_is"):
            raise InvalidJobError(f"job {self.name!r}: train_mode must be 'auto' or 'as_is'; got {self.train_mode!r}")
        check_priority(f"job {self.name!r}", self.priority)
        if not isinstance(self.shards, int) or self.shards < 1:
            raise InvalidJobError(f"job {self.name!r}: shards must be a positive integer; got {self.shards!r}")
        if self.shards > 1 and hasattr(self.data, "reader"):
            raise InvalidJobError(
                f"job {self.name!r}: batches of SharedData come whole, and shards={self.shards} cuts them; give the job data of its own"
            )
        if self.loss_weight is not None and self.shards == 1:
            raise InvalidJobError(f"job {self.name!r}: loss_weight weighs the parts of a batch; it needs shards of 2 or more")
        if self.read_ahead not in (None, True, False):
            raise InvalidJobError(f"job {self.name!r}: read_ahead must be True, False or None; got {self.read_ahead!r}")
        if self.loss is not None and self.step is not None:
            raise InvalidJobError(f"job {self.name!r}: give loss= or step=, not both")


_CALLED_WITH = {  # the functions of a job, with an example of each
    "loss": ("output, target", "F.cross_entropy(output, target)"),
    "step": ("model, batch", "F.cross_entropy(model(batch[0]), batch[1])"),
    "optimizer": ("params", "torch.optim.AdamW(params, lr=1e-3)"),
    "scheduler": ("optimizer", "torch.optim.lr_scheduler.StepLR(optimizer, 10)"),
    "evaluate": ("model", "accuracy(model)"),
    "loss_weight": ("part", "len(part[0])"),
}


def why_not_called(name: str, function: Any) -> str | None:
    """Return why ``function`` cannot be the argument ``name`` of a Job or a Step, with an example; None if it can."""
    if function is None and name != "optimizer":
        return None
    if name == "loss" and isinstance(function, type):
        return f"loss is the class {function.__name__}; pass an object of it: {function.__name__}()"
    arguments, example = _CALLED_WITH[name]
    write = f"{name}=lambda {arguments}: {example}"
    if not callable(function):
        hint = "; pass the function itself, not what it returns" if isinstance(function, torch.Tensor) else ""
        return f"{name} must be a function of ({arguments}), such as {write}; got {_shown(function)}{hint}"
    try:
        # Some built-in callables have no signature, and that of what a decorator wraps may be another than its own.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        called, code = getattr(function, "__name__", type(function).__name__), getattr(function, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{name} is called with ({arguments}), and {called}{place} takes {signature}. Write for example {write}"
    return None


def _shown(value: Any) -> str:
    return f"{type(value).__name__}" if not isinstance(value, (str, int, float)) else repr(value)


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    ``metrics`` has one dict per epoch, ``losses`` one number per step. ``seconds`` is wall time from building the model to the
    end. Peaks are bytes: ``predicted_peak`` from the graph, ``measured_peak`` from a profiled step; both count persistent
    state, one batch and the step, and are None if the job did not get that far. ``planned_requests`` for memory were served at
    their planned offsets, ``missed_requests`` went to torch's own allocator. ``recomputed`` is what the last step recomputed in
    its backward pass; ``offloaded`` the most bytes that a step held in host memory between forward and backward pass.
    ``eager_steps`` ran eagerly since the job was last resumed on its device, for want of steps to pay for a capture, or as
    ``opaque_reason`` says, if all steps do from some step on. ``state_dict`` is the model's, also after a failure or an early
    stop. Like every state_dict of torch it shares memory with the model: copy it before training the model again; that of a
    model on a GPU is a copy in host memory. In a study ``optimize(keep_weights=)`` decides which results keep it.
    """

    name: str
    status: Status
    metrics: tuple[Metrics, ...] = ()
    losses: tuple[float, ...] = field(default=(), repr=False)
    steps: int = 0
    seconds: float = 0.0
    predicted_peak: int | None = None
    measured_peak: int | None = None
    planned_requests: int = 0
    missed_requests: int = 0
    eager_steps: int = 0
    recomputed: Recomputed | None = None
    offloaded: int = 0
    opaque_reason: str | None = None
    error: BaseException | None = field(default=None, compare=False)
    traceback: str | None = field(default=None, compare=False, repr=False)
    state_dict: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        peak = (self.measured_peak or self.predicted_peak or 0) / 2**20
        told = [self.status, f"{self.steps:,} steps in {self.seconds:.1f} s", *([f"{peak:,.1f} MiB"] if peak else [])]
        told += [] if self.value is None else [f"value {self.value:.4g}"]
        return f"{self.name}: {', '.join(told)}{f': {_line(self.error)}' if self.error else ''}"

    @property
    def value(self) -> float | None:
        """The first metric of the last epoch, or the last loss if the job has no ``evaluate``."""
        if self.metrics and self.metrics[-1]:
            return next(iter(self.metrics[-1].values()))
        return self.losses[-1] if self.losses else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without losses and weights."""
        return {
            "name": self.name,
            "status": self.status,
            "value": self.value,
            "metrics": dict(self.metrics[-1]) if self.metrics else {},
            "loss": self.losses[-1] if self.losses else None,
            "steps": self.steps,
            "eager_steps": self.eager_steps,
            "seconds": self.seconds,
            "predicted_peak_bytes": self.predicted_peak,
            "measured_peak_bytes": self.measured_peak,
            "planned_requests": self.planned_requests,
            "missed_requests": self.missed_requests,
            "recomputed": None if self.recomputed is None else asdict(self.recomputed),
            "offloaded_bytes": self.offloaded,
            "opaque_reason": self.opaque_reason,
            "error": None if self.error is None else _line(self.error),
        }


class Results(list[JobResult]):
    """The results of several jobs, in the order in which the jobs were given. Printing them summarizes the run.

    ``decisions`` says in words what the engine tried with ``mode="auto"`` and what it kept. ``stats`` is set by ``train``.
    """

    def __init__(self, results: Iterable[JobResult] = (), decisions: Sequence[str] = (), stats: RunStats | None = None) -> None:
        super().__init__(results)
        self.decisions, self.stats = tuple(decisions), stats

    def __repr__(self) -> str:
        ended = Counter(result.status for result in self)
        return f"{len(self)} jobs: {', '.join(f'{count} {status}' for status, count in ended.items())}"

    def __str__(self) -> str:
        # Failures first, as only the first six results are shown.
        first = sorted(self, key=lambda result: result.status != "failed")[:6]
        told = [f"  {result}" for result in first] + ["  ..."] * (len(self) > 6)
        return "\n".join([repr(self), *told, *(self.stats.lines_for("jobs") if self.stats else ())])

    @property
    def failed(self) -> Results:
        """The results of the jobs that failed."""
        return Results(result for result in self if result.status == "failed")

    def __getitem__(self, key: Any) -> Any:
        """Return a result by position or by the job's name. Raises KeyError for an unknown name."""
        if isinstance(key, str):
            for result in self:
                if result.name == key:
                    return result
            raise KeyError(f"no job is called {key!r}; there are {', '.join(repr(r.name) for r in self)}")
        return super().__getitem__(key)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a frame with one row per job. Raises ImportError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame([result.to_dict() for result in self])


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(told(error).split())}"


def why_no_limit(seconds: Any) -> str | None:
    """Return the rule that a time limit in seconds breaks, or None if it is valid."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None or (number and math.isfinite(seconds) and seconds > 0):
        return None
    return f"must be a positive number of seconds, or None for no limit; got {seconds!r}"


def why_no_step(kind: Any) -> str | None:
    """Return why a step cannot train with optimizers of class ``kind``: they compute the loss several times per update.

    Returns None for other classes, and for functions.
    """
    step = getattr(kind, "step", None)
    # torch's other optimizers take a closure, too, but do without: for LBFGS alone it has no default.
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is None or closure.default is not inspect.Parameter.empty:
        return None
    return (
        f"{kind.__name__} calls a closure several times in each update, and a step computes its loss once. Take another "
        "optimizer, such as torch.optim.AdamW, or call optimizer.step(closure) in a loop of your own"
    )


def as_metrics(name: str, value: Any) -> Metrics:
    """Return the numbers that ``evaluate`` of job ``name`` returned. Raises InvalidJobError for anything but numbers."""
    if isinstance(value, dict) and value:
        return {str(key): _number(name, entry) for key, entry in value.items()}
    return {"value": _number(name, value)}


def _returned(value: Any) -> str:
    if isinstance(value, dict):
        return "an empty dict"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidJobError(
            f"evaluate of job {name!r} must return a number or a dict of numbers; got {_returned(value)}"
        ) from None
