"""The memory that some tensors lie on, byte by byte: copied, brought back, and compared."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from waterflow.partition.operators import storage_id
from waterflow.partition.structure import extent_bytes

_ALIGNMENT = 16  # bytes: of the largest elements

Copy = Sequence[torch.Tensor]  # of a Memory, by part


class Memory:
    """The bytes that some tensors lie on, each once; no byte of anybody else's."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(
            list
        )  # by storage: address and number of each part
        self.parts: list[torch.Tensor] = []
        self._sizes: list[int] = []  # of a gap and a part, in turns
        self.bytes = 0  # of a copy
        spans = [(storage_id(t), t.data_ptr(), t.data_ptr() + extent_bytes(t), t) for t in tensors if t.numel()]
        together: list[Any] = []
        for span in sorted(spans, key=lambda span: span[:3]):
            if together and together[0] == span[0] and span[1] < together[2]:
                together[2] = max(together[2], span[2])
                continue
            self._add(together)
            together = list(span)
        self._add(together)

    def _add(self, together: list[Any]) -> None:
        if not together:
            return
        number, begin, end, tensor = together
        storage = tensor.untyped_storage()
        self._places[number].append((begin, len(self.parts)))
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.parts.append(raw.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,)))
        # An element of a copy begins at a whole number of its size where that of the tensor does.
        self._sizes += [(begin - self.bytes) % _ALIGNMENT, end - begin]
        self.bytes += sum(self._sizes[-2:])

    def copy(self) -> Copy:
        """What lies there now."""
        parts = torch.empty(self.bytes, dtype=torch.uint8).split(self._sizes)[1::2]
        if parts:
            torch._foreach_copy_(list(parts), self.parts)
        return parts

    def put(self, copy: Copy) -> None:
        """Bring it back."""
        if copy:
            torch._foreach_copy_(self.parts, list(copy))

    def is_as(self, copy: Copy) -> bool:
        """Whether each bit is that of a copy."""
        return all(map(_same_bytes, self.parts, copy))

    def then(self, copy: Copy, tensor: torch.Tensor) -> torch.Tensor:
        """One of the tensors, as it was when a copy was made."""
        parts = self._places[storage_id(tensor)]
        begin, number = parts[bisect_right(parts, (tensor.data_ptr(), 1 << 62)) - 1]
        block = copy[number]
        place = (block.storage_offset() + tensor.data_ptr() - begin) // tensor.element_size()
        return tensor.detach().new_empty(0).set_(block.untyped_storage(), place, tensor.shape, tensor.stride())


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    whole = one.numel() & ~7
    if whole >= 1024 and one.storage_offset() % 8 == other.storage_offset() % 8 == 0:
        if not torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64)):
            return False
        one, other = one[whole:], other[whole:]
    return torch.equal(one, other)
