"""Link: a member's connection to the process that called ``train``, which says who is a member, and its groups of members."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from waterflow.errors import CheckpointError, told
from waterflow.job import JobResult
from waterflow.results import pack_result
from waterflow.training.runner import JobRunner
from waterflow.training.safepoint import JobEnded
from waterflow.training.shards.group import Group, MemberLost

BEAT_SECONDS = 0.1
LOOK_AGAIN = 0.05


class Left(Exception):
    """The member is not in the next group: its device was taken from the job."""


class Link:
    """Messages between one member and the caller. Its own threads receive them, build groups, and tell that the process runs.

    ``longest`` is the longest time of the job's steps so far, in seconds; a process that is silent for much longer stands still.
    """

    def __init__(self, connection: Connection, member: int, port: int, device: torch.device) -> None:
        self._connection, self.member, self._port, self._device = connection, member, port, device
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._members: dict[int, list[int]] = {}  # by epoch
        self._built: dict[int, Group] = {}
        self._go = -1  # the newest epoch that all of its members have built
        self._answers: dict[int, Any] = {}
        self.longest, self.epoch = 0.0, -1  # the latter is the present group's
        self.runner: JobRunner | None = None
        self._result: tuple[Any, ...] = ()
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send a message to the caller; nothing if it is gone, as this process then ends."""
        with self._sending:
            try:
                self._connection.send_bytes(pickle.dumps(message))  # not send(), with which torch shares tensors' memory
            except OSError:
                os._exit(1)

    def ask(self, number: int, *message: Any) -> Any:
        """Send a message, and return the caller's answer with this number."""
        self.tell(*message)
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers)
            return self._answers[number]

    def wants_change(self) -> bool:
        """Return True if the members of a newer group are ready to enter it."""
        return self._go > self.epoch

    def next_group(self, check: Callable[[], None]) -> Group:
        """Wait for a newer group than the present one, and enter it. Raises Left, and what ``check`` raises meanwhile."""
        while True:
            with self._changed:
                newest = max(self._members, default=-1)
                if newest > self.epoch and self.member not in self._members[newest]:
                    raise Left
                if newest > self.epoch and newest in self._built:
                    self.epoch, group = newest, self._built.pop(newest)
                    self._built.clear()  # members that have entered an older one see that nobody comes
                    return group
                self._changed.wait(LOOK_AGAIN)
            check()

    def lost(self, error: BaseException) -> None:
        """Tell that the present group has failed, and drop what ``error`` holds of it: that closes its connections."""
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.tell("lost", self.epoch, str(error))

    def finish(self, result: JobResult, spent: Mapping[str, float]) -> None:
        """Tell that the job has ended; wait until the caller, which asks one member for the result, ends this process."""
        self._result = pack_result(result), spent
        self.tell("done", result.status, "" if result.error is None else told(result.error))
        threading.Event().wait()

    # -- the threads

    def _receive(self) -> None:
        while True:
            try:
                what, *given = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            if what == "members":
                self._note_members(*given)
            elif what == "go":
                self._go = given[0]
            elif what == "answer":
                with self._changed:
                    self._answers[given[0]] = given[1]
                    self._changed.notify_all()
            elif what == "copy" and self.runner is not None:
                self.runner.ask_for_snapshot().add_done_callback(self._send_copy)
            elif what == "stop" and self.runner is not None:
                self.runner.stop(given[0])
            elif what == "result":
                self.tell("result", *self._result)
            elif what == "end":
                os._exit(0)

    def _note_members(self, epoch: int, members: list[int]) -> None:
        with self._changed:
            self._members[epoch] = members
            self._changed.notify_all()
        if self.member in members:
            threading.Thread(target=self._build, args=(epoch, members), daemon=True).start()

    def _build(self, epoch: int, members: list[int]) -> None:
        try:
            group = Group(self._port, epoch, members.index(self.member), len(members), self._device)
        except MemberLost:  # it has died meanwhile: a newer epoch without it comes
            return
        with self._changed:
            if epoch > self.epoch:
                self._built[epoch] = group
            self._changed.notify_all()
        self.tell("ready", epoch)

    def _send_copy(self, made: Any) -> None:
        # On a thread of its own: the job's thread goes on meanwhile.
        error = made.exception()
        if not isinstance(error, JobEnded | None):
            error = CheckpointError(told(error))  # the user's own may not be sent
        threading.Thread(target=self._tell_copy, args=(made, error), daemon=True).start()

    def _tell_copy(self, made: Any, error: BaseException | None) -> None:
        try:
            self.tell("copy", None if error is not None else made.result(), error)
        except Exception as why:
            self.tell("copy", None, CheckpointError(f"state of the job cannot be sent to another process: {why}"))

    def _beat(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            self.tell("beat", self.runner.steps if self.runner is not None else 0, self.longest)
            time.sleep(BEAT_SECONDS)
        os._exit(1)  # the caller has died
