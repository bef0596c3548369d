"""The digest of the C++ sources that the extension was built from."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(package: Path) -> str:
    """Of all C++ sources in the package's folder: ``setup.py`` writes it into the extension, the first import compares it."""
    parts = (f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes() for path in package.glob("*/csrc/**/*.*"))
    return hashlib.sha256(b"\0".join(sorted(parts))).hexdigest()[:16]
