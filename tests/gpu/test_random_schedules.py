"""Jobs side by side on a stand-in whose streams do some of what they could at random moments: bits as each alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from tests.gpu.test_together import FORMS, STANDIN, meet

pytestmark = pytest.mark.skipif(not STANDIN, reason="is about the order of the stand-in's streams")


@pytest.fixture
def schedule() -> Iterator[None]:
    yield
    ctypes.CDLL(None).fake_schedule(os.environ["STANDIN_SCHEDULE"].encode())


@pytest.mark.parametrize("seed", range(50))
def test_bits_as_alone(seed: int, schedule: None) -> None:
    ctypes.CDLL(None).fake_schedule(f"random {seed}".encode())
    count, name = FORMS[seed % len(FORMS)]
    meet(count, name, graphs=seed // len(FORMS) % 2 == 0)
