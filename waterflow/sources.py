"""The digest of the C++ sources that the extension was built from."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(package: Path) -> str:
    """Of all C++ sources in the package's folder: ``setup.py`` writes it into the extension, the first import compares it."""
    sources = (path for path in package.glob("*/csrc/**/*.*") if path.suffix in (".cpp", ".h"))
    parts = sorted(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes() for path in sources)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
