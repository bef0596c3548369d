"""A thread beside a lane's: code of the user's runs on it that may have to be given up."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow import _C
from waterflow.errors import JobCancelled
from waterflow.executor.cancel import doing

Around = Callable[[], contextlib.AbstractContextManager[None]]
_local = threading.local()


def current_user_thread() -> UserThread | None:
    """That of the calling thread's job or trial; None where it has no time limit."""
    return getattr(_local, "beside", None)


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any] | None
    threads: int
    denormals: int
    over: threading.Event = field(default_factory=threading.Event)
    returned: Any = None
    error: BaseException | None = None


@doing("in a step")
class UserThread:
    """Runs opaque steps and evaluations of a job with a time limit, while a lane waits; a lane that hangs would hang all.

    Made on the job's own thread, whose work it does not take over. Thread-safe.
    """

    def __init__(self, around: Around) -> None:
        self._around = around  # what it does is done inside of this
        self._owner = threading.get_ident()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._under_way: _Call | None = None
        self._lock = threading.Lock()
        self._begun = self._over = False

    @contextlib.contextmanager
    def here(self) -> Iterator[UserThread]:
        """Inside, what the calling thread makes runs on this one; it ends behind that."""
        _local.beside = self
        try:
            yield self
        finally:
            _local.beside = None
            self._calls.put(None)

    def metered(self, work: Callable[[], Any], gpu: bool = False) -> tuple[Any, int]:
        """What ``work`` returns, and the bytes that it reaches. Raises JobCancelled once it is given up.

        On a GPU, and on the job's own thread, it runs where it is called.
        """
        if gpu or threading.get_ident() == self._owner:
            made: tuple[Any, int] = _C.metered(work, gpu)
            return made
        call = _Call(work, torch.get_num_threads(), _C.denormals_here())
        with self._lock:
            if self._over:
                raise JobCancelled("over its time limit")
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._run, name=threading.current_thread().name, daemon=True).start()
            self._under_way = call
        self._calls.put(call)
        call.over.wait()
        with self._lock:
            self._under_way = None
        if call.error is not None:
            raise call.error
        returned: tuple[Any, int] = call.returned
        return returned

    def give_up(self) -> bool:
        """Whoever waits for it waits no longer. Returns whether anybody did."""
        with self._lock:
            self._over, call = True, self._under_way
        if call is None or call.over.is_set():
            return False
        call.error = JobCancelled("over its time limit")
        call.over.set()
        return True

    def _run(self) -> None:
        threads = None
        while (call := self._calls.get()) is not None:
            returned: Any = None
            error: BaseException | None = None
            try:
                if threads != call.threads:
                    _C.set_threads_here(call.threads)
                    threads = call.threads
                work, call.work = call.work, None
                with self._around():
                    returned = _C.under_denormals(call.denormals, functools.partial(_C.metered, work, False))
            except BaseException as failure:
                error = failure
            work = None
            if self._over:
                return
            call.returned, call.error = returned, error
            call.over.set()
            call = returned = error = None
