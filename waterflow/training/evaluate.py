"""evaluate(): one pass over data in evaluation mode, for metrics of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from waterflow.errors import InvalidJobError, explained
from waterflow.executor.data.copies import brought
from waterflow.executor.data.rows import DataLoader, at_once, of_tensors
from waterflow.executor.engine import current_engine
from waterflow.executor.program.ownership import made_here
from waterflow.executor.program.step_future import taken
from waterflow.executor.rng import own_numbers, thread_generator
from waterflow.partition.capture.substitution import surrounding_autocast
from waterflow.step import Step
from waterflow.training.build import evaluation_mode
from waterflow.training.evaluation import OnLane, evaluating

# A batch that is cut from a data set: so many bytes, and no more rows than keep a small model busy.
BATCH_BYTES, MOST_ROWS = 2 * 2**20, 4096
FEW_ROWS = 64  # where a row's size is not known

_lanes: weakref.WeakKeyDictionary[Step, weakref.WeakKeyDictionary[nn.Module, OnLane]] = weakref.WeakKeyDictionary()

Work = Callable[[], Any]
Run = Callable[[Work, int], Any]  # runs work on an input of so many bytes


@explained("evaluate", 'evaluate(model, test_set, metrics={"accuracy": accuracy})', InvalidJobError)
def evaluate(
    model: nn.Module,
    data: Dataset[Any] | Iterable[Any],
    *,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    reduce: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Evaluate ``model`` in one pass over ``data``, in evaluation mode and without gradients.

    Inside an engine, as in an objective of ``optimize``, the model runs on a lane, in memory that is admitted; in plain PyTorch and
    within ``Job(evaluate=)`` on the calling thread. Afterwards each module has the training flag of before.

    Args:
        model: Called with all of a batch but its last item: ``model(*batch[:-1])``.
        data: A data set with rows (input, ..., target), which is read in its order, in large batches if it is of tensors, else 64
            rows at a time; or batches of such rows: a DataLoader, or any iterable. Batches are brought to the model's device.
        metrics: Functions of (output, target), by name, that return the mean over the rows of a batch.
        reduce: In place of ``metrics``, a function of (outputs, targets) of all rows, such as an area under a curve.

    Returns:
        A dict with the mean of each metric over all rows, as floats; or what ``reduce`` returned, with tensors as floats.

    Raises:
        InvalidJobError: Wrong arguments or batches; a metric that is no number; data without a batch.
        MemoryLimitError: A batch does not fit into the engine's memory.
    """
    _check(model, metrics, reduce)
    device = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    found: list[tuple[Any, int]] = []
    with evaluation_mode(model), _on_lane(model) as run:
        for batch in _batches(data):
            rows = _rows_of(batch)
            found.append((run(_within(device, model, batch, metrics), _bytes_of(batch)), rows))
    if not found:
        raise InvalidJobError("the data of evaluate() has no batch: there is nothing to evaluate on")
    if reduce is not None:
        outputs, targets = (_joined([made[part] for made, _ in found]) for part in (0, 1))
        return _floats("reduce", reduce(outputs, targets))
    total = sum(rows for _, rows in found)
    return {name: sum(float(made[name]) * rows for made, rows in found) / total for name in found[0][0]}


def _check(model: Any, metrics: Any, reduce: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidJobError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if (metrics is None) == (reduce is None):
        raise InvalidJobError(
            "evaluate() takes metrics=, means over rows, or reduce=, a function of all outputs and targets; got "
            + ("neither" if reduce is None else "both: call it twice, or compute the means in reduce=")
        )
    if reduce is not None and not callable(reduce):
        raise InvalidJobError(f"reduce must be a function of (outputs, targets); got {type(reduce).__name__}")
    if metrics is not None and not (isinstance(metrics, Mapping) and metrics and all(map(callable, metrics.values()))):
        raise InvalidJobError(
            'metrics must be a dict of functions of (output, target), such as {"loss": F.cross_entropy}; got '
            + (type(metrics).__name__ if not isinstance(metrics, Mapping) else repr(dict(metrics)))
        )


def _batches(data: Any) -> Iterator[Any]:
    if not isinstance(data, (Dataset, Iterable)):
        raise InvalidJobError(f"data must be a data set, a DataLoader or an iterable of batches; got {type(data).__name__}")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        # A data set of the user's is not asked for a row more than the pass takes: it may draw.
        size = min(MOST_ROWS, max(1, BATCH_BYTES // max(1, _bytes_of(data[0])))) if of_tensors(data) and len(data) else FEW_ROWS
        # A loader's iterator draws a seed, on torch's default device.
        data = DataLoader(data, size, generator=torch.Generator(torch.get_default_device()))
    return at_once(iter(data))


def _bytes_of(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _rows_of(batch: Any) -> int:
    target = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(target, torch.Tensor) and target.dim():
        return len(target)
    got = type(batch).__name__ if target is None else f"a target of type {type(target).__name__}"
    raise InvalidJobError(
        f"evaluate() takes batches (input, ..., target) with a row for each target; got {got}. Pass TensorDataset(inputs, targets), or "
        "a DataLoader whose collate_fn makes such batches; data= that is one batch needs brackets: [batch]"
    )


def _within(device: torch.device, model: nn.Module, batch: Any, metrics: Any) -> Work:
    # What one batch needs, wherever it runs: a lane's thread has neither the caller's numbers nor its autocast.
    generators = [one for kind in {torch.device("cpu"), device} if (one := thread_generator(kind)) is not None]
    numbers = own_numbers(*generators) if generators else contextlib.nullcontext()
    surrounding = surrounding_autocast(device.type)

    def work() -> Any:
        with torch.no_grad(), numbers, torch.autocast(device.type, surrounding, enabled=surrounding is not None):
            *inputs, target = brought(batch, device)
            output = model(*inputs)
            if metrics is None:
                return output, target
            return {name: _number(f"metrics[{name!r}]", metric(output, target)) for name, metric in metrics.items()}

    return work


@contextlib.contextmanager
def _on_lane(model: nn.Module) -> Iterator[Run]:
    engine = current_engine()
    if engine is None or evaluating() or engine.inside:
        yield lambda work, size: work()
        return
    steps = [step for step in [*made_here.steps] if isinstance(step, Step) and step.engine is engine and step.job is not None]
    if not steps:
        job = engine.add_job("evaluate()")
        try:
            yield lambda work, size: taken(engine.run_eager(job, work, None)[0])
        finally:
            engine.remove_job(job)
        return
    step = max(steps, key=lambda step: step.model is model)
    lane = _lanes.setdefault(step, weakref.WeakKeyDictionary()).setdefault(model, OnLane(f"evaluate() beside step {step.name!r}"))

    def run(work: Work, size: int) -> Any:
        began = step.account.begin_call()
        try:
            with step.account.spending("evaluation"):
                return taken(lane.run(engine, step, work, size))
        finally:
            step.account.end_call(began)

    yield run


def _joined(parts: list[Any]) -> Any:
    columns = zip(*(pytree.tree_leaves(part) for part in parts))
    joined = [torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].dim() else [*column] for column in columns]
    return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))


def _floats(what: str, made: Any) -> Any:
    if isinstance(made, dict):
        return {str(name): float(_number(what, one)) for name, one in made.items()}
    return float(_number(what, made))


def _number(what: str, made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        if not made.dim():
            return made
        got = f"a tensor of shape {tuple(made.shape)}; take its mean()"
    else:
        try:
            return float(made)
        except (TypeError, ValueError):
            got = f"{type(made).__name__}: {made!r}"
    raise InvalidJobError(f"{what} of evaluate() must return a number; got {got}")
