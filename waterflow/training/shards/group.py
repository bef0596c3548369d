"""Group: the members of a job between two changes, which exchange messages, gradient sums and states by torch.distributed."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from io import BytesIO
from itertools import pairwise
from typing import IO, Any

import torch
import torch.distributed as dist

from waterflow.training.shards.step import ALIGNED, middle

# Not what tells a death: that closes connections. A member that stands still is killed, and then is dead, too.
LONGEST = timedelta(hours=12)
HOST = "127.0.0.1"
NODE_TAG, SUM_TAG, STATE_TAG = 1 << 20, 2 << 20, 3 << 20  # a message's number is added


class MemberLost(Exception):
    """An exchange failed, as a member has died or has left the group."""


@contextlib.contextmanager
def _telling_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises
        raise MemberLost(str(error)) from error


class Group:
    """One epoch of membership, in which this process has ``rank`` of ``size``. Every method but ``close`` raises MemberLost.

    Members meet in the store at ``port``. All of them call ``gather`` and ``sum_along_tree`` in the same order.
    """

    def __init__(self, port: int, epoch: int, rank: int, size: int, device: torch.device) -> None:
        self.epoch, self.rank, self.size = epoch, rank, size
        with _telling_loss():
            # Of its own: a client that waits, perhaps for a member who has died, lets nobody else ask.
            store = dist.TCPStore(HOST, port, is_master=False)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = LONGEST
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(f"group{epoch}/", store), rank, size, options)
            self._sums: Any = self._gloo
            if device.type == "cuda":
                self._sums = dist.ProcessGroupNCCL(dist.PrefixStore(f"nccl{epoch}/", store), rank, size)
        self._device = device

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all members by rank: plain data, pickled."""
        mine = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with _telling_loss():
            self._gloo.allgather([lengths], [torch.tensor([len(mine)])]).wait()
            longest = max(map(int, lengths))
            told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
            self._gloo.allgather([told], [padded]).wait()
        return [pickle.loads(one.numpy().tobytes()[: int(length)]) for one, length in zip(told, lengths)]

    def sum_along_tree(
        self, into: torch.Tensor, mine: Sequence[torch.Tensor], nodes: Sequence[Sequence[tuple[int, int]]], shards: int
    ) -> None:
        """Sum flat tensors over ``shards`` along the tree, into ``into`` on every member.

        ``nodes`` are the nodes of the tree by rank whose sums the members have, and ``mine`` the sums of this one, which are
        overwritten. Each member sums one piece of the tensors, and then hands it to all others.
        """
        ends = [into.numel() * rank // self.size // ALIGNED * ALIGNED for rank in range(self.size)] + [into.numel()]
        pieces = [slice(begin, end) for begin, end in pairwise(ends)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        own = pieces[self.rank]
        sums = {node: one[own] for node, one in zip(nodes[self.rank], mine)}
        with _telling_loss():
            with self._at_once() as works:
                for rank in others:
                    for (low, _), one in zip(nodes[self.rank], mine):
                        works.append(self._sums.send([one[pieces[rank]]], rank, NODE_TAG + low))
                    for node in nodes[rank]:
                        sums[node] = torch.empty_like(into[own])
                        works.append(self._sums.recv([sums[node]], rank, NODE_TAG + node[0]))
            into[own] = _combined(sums, 0, shards)
            with self._at_once() as works:
                for rank in others:
                    works.append(self._sums.send([into[own]], rank, SUM_TAG))
                    works.append(self._sums.recv([into[pieces[rank]]], rank, SUM_TAG))

    @contextlib.contextmanager
    def _at_once(self) -> Iterator[list[Any]]:
        works: list[Any] = []
        if self._device.type == "cuda":  # NCCL's sends and receives must be issued together
            self._sums._start_coalescing()
            yield works
            works = [self._sums._end_coalescing()]
        else:
            yield works
        for work in works:
            work.wait()

    def send(self, state: Any, rank: int) -> None:
        """Send nested data with tensors in host memory to another member."""
        tensors: list[torch.Tensor] = []
        file = BytesIO()
        _Pickler(file, tensors).dump(state)
        forms = [(tuple(one.shape), one.dtype) for one in tensors]
        header = pickle.dumps((file.getvalue(), forms))
        with _telling_loss():
            first = [torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
            for number, one in enumerate([*first, *tensors]):
                if one.numel():
                    self._gloo.send([one.contiguous().view(-1).view(torch.uint8)], rank, STATE_TAG + number).wait()

    def receive(self, rank: int) -> Any:
        """Return what another member sends."""
        with _telling_loss():
            length = torch.empty(8, dtype=torch.uint8)
            self._gloo.recv([length], rank, STATE_TAG).wait()
            header = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
            self._gloo.recv([header], rank, STATE_TAG + 1).wait()
            told, forms = pickle.loads(header.numpy().tobytes())
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
            for number, one in enumerate(tensors):
                if one.numel():
                    self._gloo.recv([one.view(-1).view(torch.uint8)], rank, STATE_TAG + 2 + number).wait()
        return _Unpickler(BytesIO(told), tensors).load()


class _Pickler(pickle.Pickler):
    # Tensors are left out, and collected in a list; of a sparse one its parts.
    def __init__(self, file: IO[bytes], tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self._tensors[place]


def _combined(sums: dict[tuple[int, int], torch.Tensor], low: int, high: int) -> torch.Tensor:
    if (low, high) in sums:
        return sums[low, high]
    return _combined(sums, low, middle(low, high)).add_(_combined(sums, middle(low, high), high))
