"""Reads of a batch's values by a step: truths that it branches by, and leaves (numbers, text) that it uses.

Truths become ``Question`` objects, which are asked of each batch before its step. The argument checks of
``torch.distributions`` become operations of the graph, which fail as the eager check does. Leaves are replaced by
stand-ins, which report a read.
"""

from __future__ import annotations

import collections
import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from gc import get_referents
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributions, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from waterflow.errors import CaptureError
from waterflow.partition.capture.reasons import is_users_file
from waterflow.partition.capture.spec import GraphInput
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.code_refs import in_library
from waterflow.partition.guards.guarded_places import exact
from waterflow.partition.guards.observer import Kind
from waterflow.partition.guards.reads import ATOMS, Refused, classes_of, is_fixed
from waterflow.partition.passes.operators import is_random, running_statistics, storage_id, tensors_in, written_by

CHECK = torch.ops.aten._assert_async.msg
_FOLDER = os.path.dirname(distributions.__file__) + os.sep
_MAKING = distributions.Distribution.__init__.__code__
_SCORING = distributions.Distribution._validate_sample.__code__


def is_checked(graph: fx.Graph, truth: fx.Node) -> bool:
    """Return whether ``truth`` is an argument check of ``torch.distributions``; if so, add the check to ``graph``.

    The captured step then fails where the check does. Only on the CPU, where a failed operation ends nothing but its
    step (on a GPU it ends the process's context), and only if no code of the step would catch the error.
    """
    frames = _frames(sys._getframe(1))
    named = ((one, one.f_code.co_filename) for one in frames)
    frame = next((one for one, name in named if name.startswith(_FOLDER) or is_users_file(name)), None)
    on_cpu = truth.meta["val"].device.type == "cpu"
    if not on_cpu or frame is None or frame.f_code not in (_MAKING, _SCORING) or any(map(_may_catch, (frame, *frames))):
        return False
    found, making = frame.f_locals, frame.f_code is _MAKING
    of, what = type(found["self"]).__name__, f"(Tensor of shape {tuple(found['value'].shape)})"
    rule = type(found["constraint" if making else "support"]).__name__.lstrip("_")
    why = f"Expected value argument {what} to be within the support ({rule}) of the distribution {of}"
    if making:
        why = f"Expected parameter {found['param']} {what} of distribution {of} to satisfy the constraint {rule}"
    graph.call_function(CHECK, (truth, why))
    return True


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    # Outwards, to the trace's own frame.
    while frame is not None and frame.f_code.co_qualname != "_StepTracer._step":
        yield frame
        frame = frame.f_back


def _may_catch(frame: FrameType) -> bool:
    # A try or a with statement around the instruction is an entry of the table.
    entries = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)


aten = torch.ops.aten


@dataclass(frozen=True)
class Question:
    """A truth about a batch: the last node of ``graph``, from the ``leaves`` at these positions; ``answer`` in the trace."""

    graph: fx.Graph
    leaves: tuple[int, ...]
    answer: bool

    def of(self, batch: Sequence[Any]) -> bool:
        """Return the answer for the leaves of a batch."""
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
    """Return ``known`` itself if the capture found under it has the answers of this batch; else the next key to look under.

    Raises CaptureError if the step's ways by values of its batch exceed ``MOST_WAYS``.
    """
    number = next((number for number, one in enumerate(questions) if one.of(batch) is not one.answer), None)
    if number is None:
        return known
    if sum(type(one) is int for one in known) >= MOST_WAYS:
        raise CaptureError(f"the step takes over {MOST_WAYS} branches by values of its batch; try torch.where")
    return *known, number


def question_of(
    graph: fx.Graph, target: Any, args: Sequence[Any], inputs: Sequence[GraphInput], batch: Sequence[Any]
) -> Question | None:
    """Return the question that an operation of a trace asks, or None if it does not follow from the batch alone.

    ``graph`` is the trace so far. A question computes truths and whole numbers only: no bit depends on the number of
    threads.
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
    # Floating-point results may differ with the number of threads, and operators of users may do anything.
    users = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
    inexact = any(t.is_floating_point() or t.is_complex() for t in tensors_in(node.meta["val"]))
    return node.op == "call_function" and not (users or inexact or is_random(node.target))


_NODES = frozenset({tuple, list, dict, collections.OrderedDict, collections.defaultdict, collections.deque})
# These hand on what is in a container. Of other operations and calls, those look at all that their operands lead to; the rest look
# only at their first operand itself, a container most often, and take it that the others tell a place.
_HAND_ON = frozenset(map(id, (
    len, iter, next, zip, enumerate, list, tuple, dict, dict.get, dict.items, dict.keys, dict.values, dict.pop, getattr, hasattr,
)))  # fmt: skip
_LOOK = frozenset({
    Kind.SET_ATTRIBUTE, Kind.SET_GLOBAL, Kind.SET_NAME, Kind.SET_DEREF, Kind.COMPARE, Kind.BINARY, Kind.UNARY, Kind.IDENTITY,
    Kind.HASH, Kind.FORMAT, Kind.AWAIT, Kind.WITH, Kind.LEAVE, Kind.RAISE, Kind.EXCEPT,
})  # fmt: skip
_ENDS = ATOMS - {slice} | {types.TracebackType, types.FrameType}
_OF_ALL = {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__"}


class LeafRead(CaptureError):
    """The step reads the leaves at ``places`` of its batch, for which the trace had stand-ins."""

    def __init__(self, *places: int) -> None:
        super().__init__("the step reads numbers or text of its batch")
        self.places = places


class StandIn:
    """Stands for a leaf; made from the leaf's type, its position, and the set of positions that were read.

    Its ``__class__`` is the leaf's type. Every other access notes the read and raises Refused.
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, *held: Any) -> None:
        object.__setattr__(self, "_held", held)

    def __getattribute__(self, name: str) -> Any:
        return _held(self)[0] if name == "__class__" else _look_at(self)


_held: Callable[[Any], Any] = vars(StandIn)["_held"].__get__


def _look_at(stand_in: Any, *_: Any) -> NoReturn:
    _, place, read = _held(stand_in)
    read.add(place)
    raise Refused("reads a leaf of its batch")


_NUMBERS: set[type] = {kind for kind in np.sctypeDict.values() if np.dtype(kind).kind in "biufc"}
# With the special methods of each type, and no others, by which abstract classes and protocols know what is of theirs.
_STAND_INS = {
    kind: type(kind.__name__, (StandIn,), dict.fromkeys({n for n in dir(kind) if n[:2] == "__"} - _OF_ALL, _look_at))
    for kind in (str, bytes, int, float, *_NUMBERS)
}


class Unread:
    """The leaves that one trace has stand-ins for, at ``places``, and the positions ``read``. Each read raises Refused."""

    def __init__(self, fingerprint: Fingerprint, places: Collection[int]) -> None:
        self._fingerprint, self.places, self.read = fingerprint, frozenset(places), set[int]()

    def shown(self, leaves: Iterable[Any]) -> list[Any]:
        """Return the leaves as the trace has them: stand-ins at ``places``."""
        return [_STAND_INS[type(x)](type(x), n, self.read) if n in self.places else x for n, x in enumerate(leaves)]

    def check(self, error: BaseException | None = None) -> None:
        """Raise LeafRead where a leaf was read.

        ``error`` is what ended the trace. A CaptureError with a cause may come from user code that a stand-in made
        fail: all leaves then count as read.
        """
        met = self.read or (self.places if isinstance(error, CaptureError) and error.__cause__ is not None else ())
        if met and (error is None or isinstance(error, (Exception, Refused))):
            raise LeafRead(*sorted(met)) from None

    def operation(self, kind: Kind, operands: tuple[Any, ...]) -> None:
        """Judge an operation before it happens. Raises Refused where it reads a leaf."""
        if self.places and kind not in (Kind.CALL, Kind.CALL_UNPACKED):
            new = kind is Kind.SET_ITEM and type(operands[0]) in _NODES and not self._ends(operands[0])
            first = kind not in _LOOK
            self.note([*filter(_is_stand_in, operands[:first]), *operands[first : 2 if new else None]])

    def call(self, called: Any, given: Sequence[Any], is_observed: Callable[..., bool]) -> None:
        """Judge a call before it happens. Raises Refused where code that is not observed gets a leaf."""
        if self.places and called is not isinstance and called is not torch.is_tensor:
            if id(called) in _HAND_ON or (called is type and len(given) == 1):
                self.note(filter(_is_stand_in, given))
            elif not goes_to(called, is_observed):
                self.note(given)

    def note(self, values: Iterable[Any]) -> None:
        """Count every leaf that can be reached from the values as read. Raises Refused if there is one."""
        waiting, seen = [*values] if self.places else [], set[int]()
        for x in waiting:  # ever more
            if id(x) not in seen and not self._ends(x):
                seen.add(id(x))
                function = type(x) is types.FunctionType  # not its globals
                waiting += [x.__closure__, x.__defaults__, x.__kwdefaults__] if function else get_referents(x)
        if found := {_held(one)[1] for one in waiting if _is_stand_in(one)}:
            self.read |= found
            raise Refused("reads a leaf of its batch")

    def _ends(self, value: Any) -> bool:
        # Nothing puts a leaf into an object that was there before the step.
        kind = type(value)
        held = kind in _ENDS or issubclass(kind, (StandIn, torch.Tensor, torch.nn.Module)) or is_fixed(value)
        return held or self._fingerprint.cover(value) is not None or (issubclass(kind, type) and in_library(value))


def _is_stand_in(value: Any) -> bool:
    return issubclass(type(value), StandIn)


def goes_to(called: Any, is_observed: Callable[..., bool]) -> bool:
    """Return True if a call goes to observed code, which may pass a leaf on; a leaf in unobserved code counts as read."""
    while isinstance(called, (types.MethodType, functools.partial)):
        called = called.func if isinstance(called, functools.partial) else called.__func__
    code: Any = called if isinstance(called, types.FunctionType) else type(called).__call__
    if code is torch.nn.Module.__call__:
        code = getattr(called.forward, "__func__", called.forward)
    return isinstance(code, types.FunctionType) and is_observed(code.__code__, code.__globals__)


def free_places(leaves: Sequence[Any], spec: pytree.TreeSpec | None, known: Answers = ()) -> list[int]:
    """Return the positions of leaves that no key has until the step reads them; ``known`` has the leaves that were read."""
    held = {place for places, _ in values_known(known) for place in places}
    free = [place for place, leaf in enumerate(leaves) if type(leaf) in _STAND_INS and place not in held]
    # A user's own container class would run its code on stand-ins.
    return free if free and (spec is None or _NODES.issuperset(classes_of(spec))) else []


def values_known(known: Answers) -> tuple[Any, ...]:
    """Return the answers that are values of leaves, with their positions."""
    return tuple(one for one in known if not isinstance(one, int))


def with_values(known: Answers, places: Sequence[int], leaves: Sequence[Any]) -> Answers:
    """Return ``known`` with the values, bit by bit, of the leaves at ``places``."""
    return (*known, (tuple(places), tuple(exact(leaves[place]) for place in places))) if places else known
