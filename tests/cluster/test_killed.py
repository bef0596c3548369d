"""A scheduler that dies at any moment, devices whose states and requests are lost, repeated and late, and planted faults."""

from __future__ import annotations

import contextlib
import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_backend import FakeBackend, FakeDevice
from tests.cluster.test_service import Cluster, Killed
from tests.cluster.test_store import check
from waterflow.cluster.backend import DeviceState, Request
from waterflow.cluster.nodes import Nodes
from waterflow.cluster.policies import Fifo, Gandiva, Las
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.reconciler import Reconciler
from waterflow.cluster.service import BusyError, Service
from waterflow.errors import SubmissionError

DEVICES = 3


class Fragile:
    """Lets so many calls to store and backend through, then the process ends."""

    def __init__(self, inside: Any, names: tuple[str, ...], budget: list[int], before: bool) -> None:
        self._inside, self._names, self._budget, self._before = inside, names, budget, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inside, name)
        if name not in self._names:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._budget[0] -= 1
            if self._budget[0] == 0 and self._before:
                raise Killed
            made = value(*args, **kwargs)
            if self._budget[0] == 0:
                raise Killed
            return made

        return call


class Lossy(FakeBackend):
    """States and requests on the way to and from its devices are lost, come twice, or late and in another order."""

    def __init__(self, devices: int, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.lossy = False
        self.late_requests: list[tuple[FakeDevice, int, Sequence[Request]]] = []
        self.late_states: list[DeviceState] = []
        super().__init__(devices, folder)

    def _send(self, node: str, first: int, requests: Sequence[Request]) -> None:
        device = self.devices.get(node)
        if device is None:
            return
        self.late_requests += [(device, first, requests)] * (self.chance.choice([0, 1, 1, 2]) if self.lossy else 1)
        self.deliver()

    def deliver(self) -> None:
        self.chance.shuffle(self.late_requests)
        keep = self.chance.randint(0, 2) if self.lossy else 0
        while len(self.late_requests) > keep:
            device, first, requests = self.late_requests.pop()
            if self.devices.get(device.node) is device:  # the process is alive
                device.request(first, requests)

    def attach_again(self) -> None:
        self.late_requests.clear()
        super().attach_again()

    def _listen(self, timeout: float) -> None:
        self.deliver()
        for device in self.devices.values():
            self.late_states += [device.state()] * (self.chance.choice([0, 1, 2]) if self.lossy else 1)
        self.chance.shuffle(self.late_states)
        keep = self.chance.randint(0, 3) if self.lossy else 0
        while len(self.late_states) > keep:
            self._told(self.late_states.pop())


class Drama:
    """Jobs on a cluster to which anything happens; what must be true is asserted on the way and in the end."""

    def __init__(
        self, folder: Path, seed: int, lossy: bool, monkeypatch: pytest.MonkeyPatch, policy: Callable[[], Policy] = Fifo
    ) -> None:
        self.chance = random.Random(seed)
        self.backend = Lossy(DEVICES, folder, self.chance)
        self.cluster = Cluster(folder, DEVICES, backend=self.backend, policy=policy)
        self.preempts = policy is not Fifo
        # Requests are made again after so many turns as seconds.
        monkeypatch.setattr("waterflow.cluster.nodes.time.monotonic", lambda: self.cluster.time)
        self.backend.lossy = lossy
        self.wanted: list[str] = []
        self.over: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.deaths = 0
        started = self.backend.started

        def start(device: FakeDevice, request: Request) -> None:
            assert request.id not in self.over, f"{request.id} is started after it has {self.over[request.id]}"
            started(device, request)

        monkeypatch.setattr(self.backend, "started", start)

    def act(self, step: int, steps: int) -> None:
        chance, backend, cluster = self.chance, self.backend, self.cluster
        draw = chance.random()
        if draw < 0.25 and step < 3 * steps // 4:
            self.wanted.append(f"job-{len(self.wanted)}")
            cluster.service.submit({"id": self.wanted[-1]}, b"x")
        elif draw < 0.32 and self.wanted:
            id = chance.choice(self.wanted)
            if cluster.store.job(id) is not None:
                self.cancelled.add(id)
                cluster.service.cancel(id)
        elif draw < 0.4:
            node = f"device-{chance.randrange(DEVICES)}"
            backend.lose(node) if node in backend.devices else backend.return_(node)
        elif backend.runs and draw < 0.8:
            id = chance.choice(sorted(backend.runs))
            kind = chance.choice(["begin", "progress", "save", "end"])
            if kind == "begin":
                backend.begin(id)
            elif kind != "end":
                getattr(backend, kind)(id, step)
            elif id not in backend.stopping:
                self.end(id)
        else:
            backend.obey()

    def end(self, id: str) -> None:
        self.over[id] = "completed"
        self.backend.end(id)

    def nobody_is_stopped_in_vain(self) -> None:
        for id, suspend in self.backend.stopping.items():
            assert id in self.cancelled or (suspend and self.preempts), f"{id} is to stop, and nobody cancelled it"

    def play(self, steps: int = 120) -> None:
        chance, cluster = self.chance, self.cluster
        for step in range(steps):
            budget = [chance.choice([0, 0, chance.randint(1, 12)])]
            before = chance.random() < 0.5
            service = cluster.service
            service.backend = service.jobs.backend = Fragile(self.backend, ("request", "listen", "nodes"), budget, before)  # type: ignore[assignment]
            writing = Fragile(cluster.store, ("change", "place", "set_meta", "say", "add", "write_entry"), budget, before)
            service.store = service.jobs.store = writing  # type: ignore[assignment]
            runs = set(self.backend.runs)
            try:
                cluster.time += 1.0
                states = service.backend.listen(0.0)  # users come in between
                self.act(step, steps)
                with service._turn(states):
                    pass
                self.act(step, steps)
                service.turn(0.0)
            except Killed:
                self.deaths += 1
                runs &= set(self.backend.runs)
                cluster.kill()
                assert runs <= set(self.backend.runs), "a restart touched what ran"
            except (SubmissionError, BusyError):
                pass
            self.nobody_is_stopped_in_vain()
            service = cluster.service
            service.backend = service.jobs.backend = self.backend
            service.store = service.jobs.store = cluster.store
            cluster.rows_are_the_book()
            self.ask_again()
        self.come_to_an_end()

    def ask_again(self) -> None:
        """Whoever got no answer does."""
        for id in self.wanted:
            if self.cluster.store.job(id) is None:
                with contextlib.suppress(BusyError):
                    self.cluster.service.submit({"id": id}, b"x")

    def come_to_an_end(self) -> None:
        backend, cluster = self.backend, self.cluster
        for node in sorted(set(backend.known) - set(backend.devices)):
            backend.return_(node)
        for turn in range(120):
            backend.lossy &= turn < 60
            self.ask_again()
            backend.obey()
            for id in sorted(backend.runs):
                if id not in backend.stopping:
                    self.end(id)
            cluster.turn()
            self.nobody_is_stopped_in_vain()
        assert set(cluster.states()) == set(self.wanted)
        for id, state in cluster.states().items():
            assert state in ("completed", "cancelled", "failed"), f"{id} is {state} for ever"
            assert state != "cancelled" or id in self.cancelled
            assert state != "completed" or self.over[id] == "completed"
        assert not backend.runs and all(not device.parts for device in backend.devices.values()), "what is over is not forgotten"
        check(cluster.store)


@pytest.mark.parametrize(
    "policy", [Fifo, partial(Las, limits=(3.0, 9.0)), partial(Gandiva, quantum=3.0)], ids=["fifo", "las", "gandiva"]
)
@pytest.mark.parametrize("lossy", [False, True], ids=["scheduler", "and devices"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 70))])
def test_killed_at_any_moment(
    tmp_path: Path, seed: int, lossy: bool, policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it dies: no job is lost, none runs twice at a time, none again after its end, none that runs is touched."""
    drama = Drama(tmp_path, seed, lossy, monkeypatch, policy)
    drama.play()
    assert drama.deaths > 3
    drama.cluster.store.close()


def mutated(function: Callable[..., Any], old: str, new: str) -> Any:
    """The function with another text."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is not once in {function.__qualname__}"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, made)
    return made[function.__name__]


MUTANTS: dict[str, tuple[type, str, str, str]] = {
    "no check of epochs": (Nodes, "_told", "or node.epoch != state.epoch", "or False"),
    "an answer before the commit": (
        Service, "_turn", "self._write_book()\n",
        "self._write_book(), [ask() for ask in asks], asks.clear()\n",
    ),
    "a double start": (Reconciler, "settle", "for id in wanted if id not in placed", "for id in wanted"),
    "a lost node that is not told": (Reconciler, "see", "self._node_lost(name, epoch, blame)", "pass"),
    "a request that is not repeated": (Nodes, "listen", "if requests.pending and", "if False and"),
}  # fmt: skip
SOONEST = {"an answer before the commit": 14}  # the seed that finds it at once, tried first


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method, old, new = MUTANTS[name]
    monkeypatch.setattr(kind, method, mutated(getattr(kind, method), old, new))
    for seed in sorted(range(40), key=lambda seed: seed != SOONEST.get(name)):
        (tmp_path / str(seed)).mkdir()
        try:
            with monkeypatch.context() as here:
                Drama(tmp_path / str(seed), seed, True, here).play()
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return
    raise AssertionError(f"{name}: found by none of 40 seeds")
