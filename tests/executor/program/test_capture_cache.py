"""The cache of captures: how many there are, and how much of the host's memory they hold."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

import waterflow as wf
from tests.support import Net, images
from waterflow.executor.program import bound_step, capture_cache
from waterflow.executor.program.capture_cache import NODE_BYTES, CaptureCache


def train(cache: CaptureCache, rows: int) -> wf.Step:
    model = Net()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(images(1, size=rows)[0])
    assert step.opaque_reason is None
    return step


def test_captures_go_where_they_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    size = train(capture_cache.captures, 2)._bound_steps.captured(*wf.step.flatten(images(1, size=2)[0])).host_bytes  # type: ignore[attr-defined]
    assert 20 * NODE_BYTES < size < 200 * NODE_BYTES
    cache = CaptureCache(most_bytes=2 * size)
    monkeypatch.setattr(bound_step, "captures", cache)
    step = train(cache, 3)
    for rows in (4, 3, 5):  # the one for four is the least recently used
        train(cache, rows)
    assert (cache.captures, cache.bytes) == (3, 2 * size)
    train(cache, 3)
    assert cache.captures == 3
    train(cache, 4)
    assert (cache.captures, cache.bytes) == (4, 2 * size)
    step(images(1, size=3)[0])  # goes on with its own, wherever it went
    assert cache.captures == 4
    cache.clear()
    assert cache.bytes == 0


def test_a_capture_that_is_larger_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CaptureCache(most_bytes=1)
    monkeypatch.setattr(bound_step, "captures", cache)
    for rows in (3, 3, 4, 4, 3):
        train(cache, rows)
    assert cache.captures == 3


def test_of_those_never_found_again_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CaptureCache(most_new=2)
    monkeypatch.setattr(bound_step, "captures", cache)
    for rows in (3, 4, 3, 5, 6, 7):  # three was found again; five is the oldest of the others behind four
        train(cache, rows)
    assert cache.captures == 5
    for rows, captures in ((3, 5), (6, 5), (7, 5), (4, 6)):
        train(cache, rows)
        assert cache.captures == captures


def test_a_capture_that_goes_leaves_nothing_to_the_garbage_collector(no_captures: CaptureCache) -> None:
    train(no_captures, 3)
    (entry,) = no_captures._entries.values()
    nodes = [weakref.ref(node) for node in entry.capture.graph.nodes]  # type: ignore[union-attr]
    del entry
    gc.collect()
    gc.disable()
    try:
        no_captures.clear()
        assert not any(one() for one in nodes)
    finally:
        gc.enable()
