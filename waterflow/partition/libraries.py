"""Which packages are libraries: by what is installed, not by the names of folders."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig

# Known wherever they lie: in a source tree, too, in which they are developed or into which they were copied.
_KNOWN = frozenset({
    "torch", "torchvision", "torchaudio", "torchtext", "torchmetrics", "torch_geometric", "functorch", "torchgen", "triton",
    "transformers", "timm", "diffusers", "peft", "accelerate", "tokenizers", "safetensors", "huggingface_hub", "datasets",
    "einops", "numpy", "scipy", "pandas", "sklearn", "lightning", "pytorch_lightning", "ignite", "optuna", "ray",
    "waterflow", "builtins",
})  # fmt: skip


@functools.lru_cache(maxsize=4096)
def is_library(package: str) -> bool:
    """Whether a top-level package is Python's own, a known library, or belongs to an installed distribution.

    A distribution's record lies beside its packages, in whatever folder. A project that is installed in editable mode has its
    packages elsewhere: it is its user's own code.
    """
    if package == "__main__":
        return False
    if package in _KNOWN or package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    found = [*getattr(module, "__path__", ())] or ([file] if file else [])
    folders = {os.path.realpath(os.path.dirname(os.path.abspath(place))) for place in found}
    return any(folder in _site_folders() or package in _recorded(folder) for folder in folders)


@functools.cache
def _site_folders() -> frozenset[str]:
    """Where this Python's packages are installed."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return frozenset(map(os.path.realpath, [*folders, site.getusersitepackages()]))


@functools.lru_cache(maxsize=1024)
def _recorded(folder: str) -> frozenset[str]:
    """The top-level packages that the records in a folder name."""
    try:
        if not any(name.endswith(".dist-info") for name in os.listdir(folder)):
            return frozenset()
    except OSError:
        return frozenset()
    names = set()
    for distribution in importlib.metadata.distributions(path=[folder]):
        names.update((distribution.read_text("top_level.txt") or "").split())
        for file in distribution.files or ():
            first = file.parts[0]
            names.add(first.partition(".")[0] if len(file.parts) == 1 else first)
    return frozenset(names)
