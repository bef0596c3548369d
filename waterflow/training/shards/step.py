"""ShardedStep: steps on batches that are cut into shards, whose gradients are summed along one fixed tree."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from waterflow.errors import InvalidJobError
from waterflow.executor.data.digest import digest
from waterflow.executor.data.sharded import Cut, cut, stream_seed
from waterflow.executor.program.eager import OfPart
from waterflow.executor.program.step_future import Done
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.trace import no_gradient
from waterflow.step import Step

ALIGNED = 16  # elements: each parameter's sum begins at a multiple, as tensors of their own do

Buffers = dict[str, torch.Tensor]
MOST_STATE = 3  # tensors that optimizers keep for a parameter, of its size


def middle(low: int, high: int) -> int:
    """Return where the node of the tree over shards ``low`` to ``high`` (exclusive) divides; the left part is not smaller."""
    return low + (high - low + 1) // 2


def nodes_of(mine: range, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the largest nodes of the tree over shards ``low`` to ``high`` whose shards are all in ``mine``, in order."""
    if mine.start <= low and high <= mine.stop:
        yield low, high
    elif high - low > 1 and low < mine.stop and mine.start < high:
        yield from nodes_of(mine, low, middle(low, high))
        yield from nodes_of(mine, middle(low, high), high)


def tree_sum(values: dict[int, float], low: int, high: int) -> float:
    """Return the sum of numbers by shard along the tree; shards without a number take no part."""
    if high - low == 1:
        return values.get(low, -0.0)
    return tree_sum(values, low, middle(low, high)) + tree_sum(values, middle(low, high), high)


class FlatSums:
    """Gradient sums by parameter, in one piece of memory for each data type."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], room: int) -> None:
        places: dict[torch.dtype, list[tuple[str, int]]] = {}
        ends: dict[torch.dtype, int] = {}
        for name, parameter in parameters.items():
            begin = ends.get(parameter.dtype, 0)
            places.setdefault(parameter.dtype, []).append((name, begin))
            ends[parameter.dtype] = begin + -(-parameter.numel() // ALIGNED) * ALIGNED
        device = next(iter(parameters.values())).device
        self.flat = [torch.empty(end + room, dtype=dtype, device=device) for dtype, end in ends.items()]
        self.views = {}
        for flat, named in zip(self.flat, places.values()):
            for name, begin in named:
                like = torch.empty_like(parameters[name], device="meta")
                self.views[name] = flat.as_strided(like.shape, like.stride(), begin)
        self.spare: list[list[torch.Tensor]] = []  # copies whose memory is free for others

    def clear(self) -> None:
        """Begin anew: a sum of nothing."""
        for flat in self.flat:
            flat.fill_(no_gradient(flat))

    def put_aside(self) -> list[torch.Tensor]:
        """Return a copy of the sums."""
        made = self.spare.pop() if self.spare else [torch.empty_like(flat) for flat in self.flat]
        for copy, flat in zip(made, self.flat):
            copy.copy_(flat)
        return made

    def add(self, other: list[torch.Tensor]) -> None:
        """Add a copy that was put aside, and take its memory back."""
        for flat, one in zip(self.flat, other):
            flat.add_(one)
        self.spare.append(other)


class Peers(Protocol):
    """The other members of a job on several devices, which compute other shards of the same batch."""

    def weights(self, mine: list[float]) -> list[float]:
        """Return the weights of all shards; those of others are 0 in ``mine``."""

    def exchange(
        self,
        step: ShardedStep,
        alike: dict[str, Any],
        losses: dict[int, float],
        reached: set[str],
        after: dict[int, Buffers],
        seconds: float,
    ) -> tuple[dict[int, float], set[str], dict[int, Buffers]]:
        """Return all shards' losses, the parameters that any of them reaches, and their buffers after the step.

        Raises InvalidJobError if what is to be ``alike`` of the batch is not the same on all members.
        """

    def sum_up(self, sums: FlatSums, nodes: list[list[torch.Tensor]]) -> None:
        """Put the sum over all shards into ``sums``; ``nodes`` has the sums of this process's nodes of the tree."""


@dataclass
class _Given:
    batch: Cut
    weights: list[float]
    losses: dict[int, float] = field(default_factory=dict)


class ShardedStep(Step):
    """A step on ``Cut`` batches. Each part has a captured gradient step; the update by the sum is a captured step, too.

    A part's loss counts by its rows, or by ``loss_weight`` of it. Its random numbers follow from (``seed``, shard, step), and it has
    its own values of the buffers that steps write; in the model are those of shard 0. Parameters and all other state change only when
    the whole sum is there: a call that raises before that changes nothing, and can be repeated.
    """

    def __init__(
        self, *given: Any, shards: int, seed: int, loss_weight: Callable[[Any], Any] | None = None, **settings: Any
    ) -> None:
        self.shards = shards
        self._loss_weight, self._seed = loss_weight, seed
        self.mine = range(shards)
        self.peers: Peers | None = None
        self.calls = 0  # batches so far
        self._sums: FlatSums | None = None
        self._total: list[torch.Tensor] | None = None  # over the batches of an update, if there are several
        self._reached: set[str] = set()  # parameters with gradients since the last update
        self.buffers: list[Buffers] = [{} for _ in range(shards)]  # those that steps write, by shard
        self._after: dict[int, Buffers] = {}  # the same after the present batch
        super().__init__(*given, **settings)
        if self.generator is None:
            self.generator = torch.Generator(self._spec.device)
            self.generators = [self.generator]

    def _as_run(self, spec: StepSpec) -> StepSpec:
        # Sums that are put aside on the way along the tree, and over the batches of an update; and the optimizer's state, so that an
        # update finds its memory claimed.
        more = math.ceil(math.log2(self.shards)) + (spec.accumulate > 1) + MOST_STATE
        return replace(spec, compute_loss=OfPart(spec.compute_loss), shards=self.shards, more_sums=more)

    # -- one batch

    def submit(self, batch: Cut) -> Done:
        """Train on a batch; returns the mean of the parts' losses, with their weights."""
        sums, before = self._laid_out(), dict(self.account)
        given = _Given(batch, self._weights(batch))
        self._after = {}
        nodes, reached, began = [], set[str](), time.perf_counter()
        for low, high in nodes_of(self.mine, 0, self.shards):
            sums.clear()
            reached |= self._add(low, high, given, set())
            nodes.append(sums.put_aside() if high < self.mine.stop else sums.flat)
        if self.peers is not None:
            seconds = time.perf_counter() - began
            mine = batch.alike, given.losses, reached, self._after, seconds
            given.losses, reached, self._after = self.peers.exchange(self, *mine)
            self.peers.sum_up(sums, nodes)
        self._commit(given.losses, reached)
        for what in ("steps", "eager steps"):  # its calls count as one
            self.account[what] = before.get(what, 0) + (self.account[what] > before.get(what, 0))
        return Done(torch.tensor(tree_sum(given.losses, 0, self.shards), dtype=torch.float64))

    def first_part(self, name: str, batch: Any) -> tuple[Any, torch.Tensor]:
        """Return what a gradient step of the largest part of such a batch is given, for plans."""
        return cut(f"data of job {name!r}", batch, self.shards, range(1)).parts[0], torch.ones(())

    def _commit(self, losses: dict[int, float], reached: set[str]) -> None:
        sums, loss = self._laid_out(), tree_sum(losses, 0, self.shards)
        self.calls += 1
        self._reached |= reached
        for shard, after in self._after.items():
            self.buffers[shard].update(after)
        self._load_buffers(0)
        if self.accumulate > 1:
            if self._total is not None:
                sums.add(self._total)
            self._total = sums.put_aside() if self.calls % self.accumulate else None
        if self.calls % self.accumulate == 0:
            if self.engine is not None and self.job is not None:
                # A job that is to leave its memory does so before or after an update. The claim of a part covers the optimizer's state.
                self.engine.reservations.policy_of(self.job).at_boundary = None
            self._update(sums, loss)
        self.seed_evaluation()

    def _update(self, sums: FlatSums, loss: float) -> None:
        self._put_sums(sums, self._reached)
        self._reached = set()
        self._submit((torch.tensor(loss, device=self._spec.device),), True, update=True).result()

    def _laid_out(self) -> FlatSums:
        trained = self._spec.trained()
        if self._sums is None or trained.keys() != self._sums.views.keys():
            self._sums = FlatSums(trained, self.shards)
        return self._sums

    def _weights(self, batch: Cut) -> list[float]:
        if self._loss_weight is None:
            return [rows / sum(batch.rows) for rows in batch.rows]
        weights = [0.0] * self.shards
        for shard, part in batch.parts.items():
            try:
                weights[shard] = float(self._loss_weight(part))
            except (TypeError, ValueError) as error:
                raise InvalidJobError(f"step {self.name!r}: loss_weight must return a number for each part: {error}") from error
        if self.peers is not None:
            weights = self.peers.weights(weights)
        if not (total := tree_sum(dict(enumerate(weights)), 0, self.shards)) > 0:
            raise InvalidJobError(f"step {self.name!r}: loss_weight must return positive numbers; it returned {weights}")
        return [weight / total for weight in weights]

    def _add(self, low: int, high: int, given: _Given, reached: set[str]) -> set[str]:
        # Adds the sum over a node's shards to the step's sums, in which ``reached`` have gradients, or which are empty; returns
        # what has gradients then. A single shard adds in place.
        if high - low == 1:
            return self._part(low, given, reached) if given.weights[low] else reached  # a mean over nothing is NaN
        reached, right = self._add(low, middle(low, high), given, reached), (middle(low, high), high)
        if high - middle(low, high) == 1:
            return self._add(*right, given, reached)
        sums = self._laid_out()
        left = sums.put_aside()
        sums.clear()
        reached |= self._add(*right, given, set())
        sums.add(left)
        return reached

    def _part(self, shard: int, given: _Given, reached: set[str]) -> set[str]:
        sums = self._laid_out()
        self._put_sums(sums, reached)
        self._seed_numbers(shard)
        self._load_buffers(shard)
        weighted = given.batch.parts[shard], torch.tensor(given.weights[shard], device=self._spec.device)
        given.losses[shard] = float(self._submit(weighted, True, update=False).result())
        named = dict(self._spec.model.named_buffers()) if self.buffers[shard] else {}
        self._after[shard] = {name: named[name].clone() for name in self.buffers[shard]}
        if self.opaque_reason is None:
            return set(self._bound_steps.sums)
        for name, gradient in (added := self._eager_step.take_sums()).items():
            if gradient.layout != torch.strided:
                raise InvalidJobError(
                    f"the gradient of {name!r} is sparse, and those of shards cannot be; pass sparse=False, or shards=1"
                )
            sums.views[name].copy_(gradient)
        return set(added)

    def _put_sums(self, sums: FlatSums, reached: set[str]) -> None:
        if self.opaque_reason is None:
            self._bound_steps.lay_out_sums(sums.views, reached)
        else:
            self._eager_step.put_sums({name: sums.views[name] for name in reached})

    # -- buffers

    def seed_evaluation(self) -> None:
        """Let an evaluation draw numbers that follow from the seed and the number of batches so far."""
        self._seed_numbers(self.shards)

    def take_over_buffers(self) -> None:
        """Let buffers that an evaluation has changed in the model be those of all shards."""
        named = dict(self._spec.model.named_buffers()) if self.buffers[0] else {}
        for name, own in self.buffers[0].items():
            if digest(named[name]) != digest(own):
                for buffers in self.buffers:
                    buffers[name] = named[name].clone()

    def _seed_numbers(self, stream: int) -> None:
        for generator in self.generators:
            generator.manual_seed(stream_seed(self._seed, stream, self.calls))

    def _will_write(self, buffers: Iterable[str]) -> None:
        fresh = [name for name in buffers if name not in self.buffers[0]]
        named = dict(self._spec.model.named_buffers()) if fresh else {}
        for own in self.buffers:
            own.update((name, named[name].clone()) for name in fresh)

    def unpacked(self, names: Sequence[str], data: bytes) -> Buffers:
        """Return another member's values of these buffers, from their bytes one after the other."""
        self._will_write(names)
        named, end, made = dict(self._spec.model.named_buffers()), 0, {}
        for name in names:
            begin, end = end, end + named[name].nbytes
            value = torch.frombuffer(bytearray(data[begin:end]), dtype=named[name].dtype) if end > begin else named[name].cpu()
            made[name] = value.reshape(named[name].shape).to(named[name].device)
        return made

    def _load_buffers(self, shard: int) -> None:
        if own := self.buffers[shard]:
            named = dict(self._spec.model.named_buffers())
            with torch.no_grad():
                torch._foreach_copy_([named[name] for name in own], list(own.values()))

    # -- the state between two batches

    def progress(self) -> dict[str, Any]:
        """Return what the model and the optimizer do not have: the number of batches, gradient sums, and the shards' buffers."""
        sums = self._laid_out()
        if self._total is not None:
            for flat, one in zip(sums.flat, self._total):
                flat.copy_(one)
        taken = {name: sums.views[name] for name in sorted(self._reached)}
        return {"calls": self.calls, "sums": taken, "buffers": self.buffers}

    def put_progress(self, taken: dict[str, Any]) -> None:
        """Go on from what ``progress`` returned; only before the first batch."""
        self.calls, self.buffers = taken["calls"], taken["buffers"]
        sums, self._reached = self._laid_out(), set(taken["sums"])
        sums.clear()
        for name, one in taken["sums"].items():
            sums.views[name].copy_(one)
        self._total = sums.put_aside() if self._reached else None
