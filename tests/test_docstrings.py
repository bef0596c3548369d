"""The rules for docstrings find what breaks them, and the package keeps them."""

from __future__ import annotations

import pytest

from tests import docstrings


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""What a step leaves."""', "relative clause"),
        ('class A:\n    """Those of a job."""', "relative clause"),
        ('async def f():\n    """Whether it fits."""', "relative clause"),
        ('def _place_of_a_batch():\n    """The place."""', "fewer words"),
        ('class A:\n    def _next_free_place(self):\n        """Next place."""', "fewer words"),
    ],
)
def test_planted_docstrings_are_found(source: str, rule: str) -> None:
    assert [found for _, found in docstrings.broken(source) if rule in found]


@pytest.mark.parametrize(
    "source",
    [
        '"""However long it takes, steps keep their order."""',
        'def _place_of_a_batch():\n    """The offset in bytes from the end of the arena."""',
        "def _place_of_a_batch(): ...",
        'def __init_subclass__(cls):\n    """Register."""',
    ],
)
def test_others_are_not(source: str) -> None:
    assert not [*docstrings.broken(source)]
