"""The memory of gradients: sums in place, and early updates.

Autograd adds gradients up in place, but not while a step is traced: ``sum_in_place`` does it in the graph.
``update_early`` moves updates forward to where their gradients are complete, which releases the gradients sooner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from waterflow.partition.capture.fake_rules import is_update
from waterflow.partition.passes.operators import has_effect, is_random, storage_id, written_by
from waterflow.partition.plan.liveness import follow
from waterflow.partition.plan.offsets import resident

aten = torch.ops.aten


def sum_in_place(graph: fx.Graph) -> int:
    """Let additions of the backward pass write into their first operand if it dies with them; return how many do.

    Operand and sum are tensors of the step's own with the same layout and without views: views keep short ways to be
    made (``executor/program/kernel_selection.py``), which memory that is written to does not have.
    """
    # Operations with several results are counted by those that are taken out of them.
    values = (node.meta.get("val") for node in graph.nodes)
    shared = Counter(storage_id(value) for value in values if isinstance(value, torch.Tensor))
    done = 0
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.meta["phase"] != "backward":
            continue
        into, other = node.args
        if not isinstance(into, fx.Node) or not isinstance(other, fx.Node) or into.op != "call_function":
            continue
        given, added, made = (one.meta["val"] for one in (into, other, node))
        alone = len(into.users) == 1 and into is not other and shared[storage_id(given)] == shared[storage_id(made)] == 1
        if alone and _lies_as(given, made) and _lies_as(added, made):
            node.target = aten.add_.Tensor
            node.meta["val"] = given
            done += 1
    return done


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype and one.device == other.device


LEAST_GAIN = 0.01  # of the step's height; for less the step stays as it is
MOST_MOVES = 8  # places that updates move to
_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of what could be gained, that fewer places may cost


@dataclass(frozen=True)
class _Piece:
    # The unit that moves: an operation, or the part of a fused update that changes parameter ``element`` of its lists
    # (-1: the whole operation). It must come after the operation ``ready``, and after the pieces ``needs``.
    node: fx.Node
    element: int
    ready: int
    needs: frozenset[int]


@dataclass(frozen=True)
class _Gradient:
    # Memory that only ``pieces`` of the update read after the operation ``ready``.
    size: int
    ready: int
    death: int
    pieces: tuple[int, ...]


def update_early(graph: fx.Graph, groups: dict[str, int]) -> int:
    """Move updates forward where that lowers the step's height; return to how many places.

    ``groups`` maps each fused update's name to its optimizer group, and is kept up to date. At 0 the graph is as it
    was. Distinct inputs of the graph must be distinct memory.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    begin = next((i for i, node in enumerate(calls) if node.meta["phase"] == "update"), len(calls))
    followed = follow(graph, calls)
    waiting = {s: x for s, x in followed.storages.items() if x.birth < begin <= x.death and not x.kept}
    held = resident(followed.lives(), len(calls))
    height = max(held, default=0)
    if _height(held, ((x.birth, x.death, x.size) for x in waiting.values())) > (1 - LEAST_GAIN) * height:
        return 0  # not even if each gradient went at once: most CNNs end here
    if _hidden_by_gradients(calls) > LEAST_GAIN * height:
        return 0
    pieces, users = _pieces(calls, begin, followed.of)
    gradients = [
        _Gradient(x.size, max(pieces[number].ready for number in users[s]), x.death, tuple(users[s])) for s, x in waiting.items()
    ]
    moves = _moves(held, gradients, begin)
    if not moves or _height(held, _gone(gradients, moves)) > (1 - LEAST_GAIN) * height:
        return 0
    _move(graph, groups, calls, pieces, gradients, moves)
    return len(moves)


def _hidden_by_gradients(calls: Iterable[fx.Node]) -> int:
    # Kernels of convolutions take a copy of the weight's gradient in another layout, which liveness does not know.
    # Gradients that pile up hide these bytes; without them the prediction would be too low.
    weights: Iterable[Any] = (n.args[2] for n in calls if n.target is torch.ops.aten.convolution_backward.default)
    return max((weight.meta["val"].nbytes for weight in weights), default=0)


def _height(held: Sequence[int], freed: Iterable[tuple[int, int, int]]) -> int:
    # ``freed`` rows: freed after this operation, instead of after that one, bytes.
    change = [0] * (len(held) + 1)
    for behind, death, size in freed:
        change[behind + 1] -= size
        change[death + 1] += size
    height = less = 0
    for at, bytes_held in enumerate(held):
        less += change[at]
        height = max(height, bytes_held + less)
    return height


# -- what depends on what


def _pieces(
    calls: Sequence[fx.Node], begin: int, of: Mapping[fx.Node, Sequence[int]]
) -> tuple[list[_Piece], dict[int, list[int]]]:
    # Returns the pieces in order, and for each storage the pieces that touch it. A piece comes after the last operation
    # before the update that touches any of its memory, and after pieces that share memory with it, unless both only
    # read that.
    last = {s: at for at, node in enumerate(calls[:begin]) for one in (node, *node.all_input_nodes) for s in of[one]}
    pieces: list[_Piece] = []
    users: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node in calls[begin:]:
        changed = written_by(node)
        for element, sources in _parts(node):
            written = {s for one in (node, *sources) if one is node or one in changed for s in of[one]}
            touched = written.union(*map(of.__getitem__, sources))
            needs = {writer[s] for s in touched if s in writer}.union(*(readers.get(s, ()) for s in written))
            behind = [*(last[s] for s in touched if s in last), *(pieces[number].ready for number in needs)]
            ready = max(behind, default=-1)
            if has_effect(node) and (is_random(node.target) or not changed):
                ready = len(calls)  # its place matters to more than memory
            for s in touched:
                users.setdefault(s, []).append(len(pieces))
                if s in written:
                    writer[s], readers[s] = len(pieces), []
                else:
                    readers.setdefault(s, []).append(len(pieces))
            pieces.append(_Piece(node, element, ready, frozenset(needs)))
    return pieces, users


def _parts(node: fx.Node) -> Iterator[tuple[int, Sequence[fx.Node]]]:
    if not is_update(node.target):
        yield -1, node.all_input_nodes
        return
    shared = [source for source in node.kwargs.values() if isinstance(source, fx.Node)]
    lists: Any = node.args
    for element, row in enumerate(zip(*filter(None, lists))):
        yield element, (*row, *shared)


def _elements(update: fx.Node, elements: Sequence[int]) -> tuple[list[Any], ...]:
    # A list of a fused update may be empty, and stays so.
    lists: Any = update.args
    return tuple([many[i] for i in elements] if many else [] for many in lists)


# -- where to


def _moves(held: Sequence[int], gradients: Sequence[_Gradient], begin: int) -> list[int]:
    # Few places near the lowest height: each ceiling gives up a larger share of the gain, until MOST_MOVES suffice.
    height, lowest = max(held), _height(held, ((min(g.ready, g.death), g.death, g.size) for g in gradients))
    arriving = [0] * (len(held) + 1)
    for gradient in gradients:
        if gradient.ready < begin:
            arriving[gradient.ready + 1] += gradient.size
    moves: list[int] = []
    for share in _SHARES:
        moves = _as_late_as_possible(held, arriving, begin, lowest + int(share * (height - lowest)))
        if len(moves) <= MOST_MOVES:
            break
    return moves


def _as_late_as_possible(held: Sequence[int], arriving: Sequence[int], begin: int, ceiling: int) -> list[int]:
    # Greedy, and optimal: each move waits until nothing else keeps the height under the ceiling, so none is wasted.
    moves: list[int] = []
    pending = gone = 0
    for at in range(begin):
        pending += arriving[at]
        if held[at] - gone > ceiling and pending:
            moves.append(at)
            gone, pending = gone + pending, 0
    return moves


def _gone(gradients: Iterable[_Gradient], moves: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for gradient in gradients:
        move = _move_of(gradient, moves)
        if move is not None:
            yield move - 1, gradient.death, gradient.size


def _move_of(gradient: _Gradient, moves: Sequence[int]) -> int | None:
    return next((at for at in moves if at > gradient.ready), None)


# -- the graph


def _move(
    graph: fx.Graph,
    groups: dict[str, int],
    calls: Sequence[fx.Node],
    pieces: Sequence[_Piece],
    gradients: Iterable[_Gradient],
    moves: Sequence[int],
) -> None:
    wanted: dict[int, set[int]] = {at: set() for at in moves}
    for gradient in gradients:
        at = _move_of(gradient, moves)
        if at is not None:
            wanted[at].update(gradient.pieces)
    moved: set[int] = set()
    updated: dict[fx.Node, set[int]] = {}
    for at in moves:
        taken = _with_needs(wanted[at], pieces, moved)
        moved |= taken
        for node, numbers in groupby(sorted(taken), lambda number: pieces[number].node):
            if not is_update(node.target):
                calls[at].prepend(node)
                continue
            elements = [pieces[number].element for number in numbers]
            with graph.inserting_before(calls[at]):
                chunk = graph.call_function(node.target, _elements(node, elements), dict(node.kwargs))
            chunk.meta.update(node.meta)
            groups[chunk.name] = groups[node.name]
            updated.setdefault(node, set()).update(elements)
    for node, gone in updated.items():
        # The update in its old place keeps the elements that did not move.
        rest = [element for element in range(len(node.args[0])) if element not in gone]  # type: ignore[arg-type]
        if rest:
            node.args = _elements(node, rest)
        else:
            graph.erase_node(node)
            del groups[node.name]


def _with_needs(wanted: Iterable[int], pieces: Sequence[_Piece], moved: set[int]) -> set[int]:
    found: set[int] = set()
    open_ = [number for number in wanted if number not in moved]
    while open_:
        number = open_.pop()
        if number not in found:
            found.add(number)
            open_ += [n for n in pieces[number].needs if n not in moved]
    return found
