"""Makes torchvision and torchaudio import beside a CPU build of torch; the Makefile runs it once they are installed.

The wheels of both in the package index are built for CUDA, and what is compiled in them does not load without it. Here they
are installed for their Python code, which transformers and timm import where they find it. torchvision's needs the names of two
operators, which its compiled part would have registered; torchaudio's works without its compiled part, once that is not there.
Where the compiled parts load, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

NAMES = """

if not _has_ops() and not hasattr(torch.ops.torchvision, "nms"):  # by cpu_wheels.py
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def loads(library: Path) -> bool:
    """Whether torch can load what is compiled."""
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True


def main() -> None:
    """Change what does not load."""
    for name in ("torchvision", "torchaudio"):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"{name} is not installed in {sys.prefix}; run make build")
        folder = Path(next(iter(spec.submodule_search_locations)))
        compiled = sorted(folder.glob("_C.so" if name == "torchvision" else "lib/*.so"))
        if all(map(loads, compiled)):
            continue
        if name == "torchaudio":
            for library in compiled:
                library.unlink()
        elif NAMES not in (text := (folder / "extension.py").read_text()):
            (folder / "extension.py").write_text(text + NAMES)


if __name__ == "__main__":
    main()
