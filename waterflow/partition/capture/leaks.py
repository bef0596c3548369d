"""Finds fake tensors that a step's code stored somewhere during its trace, and removes them.

The places that the step's key was made from, and those that the trace has found in installed packages, are restored by
``undisturbed`` (``substitution.py``). Other places, such as the cache of ``functools.lru_cache`` or the globals of a library
that is not observed, are found through the garbage collector, from the fake tensors still alive.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch

from waterflow.errors import CaptureError
from waterflow.partition.capture.fake_rules import TracingMode


class LeavesTensors(CaptureError):
    """The step keeps a tensor in a place that no key covers, as a cache does; a captured step would not fill it."""


_Cache = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def taken_back(mode: TracingMode) -> Iterator[list[torch.Tensor]]:
    """Trace a step in the block; on exit, remove every fake tensor that is still alive from its place.

    The tensors that are put into the yielded list may stay. Raises LeavesTensors where any other was alive: a captured
    step would not fill that place. A tensor that cannot be removed raises StepError, with its place, at its first use.
    """
    gc.collect(0)  # what is young afterwards was made by the trace
    kept: list[torch.Tensor] = []
    try:
        yield kept
    except BaseException as error:
        _let_go_of_frames(error)
        _take_back(mode, kept)
        raise
    where = _take_back(mode, kept)
    if where is not None:
        raise LeavesTensors(f"the step keeps a tensor in {where}, which a captured step would not fill")


def _let_go_of_frames(error: BaseException | None) -> None:
    # The variables of frames hold tensors of the trace. So do closures of their functions, which clear_frames leaves;
    # hence the tracebacks of causes and contexts go altogether.
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            if one is not error:  # who wants to know where that one came from has been told the line
                one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]


def _take_back(mode: TracingMode, kept: Collection[torch.Tensor]) -> str | None:
    # Returns the names of the places, or None if nothing survived.
    own = set(map(id, kept))
    if torch.is_autocast_cache_enabled():  # casts of parameters, until the outermost autocast ends, which may be the caller's
        torch.clear_autocast_cache()
    if not _alive(mode, own):
        mode.made.clear()
        return None
    # Without a step of Python in between: a tuple that another thread is filling must not be held when it goes on.
    young = set(map(id, gc.get_objects(generation=0)))
    for generation in (0, 2):
        gc.collect(generation)
        if not _alive(mode, own):
            mode.made.clear()
            return None
    places = _take_out(_alive(mode, own), young)
    where = ", ".join(sorted(set(places))) or "a place that Python cannot name"
    mode.closed = (
        f"a tensor without values is left from tracing a step, in {where}. Fill that place before the first step, or keep "
        "the tensor in a buffer of the model"
    )
    return where


def _alive(mode: TracingMode, own: Collection[int]) -> list[torch.Tensor]:
    found = {id(tensor): tensor for reference in mode.made if (tensor := reference()) is not None}
    return [tensor for number, tensor in found.items() if number not in own]


def _take_out(tensors: list[Any], young: Collection[int]) -> list[str]:
    # Climbs from the tensors over objects that the trace made to the first that was there before it, and clears those
    # places. Returns their names.
    places: list[str] = []
    seen = {id(tensors), id(places)}
    held = tensors  # to be found: tensors, then things of the trace that hold them
    while held:
        ids = set(map(id, held))
        holders = gc.get_referrers(*held)
        seen |= {id(holders), id(held), *ids}
        above: list[Any] = []
        seen.add(id(above))
        for holder in holders:
            if id(holder) in seen or isinstance(holder, types.FrameType):
                continue
            seen.add(id(holder))
            if isinstance(holder, (tuple, frozenset)) or (id(holder) in young and not isinstance(holder, _Cache)):
                above.append(holder)
            else:
                places.append(_clear(holder, seen))
        held = above
    return places


def _clear(holder: Any, ids: Collection[int]) -> str:
    # Removes what leaves the holder as it was, if the trace has added to it; a cache is emptied as a whole. Observed code has
    # changed nothing here: what it changes has been put back.
    if isinstance(holder, _Cache):
        holder.cache_clear()
        return f"the cache of {getattr(holder, '__qualname__', 'a function')}"
    if isinstance(holder, (list, deque)):
        rest = [thing for thing in holder if id(thing) not in ids]
        holder.clear()
        holder.extend(rest)
        return f"a {type(holder).__name__}"
    if isinstance(holder, set):
        for thing in [thing for thing in holder if id(thing) in ids]:
            holder.discard(thing)
        return "a set"
    if isinstance(holder, dict):
        keys = _keys(holder, ids)
        owner = _owner(holder, keys)
        if owner is not None:
            # What an attribute was before is not known. A dict that was empty is young, too.
            for inner in (holder[key] for key in keys if isinstance(holder[key], dict)):
                _drop(inner, ids)
            return f"{owner}.{keys[0]}"
        _drop(holder, ids)
        return f"a dict, under {keys[0]!r}" if keys and isinstance(keys[0], (str, int)) else "a dict"
    names = [name for name, value in getattr(holder, "__dict__", {}).items() if id(value) in ids]
    return ".".join([f"an object of {type(holder).__name__}", *names[:1]])


def _keys(holder: dict[Any, Any], ids: Collection[int]) -> list[Any]:
    return [key for key, value in holder.items() if id(value) in ids or id(key) in ids]


def _drop(holder: dict[Any, Any], ids: Collection[int]) -> None:
    for key in _keys(holder, ids):
        del holder[key]


def _owner(attributes: dict[Any, Any], keys: list[Any]) -> str | None:
    # A dict of attributes is named by its object or class; a plain dict has no owner.
    for thing in gc.get_referrers(attributes):
        if isinstance(thing, type) and keys and vars(thing).get(keys[0]) is attributes.get(keys[0]):
            return thing.__qualname__
        if not isinstance(thing, (type, types.FunctionType)) and getattr(thing, "__dict__", None) is attributes:
            is_module = isinstance(thing, types.ModuleType)
            return thing.__name__ if is_module else f"an object of {type(thing).__name__}"
    return None
