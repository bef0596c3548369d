"""What a step asks of its batch's values to go one way or another: asked again of each batch, before the step.

A model that drops a mask where nothing is masked asks ``mask.all()``. Its answer is a constant of the trace, and the question
a small graph of the batch's tensors. A step on a batch with another answer is another capture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from waterflow.errors import CaptureError
from waterflow.partition.argument_checks import is_checked
from waterflow.partition.operators import is_random, running_statistics, storage_id, tensors_in, written_by
from waterflow.partition.spec import GraphInput

aten = torch.ops.aten


@dataclass(frozen=True)
class Question:
    """A truth about a batch, the last node of ``graph``, which takes ``leaves`` of the batch; and what it was in the trace."""

    graph: fx.Graph
    leaves: tuple[int, ...]
    answer: bool

    def of(self, batch: Sequence[Any]) -> bool:
        """The answer for the leaves of a batch."""
        return _answer(self.graph, [batch[leaf] for leaf in self.leaves])


def _answer(graph: fx.Graph, given: Iterable[torch.Tensor]) -> bool:
    values: dict[fx.Node, Any] = {}
    tensors = iter(given)
    said: Any = None
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        for node in graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = said = next(tensors) if node.op == "placeholder" else node.target(*args, **kwargs)  # type: ignore[operator]
    return bool(said)


# What a batch answers to steps, in order: the number of a question that has another answer than in the capture under the answers
# before it; or the values of leaves that the step reads, with their places.
Answers = tuple[int | tuple[tuple[int, ...], tuple[Hashable, ...]], ...]
MOST_WAYS = 8


def answers_of(questions: Sequence[Question], known: Answers, batch: Sequence[Any]) -> Answers:
    """``known`` itself where the capture that was found under it has the answers of this batch; else what to look under next."""
    number = next((number for number, one in enumerate(questions) if one.of(batch) is not one.answer), None)
    if number is None:
        return known
    if sum(type(one) is int for one in known) >= MOST_WAYS:
        raise CaptureError(f"the step goes over {MOST_WAYS} ways by values of its batch; try torch.where")
    return *known, number


def question_of(
    graph: fx.Graph, target: Any, args: Sequence[Any], inputs: Sequence[GraphInput], batch: Sequence[Any]
) -> Question | None:
    """The question that an operation of a trace is, whose graph so far is given; None where it is none of the batch alone.

    What is computed for it are truths and whole numbers, which are the same on any number of threads.
    """
    if target is not aten.equal.default and is_checked(graph, args[0]):
        return Question(fx.Graph(), (), True)
    if target is not aten.equal.default and args[0].meta["val"].dtype != torch.bool:
        return None
    needed = {*args}
    for node in reversed(graph.nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    places = dict(zip(graph.nodes, inputs))  # placeholders come first
    if not all(places[node].kind == "batch" if node in places else _follows(node) for node in needed):
        return None
    read = {storage_id(tensor) for node in needed for tensor in tensors_in(node.meta["val"])}
    changed = (value for node in graph.nodes for value in (*written_by(node), *running_statistics(node)))
    if any(storage_id(tensor) in read for value in changed for tensor in tensors_in(value.meta["val"])):
        return None
    small = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = small.node_copy(node, copies.__getitem__)
    small.call_function(target, tuple(map(copies.__getitem__, args)))
    leaves = tuple(places[node].leaf for node in copies if node in places)
    return Question(small, leaves, _answer(small, [batch[leaf] for leaf in leaves]))


def _follows(node: fx.Node) -> bool:
    """Whether an operation's result follows from its arguments, whoever computes it."""
    users = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
    inexact = any(t.is_floating_point() or t.is_complex() for t in tensors_in(node.meta["val"]))
    return node.op == "call_function" and not (users or inexact or is_random(node.target))
