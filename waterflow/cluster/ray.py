"""Devices of a Ray cluster: an actor for each. The only file that imports Ray, and only when a backend is made.

Two traps of Ray 2.60. With an address of 127.0.0.1 it takes the machine's other address all the same, and then either listens
on all interfaces or waits for ever for a node that cannot be reached, unless ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` says, on
Linux too, that there is no cluster beyond this machine. Processes of actors run at a lower system priority (niceness 15)
unless ``worker_niceness`` is 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import DeviceState, Request
from waterflow.cluster.device_actor import DeviceActor
from waterflow.cluster.losses import Silence
from waterflow.cluster.nodes import OwnNodes
from waterflow.cluster.ray_share import RayEnvironment, RayShare
from waterflow.cluster.worker import BEAT_SECONDS, WorkerSettings
from waterflow.errors import BackendError

logger = logging.getLogger("waterflow")

READY_SECONDS = 120.0  # for all actors to begin
RETRY_SECONDS = 0.2  # before another call to an actor that is being restarted
NODES_SECONDS = 5.0  # between two searches for new nodes of Ray
LOOPBACK = ("127.", "localhost", "[::1]", "::1")


@dataclass
class _Actor:
    """One device, as its backend knows it."""

    node: str
    handle: Any
    state: DeviceState | None = None  # the newest one of its process now
    version: int = -1  # of that state
    answer: Any = None  # the reference to the pending answer
    silence: Silence = field(default_factory=Silence)
    again: float = 0.0  # the time of the next call, after one that failed


class RayBackend(OwnNodes):
    """A ``Backend`` over the devices of a Ray cluster: each is a node, ``device-0``, ``device-1``, ...

    Ray reserves for each device what it trains on; see ``RayShare``. ``address`` is that of a running cluster, ``host:port``.
    ``folder`` is shared by all nodes. ``token`` is the file with the cluster's token; a cluster beyond this machine needs one
    (or ``RAY_AUTH_TOKEN`` or ``RAY_AUTH_TOKEN_PATH``). ``settings``, ``cores`` and ``silent_seconds`` are as in
    ``LocalBackend``. With ``outlive`` above 0 the actors are detached: after this process has ended they stay for so many
    seconds, 10 at least, and a backend with the same folder and address takes them over.

    Raises BackendError if there is no such device, no token, or no answer.
    """

    def __init__(
        self,
        address: str,
        folder: str | Path | None = None,
        *,
        devices: int | None = None,
        settings: WorkerSettings = WorkerSettings(),  # noqa: B008
        cores: Sequence[Iterable[int]] | None = None,
        silent_seconds: float = 5.0,
        outlive: float = 0.0,
        token: str | Path | None = None,
    ) -> None:
        super().__init__(folder)
        self._cores = [tuple(c) for c in cores] if cores is not None else None
        self._silent, self._outlive, self._devices = silent_seconds, outlive, devices
        self._namespace = "waterflow-" + hashlib.sha256(str(self.folder.path).encode()).hexdigest()[:12]
        self._session = self.folder.new_session()
        self._actors: dict[str, _Actor] = {}
        self._next_look = 0.0
        self._environment: RayEnvironment | None = None
        self._ray: Any = None
        self._share = RayShare(settings, self._cores)
        try:
            given, loopback = Path(token) if token is not None else None, address.startswith(LOOPBACK)
            self._environment = RayEnvironment(given, loopback)
            self._ray = _connected(address, given, self._namespace, loopback)
            self._await_all()
        except BaseException:
            self.close()
            raise

    def process(self, node: str) -> int:
        """Return the process id of a node, on its machine."""
        state = self._actors[node].state
        return state.pid if state is not None else 0

    # -- Nodes

    def _send(self, node: str, first: int, requests: Sequence[Request]) -> None:
        actor = self._actors[node]
        if actor.state is not None:
            actor.handle.request.remote(actor.state.epoch, self._session, first, list(requests))

    def end_process(self, node: str, epoch: int, why: str) -> None:
        """See ``Backend``."""
        with self._guard:
            actor = self._actors[node]
            if actor.state is not None and actor.state.epoch == epoch:
                self._end(actor, why)

    def _listen(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._closed:
            self._look_for_devices()
            self._look_after()
            left = deadline - time.monotonic()
            if self._heard or left <= 0:
                return
            answers = [actor.answer for actor in self._actors.values() if actor.answer is not None]
            if answers:
                self._ray.wait(answers, timeout=min(left, 0.1), fetch_local=False)
            else:
                time.sleep(min(left, 0.1))

    # -- actors

    def _look_after(self) -> None:
        for actor in self._actors.values():
            with self._guard:
                if actor.answer is None and time.monotonic() >= actor.again:
                    self._ask_for_news(actor)
                elif actor.answer is not None and self._ray.wait([actor.answer], timeout=0)[0]:
                    self._hear(actor)
                if actor.silence.passed() > self._silent and actor.state is not None:
                    self._end(actor, f"its process was silent for {self._silent:g} s")

    def _ask_for_news(self, actor: _Actor) -> None:
        epoch = actor.state.epoch if actor.state is not None else 0
        # One pending call for each actor, which waits for news on the actor's side.
        actor.answer = actor.handle.news.remote(epoch, self._session, actor.version, BEAT_SECONDS)

    def _hear(self, actor: _Actor) -> None:
        answer, actor.answer = actor.answer, None
        try:
            actor.version, state = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            actor.again = time.monotonic() + RETRY_SECONDS
            if actor.state is not None:
                self._end(actor, f"its process ended: {str(error).splitlines()[0]}")
            return
        actor.silence.broken()
        if actor.state is not None and state.epoch == actor.state.epoch:
            actor.state = state
            self._told(state)
        elif not self.folder.is_fenced(state.epoch):
            if actor.state is not None:
                self._end(actor, "its process was replaced by another one")
            actor.state = state
            self._joined(state)
        self._ask_for_news(actor)

    def _end(self, actor: _Actor, why: str) -> None:
        assert actor.state is not None
        state, actor.state = actor.state, None
        logger.warning("node %r, epoch %d, is lost: %s", actor.node, state.epoch, why)
        self._lost(actor.node, state.epoch, why)
        self._kill(actor, state)
        if actor.answer is not None:  # a fenced process may take for ever to answer
            actor.answer, actor.again = None, time.monotonic() + RETRY_SECONDS

    def _kill(self, actor: _Actor, state: DeviceState) -> None:
        # Ray's request to end does not reach a process that stands still; SIGKILL does. Ray restarts the actor either
        # way.
        if state.machine == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)
        else:
            self._ray.kill(actor.handle, no_restart=False)

    def _look_for_devices(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + NODES_SECONDS
        room = self._share.room(self._ray.nodes())
        for number in range(len(self._actors), self._devices if self._devices is not None else room):
            node = f"device-{number}"
            self._actors[node] = _Actor(node, self._started(node, number, room))

    def _started(self, node: str, number: int, room: int) -> Any:
        settings = self._share.settings(room)
        if self._cores is not None:
            settings = replace(settings, cores=self._cores[number % len(self._cores)])
        detached = {"name": node, "namespace": self._namespace, "lifetime": "detached", "get_if_exists": True}
        remote = self._ray.remote(
            **self._share.reserved(),
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups={"news": 1, "request": 1},
            **(detached if self._outlive > 0 else {}),
        )
        # A thread for each: requests come in their order, also while news are awaited.
        for name in ("news", "request"):
            self._ray.method(concurrency_group=name)(getattr(DeviceActor, name))
        return remote(DeviceActor).remote(node, str(self.folder.path), settings, self._outlive)

    def _await_all(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        self._look_for_devices()
        if not self._actors:
            raise BackendError(self._share.nothing())
        while any(actor.state is None for actor in self._actors.values()):
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{sum(a.state is None for a in self._actors.values())} of {len(self._actors)} devices of the Ray "
                    f"cluster did not answer within {READY_SECONDS:g} s; see {self.folder.path / 'logs'}"
                )
            self._look_after()
            answers = [actor.answer for actor in self._actors.values() if actor.answer is not None]
            if answers:
                self._ray.wait(answers, timeout=0.1, fetch_local=False)

    def _leave(self, end: bool) -> None:
        for actor in self._actors.values():
            if end:
                self._ray.kill(actor.handle, no_restart=True)
                if actor.state is not None:
                    self.folder.fence(actor.state.epoch)
        if self._ray is not None:
            self._ray.shutdown()
        if self._environment is not None:
            self._environment.put_back()


def end_this_actor() -> None:
    """End this actor's process for good, from any of its threads."""
    ray = load_ray()
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def load_ray() -> Any:
    """Import Ray with the settings that the environment has now. Raises BackendError if it is not installed."""
    # Ray reads the environment when it is imported; it may have been imported before, with other settings.
    try:
        import ray
    except ImportError:
        raise BackendError("RayBackend needs Ray: pip install waterflow[ray]") from None
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return ray


def _connected(address: str, token: Path | None, namespace: str, loopback: bool) -> Any:
    given = token is not None or any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not loopback and not given:
        raise BackendError(
            f"the Ray cluster at {address} is beyond this machine, where a token is needed: pass token=, the file that the "
            "cluster was started with, or set RAY_AUTH_TOKEN_PATH"
        )
    if token is not None and not token.is_file():
        raise BackendError(f"there is no token {token}; give the file that the cluster was started with")
    ray = load_ray()
    if ray.is_initialized():
        raise BackendError("this process uses Ray already; ray.shutdown() first, or start the backend in a process of its own")
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:
        raise BackendError(f"there is no Ray cluster at {address}, or its token is another one: {error}") from error
    return ray
