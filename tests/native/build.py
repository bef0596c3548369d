"""Builds the tests' own extension where it is not there yet."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

from tests.imports import ROOT

NAME = "waterflow_tests_native"
FOLDER = ROOT / "build" / "native"


def key() -> str:
    """Changes with the sources, with torch, and with Python."""
    found = hashlib.sha256(f"{torch.__version__} {sys.version} {os.environ.get('CXX')}".encode())
    folders = (ROOT / "tests/native", ROOT / "waterflow/allocator/csrc", ROOT / "waterflow/executor/csrc/engine")
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".cpp", ".h") or path.name == "setup.py":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def built() -> Path:
    """The extension's file. One process builds it, others wait. Raises RuntimeError with what the compiler said."""
    folder = FOLDER / key()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            command = [sys.executable, "tests/native/setup.py", "-q", "build_ext", "--build-lib", str(folder)]
            done = subprocess.run(
                [*command, "--build-temp", str(FOLDER / "objects")], cwd=ROOT, capture_output=True, text=True,
                env={**os.environ, "MAX_JOBS": os.environ.get("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))},
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"the tests' extension does not build:\n{done.stdout}{done.stderr}")
            (folder / "done").touch()
    (found,) = folder.glob(f"{NAME}*.so")
    return found


@functools.cache
def load() -> ModuleType:
    """The extension, built if need be."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
