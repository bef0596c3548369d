"""What libraries of models find under names: another function there, or in a registry, is seen before the next step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import waterflow as wf
from tests.support import images
from waterflow.partition.guards.code_refs import _recorded, is_library_file

FILES = {
    "__init__.py": "",
    "kernels.py": """
DOUBLED = False
def twice(x): return x * 2
def once(x): return x
""",
    "registry.py": """
from . import kernels
class Registry:
    shared = {"twice": kernels.twice}
    def __init__(self): self.own = {}
    def __getitem__(self, name): return self.own[name] if name in self.own else self.shared[name]
ALL = Registry()
TABLE = {"twice": kernels.twice}
cache = {}
calls = 0
""",
    "layers.py": """
import torch.nn as nn
from . import kernels, registry
from .kernels import twice
from .registry import ALL, TABLE
class Layer(nn.Module):
    def __init__(self, way): super().__init__(); self.way = way
    def forward(self, x):
        registry.calls += 1
        registry.cache[len(registry.cache) + 1] = twice
        if self.way == "named": return twice(x)
        if self.way == "of a module": return kernels.twice(x)
        if self.way == "flag": return x * 2 if kernels.DOUBLED else x
        return (TABLE if self.way == "table" else ALL)["twice"](x)
""",
}


@pytest.fixture
def library(no_captures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library of models, installed in a folder of its own."""
    folder, info = tmp_path / "diffusers", tmp_path / "diffusers-1.0.dist-info"
    folder.mkdir(), info.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"diffusers/{name},,\n" for name in FILES))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "diffusers"}
    for name in before:
        del sys.modules[name]
    yield importlib.import_module("diffusers.layers")
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        del sys.modules[name]
    sys.modules.update(before)
    is_library_file.cache_clear()
    _recorded.cache_clear()


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def _named(library: Any, function: Any) -> None:
    library.twice = function


def _of_a_module(library: Any, function: Any) -> None:
    library.kernels.twice = function


def _table(library: Any, function: Any) -> None:
    library.TABLE["twice"] = function


def _registered(library: Any, function: Any) -> None:
    library.ALL.shared["twice"] = function


def _overridden(library: Any, function: Any) -> None:
    library.ALL.own["twice"] = function


def _flag(library: Any, function: Any) -> None:
    library.kernels.DOUBLED = not library.kernels.DOUBLED


Put = Callable[[Any, Any], None]
WAYS = {
    "named": _named, "of a module": _of_a_module, "table": _table, "registered": _registered, "overridden": _overridden,
    "flag": _flag,
}  # fmt: skip


@pytest.mark.parametrize("whose", ["the library's", "the user's"])
@pytest.mark.parametrize("way", WAYS)
def test_another_function_is_put_there(way: str, whose: str, library: Any, no_captures: Any) -> None:
    """Steps have the eager ones' bits, before and after. A function of the library's is captured; a user's runs eagerly."""
    model = nn.Sequential(nn.Linear(6, 4), library.Layer(way))
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0, fused=True), step=lambda m, b: m(b[0]).pow(2).mean())
    for number, (x, _) in enumerate(images(6)):
        if number == 3:
            assert step.opaque_reason is None and no_captures.captures == 1
            WAYS[way](library, library.kernels.once if whose == "the library's" else half)
        want = model(x).pow(2).mean().detach()
        assert torch.equal(step((x,)).detach(), want)
    if whose == "the library's" or way == "flag":
        assert step.opaque_reason is None and no_captures.captures == 2
    else:
        assert "runs half" in (step.opaque_reason or "")
