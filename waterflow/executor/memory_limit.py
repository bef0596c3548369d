"""Memory limits: reads what users write, asks the machine what is free, and describes what a job claims."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from waterflow.errors import InvalidJobError

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
          "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
DEFAULT_MEMORY = 0.8
# Kept back of a limit, for eager work beside the steps: evaluation, and first steps whose height is not known.
RESERVE_SHARE = 0.05
LEAST_RESERVE = 64 << 20


@dataclass(frozen=True)
class Need:
    """The bytes that a job needs: ``held`` between steps (state and batches), and ``height`` more inside of a step."""

    name: str
    held: int
    height: int

    @property
    def peak(self) -> int:
        """Bytes of the job inside of a step."""
        return self.held + self.height


def needed(jobs: Sequence[Need]) -> int:
    """Return the bytes that jobs need to train together: the sum of ``held``, and the largest ``height``; 0 for no jobs."""
    # One step at a time must be able to end, and then the next: the banker's algorithm needs room for the highest alone.
    return sum(job.held for job in jobs) + max((job.height for job in jobs), default=0)


@dataclass
class Claim:
    """The memory that one job keeps while it is in the engine, and the largest height that its steps reach, in bytes.

    ``owner`` is the thread that claimed it, ``worker`` that thread's number in the engine's virtual clock. Of ``bytes`` the job
    uses ``needed``; the rest is kept free for it by its quota.
    """

    name: str
    owner: int
    worker: int | None
    bytes: int
    height: int
    opportunistic: bool = False
    needed: int = 0
    since: float = 0.0  # seconds on the clock of time.monotonic

    def has(self, needed: int, height: int) -> bool:
        """Return True if it has ``needed`` bytes between steps and a step of ``height`` bytes."""
        return needed <= self.needed and height <= self.height

    @property
    def need(self) -> Need:
        """The claim as a need, to be added to those of other jobs."""
        return Need(self.name, self.bytes, self.height)


def reserve_of(limit: int) -> int:
    """Return the bytes of a memory limit that an engine keeps back from its jobs."""
    return min(max(int(limit * RESERVE_SHARE), LEAST_RESERVE), limit // 4)


def parse_memory(memory: int | float | str | None, available: int | None = None) -> int:
    """Return the bytes of a memory limit: a whole number, a share of ``available`` (a float up to 1.0), or text ("4GiB", "80%").

    Without ``available`` a share is of the machine's free memory. Raises InvalidJobError for anything else.
    """
    if memory is None:
        memory = DEFAULT_MEMORY
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise InvalidJobError(f"memory must be bytes, a share, or text like '4GiB'; got {memory!r}")
    if isinstance(memory, str):
        text = memory.strip().lower()
        with contextlib.suppress(ValueError):
            if text.endswith("%") and 0 < (percent := float(text[:-1])) <= 100:
                return parse_memory(percent / 100, available)
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = text[len(number) :].strip()
        try:
            count = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            raise InvalidJobError(
                f"cannot read {memory!r} as memory; write '4GiB', '800MB', a number of bytes, or a share up to 1 such as '80%'"
            ) from None
        if unit == "" and (not count.is_integer() or ("." in number and count <= 1)):
            return parse_memory(count, available)
        bytes_ = int(count)
    elif isinstance(memory, float) and not math.isfinite(memory):
        raise InvalidJobError(f"a memory limit must be a finite number; got {memory}")
    elif isinstance(memory, float) and memory <= 1.0:
        if memory <= 0:
            raise InvalidJobError(f"a share of the memory must lie in (0, 1]; got {memory}")
        bytes_ = int((available if available is not None else free_memory()) * memory)
    elif isinstance(memory, float) and not memory.is_integer():
        raise InvalidJobError(
            f"a memory limit above 1 is a whole number of bytes; got {memory}: did you mean '{memory:g}GiB'? Write text like that, or a "
            "share in (0, 1]"
        )
    else:
        bytes_ = int(memory)
    if bytes_ >= 1 << 62:
        raise InvalidJobError(f"a memory limit must lie below 4 EiB; got {memory!r}")
    if bytes_ <= 0:
        raise InvalidJobError(f"a memory limit must be positive; got {memory!r}")
    return bytes_


def parse_quota(what: str, quota: int | float | str | None, limit: int | None = None) -> int | None:
    """Return the bytes of a quota given as a number of bytes, text like "4GiB", or a share of the engine's ``limit``.

    Raises InvalidJobError, which names ``what``, for any other value and for a quota above the limit.
    """
    if quota is None:
        return None
    try:
        bytes_ = parse_memory(quota, limit)
    except InvalidJobError:
        raise InvalidJobError(
            f"{what}: quota must be bytes as a whole number, a share in (0, 1] of the memory limit, or text like '4GiB'; got {quota!r}"
        ) from None
    if limit is not None and bytes_ > limit:
        raise InvalidJobError(
            f"{what}: its quota of {bytes_} bytes exceeds the engine's limit of {limit}; lower quota= or raise memory="
        )
    return bytes_


def parse_limit(memory: int | float | str | None, available: int | None = None, least: int = 1 << 12) -> int:
    """Parse a limit as ``parse_memory`` does; raise InvalidJobError for a number below ``least`` that lacks a unit."""
    limit = parse_memory(memory, available)
    number = str(memory).strip()
    if limit < least and number.replace(".", "").isdigit():
        raise InvalidJobError(f"memory={memory!r} is {limit} B; did you mean '{number}GiB'?")
    return limit


def more_than_free(memory: int | float | str | None, limit: int, free: int) -> str | None:
    """Return a warning if ``limit`` exceeds the ``free`` bytes of the device, else None; ``memory`` is what the user wrote."""
    if limit <= free:
        return None
    return (
        f"memory={memory!r} is more than is free here, {free / 2**30:.1f} GiB: jobs that use it all will run out of memory. Pass what "
        "the device has, or a share of what is free, such as memory=0.8"
    )


def parse_recompute(recompute: int | float | str | None) -> int | Literal["auto"] | None:
    """Return the value of ``recompute=``: a height in bytes (from a number or text), "auto", or None.

    Raises InvalidJobError for anything else.
    """
    if recompute is None or recompute == "auto":
        return recompute  # type: ignore[return-value]
    try:
        return parse_memory(recompute)
    except InvalidJobError:
        raise InvalidJobError(
            f"recompute must be 'auto', None, or a step's height in bytes or text like '4GiB'; got {recompute!r}"
        ) from None


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine, or in its control group if that has fewer."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # noqa: SIM117
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            available = min(available, int(limit.read()) - int(used.read()))
    return available
