"""An oracle that is slow and obvious: every operation is a node, and knows all the nodes that lie before it."""

from __future__ import annotations

from tests.native import Device

PAGE = 1 << 21


class Unordered(Exception):
    """Two accesses to one byte with no path between them, or memory that is taken from under somebody."""


class GraphDevice(Device):
    """A device that keeps everything: nodes are numbers, and what lies before a node is a set of bits."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.before: list[int] = []  # per node: those before it, and itself
        self.last: dict[int, int] = {}  # per stream: what lies before its next node
        self.seen = 0  # the host has learned that these are done: whatever it issues now comes after them
        self.done = 0
        self.events: dict[int, int] = {}  # to nodes
        self.backed: dict[int, int] = {}  # base to bytes
        self.accesses: list[tuple[int, int, int, bool]] = []  # node, begin, end, write
        self.next_base = PAGE
        self.streams = 0

    def get_granularity(self) -> int:
        return PAGE

    def node(self, stream: int, *others: int) -> int:
        number = len(self.before)
        before = self.last[stream] | self.seen | 1 << number
        for other in others:
            before |= self.before[other]
        self.before.append(before)
        self.last[stream] = before
        return number

    def reserve(self, size: int) -> int:
        base, self.next_base = self.next_base, self.next_base + size + PAGE
        return base

    def unreserve(self, base: int, size: int) -> None:
        assert base not in self.backed

    def grow(self, at: int, size: int) -> bool:
        if size + sum(self.backed.values()) > self.capacity:
            return False
        self.backed[at] = size
        return True

    def shrink(self, at: int, size: int) -> None:
        assert self.backed.pop(at) == size
        for node, begin, end, _ in self.accesses:
            if begin < at + size and at < end and not self.seen >> node & 1:
                raise Unordered(f"node {node} may still use what is given back")
        self.accesses = [a for a in self.accesses if not (a[1] < at + size and at < a[2])]

    def add_stream(self) -> int:
        self.streams += 1
        self.last[self.streams] = 0
        return self.streams

    def remove_stream(self, stream: int) -> None:
        pass

    def record(self, stream: int) -> int:
        event = len(self.events) + 1
        self.events[event] = self.node(stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        self.node(stream, self.events[event])

    def complete(self, event: int) -> bool:
        node = self.events[event]
        if not self.done >> node & 1:
            return False
        self.seen |= self.before[node]
        return True

    def synchronize(self, event: int) -> None:
        self.done |= self.before[self.events[event]]
        self.complete(event)

    def forget(self, event: int) -> None:
        assert event in self.events

    def advance_stream(self, stream: int) -> None:
        self.done |= self.last[stream]

    def access(self, stream: int, at: int, size: int, write: bool) -> None:
        if not any(base <= at and at + size <= base + length for base, length in self.backed.items()):
            raise Unordered("nothing is behind this address")
        node = self.node(stream)
        for other, begin, end, wrote in self.accesses:
            if begin < at + size and at < end and (write or wrote) and not self.before[node] >> other & 1:
                raise Unordered(f"nodes {other} and {node} touch the same bytes, and neither lies before the other")
        self.accesses.append((node, at, at + size, write))
