"""What torch.distributions checks of its arguments: a captured step goes on as if they were valid, and looks in each step."""

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

import torch
from torch import distributions, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from waterflow.errors import CaptureError
from waterflow.partition.capture.spec import GraphInput
from waterflow.partition.capture.substitution import is_users_file
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
    """Whether the truth that a step asks for is such a check; the graph then fails where it does not hold, as the step does.

    On the CPU alone, where an operation that fails ends nothing but its step, and where no code of the step's would catch the error.
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
    """Outwards, to the trace's own."""
    while frame is not None and frame.f_code.co_qualname != "_StepTracer._step":
        yield frame
        frame = frame.f_back


def _may_catch(frame: FrameType) -> bool:
    """Whether an error that comes up here may end in this frame: in a ``try`` or in a ``with``."""
    entries = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)


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
    """Stands for a leaf: (its type, its place, places that were read). It answers with the first as its class, and refuses all else."""

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


# With the special methods of each type, and no others, by which abstract classes and protocols know what is of theirs.
_STAND_INS = {kind: type(kind.__name__, (StandIn,), dict.fromkeys({n for n in dir(kind) if n[:2] == "__"} - _OF_ALL, _look_at))
              for kind in (str, bytes, int, float)}  # fmt: skip


class Unread:
    """The leaves that one trace has stand-ins for, at ``places``, and ``read``, the places where it then looked.

    A look raises Refused.
    """

    def __init__(self, fingerprint: Fingerprint, places: Collection[int]) -> None:
        self._fingerprint, self.places, self.read = fingerprint, frozenset(places), set[int]()

    def shown(self, leaves: Iterable[Any]) -> list[Any]:
        """The leaves as the trace has them."""
        return [_STAND_INS[type(x)](type(x), n, self.read) if n in self.places else x for n, x in enumerate(leaves)]

    def check(self, error: BaseException | None = None) -> None:
        """Raise LeafRead where a leaf was read; also where it may be a stand-in that made the user's code raise, hence ``error``."""
        met = self.read or (self.places if isinstance(error, CaptureError) and error.__cause__ is not None else ())
        if met and (error is None or isinstance(error, (Exception, Refused))):
            raise LeafRead(*sorted(met)) from None

    def operation(self, kind: Kind, operands: tuple[Any, ...]) -> None:
        """It is about to happen."""
        if self.places and kind not in (Kind.CALL, Kind.CALL_UNPACKED):
            new = kind is Kind.SET_ITEM and type(operands[0]) in _NODES and not self._ends(operands[0])
            first = kind not in _LOOK
            self.note([*filter(_is_stand_in, operands[:first]), *operands[first : 2 if new else None]])

    def call(self, called: Any, given: Sequence[Any], is_observed: Callable[..., bool]) -> None:
        """Something is about to be called."""
        if self.places and called is not isinstance and called is not torch.is_tensor:
            if id(called) in _HAND_ON or (called is type and len(given) == 1):
                self.note(filter(_is_stand_in, given))
            elif not _goes_to(called, is_observed):
                self.note(given)

    def note(self, values: Iterable[Any]) -> None:
        """All that can be reached from the values is looked at."""
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
        """Whether no leaf can be behind a value: none is put where something lay before the step."""
        kind = type(value)
        held = kind in _ENDS or issubclass(kind, (StandIn, torch.Tensor, torch.nn.Module)) or is_fixed(value)
        return held or self._fingerprint.cover(value) is not None or (issubclass(kind, type) and in_library(value))


def _is_stand_in(value: Any) -> bool:
    return issubclass(type(value), StandIn)


def _goes_to(called: Any, is_observed: Callable[..., bool]) -> bool:
    """Whether observed code is the first to have what is given in a call."""
    while isinstance(called, (types.MethodType, functools.partial)):
        called = called.func if isinstance(called, functools.partial) else called.__func__
    code: Any = called if isinstance(called, types.FunctionType) else type(called).__call__
    if code is torch.nn.Module.__call__:
        code = getattr(called.forward, "__func__", called.forward)
    return isinstance(code, types.FunctionType) and is_observed(code.__code__, code.__globals__)


def free_places(leaves: Sequence[Any], spec: pytree.TreeSpec | None, known: Answers = ()) -> list[int]:
    """Where a batch has leaves that no key holds before they are read; ``known`` is what the key has of those that were."""
    held = {place for places, _ in values_known(known) for place in places}
    free = [place for place, leaf in enumerate(leaves) if type(leaf) in _STAND_INS and place not in held]
    # Nobody's own code is to put a batch with stand-ins together.
    return free if free and (spec is None or _NODES.issuperset(classes_of(spec))) else []


def values_known(known: Answers) -> tuple[Any, ...]:
    """Those of the answers that are values of leaves, with their places."""
    return tuple(one for one in known if not isinstance(one, int))


def with_values(known: Answers, places: Sequence[int], leaves: Sequence[Any]) -> Answers:
    """``known``, and what the leaves at ``places`` are, bit by bit."""
    return (*known, (tuple(places), tuple(exact(leaves[place]) for place in places))) if places else known
