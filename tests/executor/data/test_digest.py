"""Digests: equal in every process for what is equal, and others for what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from waterflow.executor.data.digest import digest, is_plain

VALUES: list[Any] = [
    None, 0, 1, True, 1.0, -0.0, 0.0, "1", "", b"1", [], {}, [1, 2], [2, 1], [[1], 2], [1, [2]], {"a": 1}, {"a": 2}, {1, 2}, {1, 3},
    torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), -torch.zeros(2), torch.arange(6).view(2, 3), torch.arange(6),
    torch.arange(6).view(3, 2).t(), torch.empty(0), torch.empty(0, 3), torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(),
    torch.eye(2), torch.ones(2, dtype=torch.bfloat16), torch.tensor([1j]), torch.tensor([1j]).conj(), np.zeros(2), np.arange(2),
    np.zeros(2, np.float32), np.float32(1), [torch.ones(1)], [torch.zeros(1)],
]  # fmt: skip


def test_what_differs_has_another_digest() -> None:
    assert len({digest(value) for value in VALUES}) == len(VALUES)


def test_the_order_of_a_set_and_the_strides_of_a_tensor_do_not_count() -> None:
    code = "from waterflow.executor.data.digest import digest; print(digest([{'a', 'b', 'c', 'd'}, {'x': 1.5}, 'y']).hex())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")  # and this process has a seed of its own
    }
    assert told == {digest([{"d", "c", "b", "a"}, {"x": 1.5}, "y"]).hex() + "\n"}
    assert digest(torch.arange(6).view(2, 3).t().contiguous()) == digest(torch.arange(6).view(2, 3).t())


@pytest.mark.parametrize(
    ("value", "plain"), [([1, {"a": (2.0, None)}], True), ({1: object()}, False), (np.array([object()]), False)]
)
def test_what_is_plain(value: Any, plain: bool) -> None:
    assert is_plain(value) is plain


def test_of_other_objects_the_class_counts() -> None:
    assert digest([object()]) == digest([object()]) != digest([Exception()])
