"""Waterflow's allocator on a GPU: installs it in torch, and replaces torch's functions that report on memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from waterflow import _C
from waterflow.errors import InvalidJobError
from waterflow.units import check_device

logger = logging.getLogger("waterflow")

TOO_LATE = (
    "CUDA was already running in this process when waterflow came to it, so training uses torch's own allocator: memory "
    "of steps is not planned, and fewer jobs fit side by side. To do better call waterflow.allocator.cuda.install() "
    "before the first use of CUDA: before any .cuda(), .to('cuda') or torch.cuda call that asks the device."
)
BENCHMARK = (
    "torch.backends.cudnn.benchmark needs torch's own allocator: it asks that for the largest free block, which "
    "waterflow's memory does not have. Set torch.backends.cudnn.benchmark = False (steps are captured with one choice of "
    "kernels, so there is nothing to gain)."
)

_installed: set[int] = set()  # devices by index
_before: list[tuple[Any, str, Any]] = []  # (module, name, function) of torch's own, to be put back by tests


def install(device: int | torch.device | None = None, limit: int = 0) -> bool:
    """Make waterflow serve torch's requests for GPU memory, for the rest of the process; call it before CUDA starts.

    ``limit`` bounds in bytes the memory that is not planned (0: all that the device has); a second call changes only that.
    Engines bound what they take themselves, beside it.
    Returns False, with a warning, if CUDA runs already: torch's allocator then stays. Raises InvalidJobError without a GPU.
    """
    index = _index(device)
    check_device(f"cuda:{index}")
    if not _installed:
        # torch refuses to change an allocator that is initialized, which starting CUDA does.
        if torch.cuda.is_initialized():
            logger.warning(TOO_LATE)
            return False
        if torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = False
            logger.warning("cudnn.benchmark is switched off: %s", BENCHMARK)
        _C.cuda_device(index)  # raises for a driver that is not sufficient, before anything has changed
        _put_in()
    _C.cuda_pool(index, limit)
    _installed.add(index)
    return True


def installed() -> bool:
    """Return True if waterflow serves torch's requests for GPU memory."""
    return bool(_installed)


def check_settings() -> None:
    """Raise InvalidJobError for settings of torch that do not work with waterflow's allocator."""
    if _installed and torch.backends.cudnn.benchmark:
        raise InvalidJobError(BENCHMARK)


def _put_in() -> None:
    memory = torch.cuda.memory
    hooks = _C.cuda_hooks()
    allocator = memory.CUDAPluggableAllocator(_C.__file__, "waterflow_malloc", "waterflow_free")
    for name in ("waterflow_malloc", "waterflow_free"):
        hooks.pop(name)
    for name, address in hooks.items():
        # Without these record_stream and captured graphs would silently do nothing.
        getattr(allocator.allocator(), name)(address)
    memory.change_current_allocator(allocator)
    replaced = {function.__name__: function for function in REPLACED} | {name: _refuses(name) for name in REFUSED}
    wanted = [(module, name, function) for module in (torch.cuda, memory) for name, function in replaced.items()]
    # Under torch.cuda.synchronize() and torch.accelerator.synchronize(), whoever has imported them.
    waits = {name: getattr(torch._C, name) for name in WAITS if hasattr(torch._C, name)}
    wanted += [(torch._C, name, functools.partial(_C.beside_captures, wait)) for name, wait in waits.items()]
    for module, name, function in wanted:
        if hasattr(module, name):
            _before.append((module, name, getattr(module, name)))
            setattr(module, name, function)


def _put_back() -> None:
    # For tests. torch cannot change its allocator back, so that one stays for the life of the process.
    while _before:
        setattr(*_before.pop())
    _installed.clear()


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        found = torch.device(device).index
        if found is not None:
            return int(found)
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


# -- replacements for functions of torch.cuda, which ask torch's own allocator


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of tensors on the device now, including planned memory."""
    return _C.cuda_stats(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes of tensors at once, since the start or the last reset_peak_memory_stats()."""
    return _C.cuda_stats(_index(device))["peak_allocated"]


def memory_reserved(device: Any = None) -> int:
    """Return the bytes of the device that waterflow has reserved: arenas, device graphs, and the pool for unplanned requests."""
    return _C.cuda_stats(_index(device))["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes of the device that were reserved at once, since the start or the last reset."""
    return _C.cuda_stats(_index(device))["peak_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Set both peaks to the present values."""
    _C.cuda_reset_peaks(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the figures under torch's names, and waterflow's own counts of requests; torch's other names are missing."""
    now = _C.cuda_stats(_index(device))
    return {
        "allocated_bytes.all.current": now["allocated"],
        "allocated_bytes.all.peak": now["peak_allocated"],
        "reserved_bytes.all.current": now["reserved"],
        "reserved_bytes.all.peak": now["peak_reserved"],
        "waterflow.requests.planned": now["planned"],
        "waterflow.requests.graphs": now["pooled"],
        "waterflow.requests.others": now["others"],
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the figures as text and, unless ``abbreviated``, a map of the pool for unplanned requests."""
    lines = [f"{name:34} {value:>16,}" for name, value in memory_stats(device).items()]
    return "\n".join(lines if abbreviated else [*lines, _C.cuda_map(_index(device))])


def empty_cache() -> None:
    """Return free memory of the pools to the devices."""
    for index in _installed:
        _C.cuda_give_back(index)


REPLACED: tuple[Callable[..., Any], ...] = (
    memory_allocated,
    max_memory_allocated,
    memory_reserved,
    max_memory_reserved,
    reset_peak_memory_stats,
    memory_stats,
    memory_summary,
    empty_cache,
)
# A wait for the whole device fails beside a capture in any thread, and spoils it.
WAITS = ("_cuda_synchronize", "_accelerator_synchronizeDevice")
REFUSED = {
    "memory_snapshot": "waterflow.allocator.cuda.memory_summary() shows what is held",
    "memory_stats_as_nested_dict": "waterflow.allocator.cuda.memory_stats() has the figures",
    "reset_accumulated_memory_stats": "only peaks can be reset, by reset_peak_memory_stats()",
    "get_per_process_memory_fraction": "the limit is the engine's: memory= says it",
    "_record_memory_history": "waterflow.allocator.cuda.memory_stats() has the figures",
}


def _refuses(name: str) -> Callable[..., Any]:
    # torch's own functions would report on an allocator that serves nothing.
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name}() asks torch's own allocator, which waterflow's replaces; {REFUSED[name]}.")

    refuse.__name__ = name
    return refuse


# Two steps side by side keep a GPU busy; more lanes only add launches.
DEFAULT_LANES = 2


@dataclass(frozen=True)
class CudaLanes:
    """The device of an engine on a GPU, with its free bytes; ``planned`` if waterflow serves torch's requests for memory."""

    device: torch.device
    free: int
    planned: bool


def prepare(device: torch.device) -> CudaLanes:
    """Install the allocator for ``device``, and ask it for its free bytes. Raises InvalidJobError if it cannot be used."""
    check_settings()
    planned = _index(device) in _installed or install(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return CudaLanes(torch.device("cuda", index), _C.cuda_device(index).free_memory, planned)
