"""A stand-in for a GPU, for torch's CUDA build: its operators are done by the CPU, in the order of streams, as late as may be.

``runtime.cpp`` is the driver and the runtime, ``compute.cpp`` the operators. A process with ``environment()`` sees one GPU of
8 GiB: memory of the device is memory of the host, each operator with a CUDA kernel runs its CPU kernel over the same bytes, and
work is done when somebody waits for it. So a wait that is missing, or memory that goes from hand to hand too early, changes
results. Memory that was given back is filled with NaN. There is no cuDNN, cuBLAS, flash attention or LSTM cell of the GPU's;
efficient attention is there, by plain mathematics.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILT = ROOT / "build" / "standin"
DRIVER, COMPUTE = BUILT / "libcuda.so.1", BUILT / "compute.so"
SOURCES = (HERE / "runtime.cpp", HERE / "compute.cpp", ROOT / "tests/allocator/native/fake_cuda.cpp")


def build() -> None:
    """Compile both libraries for this interpreter's torch, where sources are newer than they are."""
    if all(
        library.exists() and library.stat().st_mtime > max(s.stat().st_mtime for s in SOURCES) for library in (DRIVER, COMPUTE)
    ):
        return
    packages = Path(torch.__file__).parents[1]
    # Torch's wheel brings CUDA's headers without those for compilers, which triton's has.
    headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    headers += [packages / "torch/include", packages / "torch/include/torch/csrc/api/include", ROOT]
    common = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in headers)]
    libraries = [f"-L{packages / 'torch/lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda"]
    BUILT.mkdir(parents=True, exist_ok=True)
    subprocess.run([*common, str(HERE / "runtime.cpp"), "-o", str(DRIVER)], check=True)
    subprocess.run([*common, "-DUSE_CUDA", str(HERE / "compute.cpp"), "-o", str(COMPUTE), *libraries], check=True)


def environment(schedule: str = "late", **others: str) -> dict[str, str]:
    """The variables of a process with the stand-in. ``schedule``: "late", "once", or the number of the stream that comes first."""
    # Products on the CPU have one order of their sums, wherever their operands lie.
    numbers = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    path = os.pathsep.join([str(HERE / "site"), str(ROOT)])
    return {
        **os.environ, **numbers, "PYTHONPATH": path, "STANDIN_SCHEDULE": schedule, "LD_PRELOAD": str(DRIVER),
        "LD_LIBRARY_PATH": str(BUILT), "WATERFLOW_CUDA_LIBRARY": str(DRIVER), **others,
    }  # fmt: skip


def missing() -> str:
    """The operators of the GPU's that have no CPU kernel."""
    code = "import ctypes; f = ctypes.CDLL('compute.so').standin_missing; f.restype = ctypes.c_char_p; print(f().decode())"
    return subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True).stdout.strip()


def install() -> None:
    """Put the operators in the place of torch's, in a process with ``environment()``; each of its interpreters begins so."""
    library = ctypes.CDLL(str(COMPUTE))
    assert library.standin_install() > 1000
    torch.backends.cudnn.enabled = False
    torch.cuda._sleep = lambda cycles: torch.zeros(1, device="cuda")  # as late as all else
    torch.cuda.memory.CUDAPluggableAllocator = lambda *names: _filling(library, *names)  # type: ignore


def _filling(library: ctypes.CDLL, path: str, malloc: str, free: str) -> Any:
    """Waterflow's memory for torch, with NaN in what was given back."""
    made = _Pluggable(str(COMPUTE), "standin_malloc", "standin_free")
    kind, ours = type(made.allocator()), ctypes.CDLL(path)
    tell = kind.set_record_stream_fn

    def record(allocator: Any, address: int) -> None:
        functions = [ctypes.cast(getattr(ours, name), ctypes.c_void_p) for name in (malloc, free)]
        library.standin_memory(*functions, ctypes.c_void_p(address))
        tell(allocator, ctypes.cast(library.standin_record_stream, ctypes.c_void_p).value)

    kind.set_record_stream_fn = record
    return made


_Pluggable = torch.cuda.memory.CUDAPluggableAllocator
