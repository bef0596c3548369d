"""The stand-in for the CUDA driver, compiled for the tests: what it was asked, and how it is told to misbehave."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
SOURCE = NATIVE / "fake_cuda.cpp"
PAGE = 2 << 20
HELD = ("reservations", "handles", "mappings", "streams", "events", "plain", "contexts", "graphs", "captures")


class FakeCuda:
    """One loaded copy of the stand-in. Each test has its own, so that what one leaves behind troubles no other."""

    def __init__(self, folder: Path) -> None:
        built = Path(os.environ.get("TMPDIR", "/tmp")) / f"fake_cuda_{SOURCE.stat().st_mtime_ns}_{os.getuid()}.so"
        if not built.exists():
            fresh = built.with_suffix(f".{os.getpid()}")
            command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", SOURCE, "-o", fresh]
            subprocess.run([str(part) for part in command], check=True)
            fresh.rename(built)
        self.path = str(folder / "libfake_cuda.so")
        Path(self.path).write_bytes(built.read_bytes())
        self.library = ctypes.CDLL(self.path)
        for name, arguments, result in [
            ("fake_memory", [ctypes.c_size_t], None),
            ("fake_used", [], ctypes.c_size_t),
            ("fake_fail", [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int], None),
            ("fake_count", [ctypes.c_char_p], ctypes.c_int64),
            ("fake_stall", [ctypes.c_void_p, ctypes.c_int], None),
            ("fake_reuse_streams", [ctypes.c_int], None),
            ("fake_calls", [], ctypes.c_char_p),
            ("fake_forget_calls", [], None),
            ("fake_held", [ctypes.c_int], ctypes.c_int64),
        ]:
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, result

    def memory(self, count: int) -> None:
        """The device has so many bytes."""
        self.library.fake_memory(count)

    @property
    def used(self) -> int:
        return int(self.library.fake_used())

    def fail(self, name: str, nth: int = 1, code: int = 999) -> None:
        """The n-th call of ``name`` from now on fails."""
        self.library.fake_fail(name.encode(), nth, code)

    def count(self, name: str) -> int:
        return int(self.library.fake_count(name.encode()))

    def stall(self, stream: int, on: bool = True) -> None:
        """The stream with this handle does nothing more until it is told to."""
        self.library.fake_stall(stream, on)

    def reuse_streams(self) -> None:
        """Handles of streams come back, as drivers do it."""
        self.library.fake_reuse_streams(1)

    def calls(self) -> list[str]:
        return str(self.library.fake_calls().decode()).splitlines()

    def forget_calls(self) -> None:
        self.library.fake_forget_calls()

    def held(self) -> dict[str, int]:
        """What is held and not zero."""
        held = {name: int(self.library.fake_held(index)) for index, name in enumerate(HELD)}
        return {name: count for name, count in held.items() if count}

    def new_stream(self) -> int:
        """A stream that somebody else makes, as torch does; its handle."""
        before, handle = ctypes.c_void_p(), ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(before))
        self.library.cuInit(0)
        self.library.cuCtxSetCurrent(ctypes.c_void_p(0xC0))
        assert self.library.cuStreamCreate(ctypes.byref(handle), 1) == 0
        self.library.cuCtxSetCurrent(before)
        return int(handle.value or 0)

    def destroy_stream(self, handle: int) -> None:
        assert self.library.cuStreamDestroy_v2(ctypes.c_void_p(handle)) == 0
