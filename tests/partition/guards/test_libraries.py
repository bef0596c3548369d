"""What is a library's is not looked into, wherever the library lies; what is the user's own is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from tests.support import compare, images
from waterflow.partition.guards.code_refs import _recorded, is_library_file, is_library_module

SOURCE = """
import torch

class Link:
    def __init__(self, after): self.after = after

chain = None
for _ in range(5000):
    chain = Link(chain)

def scaled(x):
    return x * (2.0 if chain is not None else 1.0)

class Scale(torch.nn.Module):
    def forward(self, x):
        return scaled(x)
"""
MODULES: list[str] = []


@pytest.fixture
def _afresh(no_captures: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    MODULES.clear()
    is_library_file.cache_clear()
    _recorded.cache_clear()


def installed(folder: Path, name: str, *, recorded: bool, package: bool = True) -> ModuleType:
    """A library in a folder of its own, as ``pip install --target`` leaves it; or the same without its record."""
    file = folder / name / "__init__.py" if package else folder / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SOURCE)
    if recorded:
        info = folder / f"{name}_of_somebody-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-of-somebody\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{file.relative_to(folder)},,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        MODULES.append(name)
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def making(library: Any) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        made = nn.Sequential(nn.Linear(6, 8), library.Scale(), nn.Linear(8, 4))
        return made, SGD(made.parameters(), lr=0.05, fused=True)

    return make


@pytest.mark.parametrize("package", [True, False], ids=["package", "module"])
def test_a_library_in_a_folder_of_its_own(package: bool, tmp_path: Path, _afresh: None) -> None:
    library: Any = installed(tmp_path / "vendor", "some_library", recorded=True, package=package)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(library.scaled(model(batch[0])), batch[1])

    compare(making(library), images(3), step=step)


def test_what_nobody_has_installed_is_looked_into(tmp_path: Path, _afresh: None) -> None:
    """Too deeply for Python: then the step runs eagerly."""
    installed(tmp_path / "both", "other_library", recorded=True)
    own: Any = installed(tmp_path / "both", "own_module", recorded=False)
    assert is_library_module("other_library") and not is_library_module("own_module")
    compare(making(own), images(3), opaque="RecursionError")


def test_which_packages_are_libraries() -> None:
    names = "torch numpy os abc math builtins waterflow pytest _pytest hypothesis torch.ops torch._C._nn _frozen_importlib typing"
    for name in names.split():
        assert is_library_module(name), name
    for name in ("__main__", "tests", "benchmarks", "there_is_no_such_module"):
        assert not is_library_module(name), name
