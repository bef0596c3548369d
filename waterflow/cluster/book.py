"""The state that a scheduler and its policy share: submissions, devices, quotas. No clock: times are passed in, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from waterflow.cluster.devices import Device, Devices
from waterflow.cluster.submission import Action, Move, Node, Place, Priority, Resize, SetPriority, Start, Stop, Submission, Tenant

State = Literal["waiting", "running", "ended"]


class Entry:
    """A submission in the book, until it ends.

    ``service`` (device-seconds), ``on_devices`` (seconds) and ``done`` (seconds of its duration) are what it got up to
    ``since``; ``service_at`` and ``ran_at`` add what came after. ``rate`` is its speed relative to running alone on the
    devices asked for, None while that is not known. ``order`` counts submissions, ``entered`` the times that any entry came onto
    devices, at its last. ``key`` belongs to the policy, and has JSON types. An entry with ``alone`` shares devices with no other.
    ``held_at`` is where it waits with all that it has, None where it has nothing anywhere.
    """

    __slots__ = (
        "_changed",
        "_key",
        "alone",
        "devices",
        "done",
        "entered",
        "held_at",
        "id",
        "memory",
        "on_devices",
        "order",
        "preemptions",
        "priority",
        "rate",
        "reserved",
        "service",
        "since",
        "state",
        "submission",
        "tenant",
        "utilization",
        "waiting_since",
        "wanted",
    )

    def __init__(self, submission: Submission, order: int, now: float, changed: set[str]) -> None:
        self.submission = submission
        self.id = submission.id
        self.tenant = submission.tenant
        self.wanted = submission.devices
        self.order = order
        self.priority: Priority = submission.priority
        self.state: State = "waiting"
        self.alone = False
        self.devices: list[Device] = []
        self.reserved: list[Device] = []
        self.waiting_since = now
        self.since = now
        self.service = 0.0
        self.on_devices = 0.0
        self.done = 0.0
        self.rate: float | None = None
        self.held_at: Place | None = None
        self.entered = 0
        self.preemptions = 0
        self.utilization: float | None = None
        self.memory = submission.memory
        self._key: Any = None
        self._changed = changed  # the book's

    @property
    def key(self) -> Any:
        """The policy's notes on it."""
        return self._key

    @key.setter
    def key(self, key: Any) -> None:
        self._key = key
        self._changed.add(self.id)

    @property
    def places(self) -> tuple[Place, ...]:
        """The devices that it runs on, as (node, index); empty while it waits."""
        return tuple([device.place for device in self.devices])

    def account(self, now: float) -> None:
        """Add the service, time and progress since the last call to its totals."""
        if self.state == "running":
            seconds = now - self.since
            self.service += seconds * len(self.devices)
            self.on_devices += seconds
            self.done += seconds * self._speed
        self.since = now

    def service_at(self, now: float) -> float:
        """Return the device-seconds that it got until ``now``."""
        return self.service + (now - self.since) * len(self.devices)

    def ran_at(self, now: float) -> float:
        """Return the seconds that it ran until ``now``."""
        return self.on_devices + (now - self.since) if self.state == "running" else self.on_devices

    def remaining_at(self, now: float) -> float:
        """Return the seconds that it still takes alone on the devices asked for.

        Raises ValueError if its duration is not known.
        """
        duration = self.submission.duration
        if duration is None:
            raise ValueError(
                f"submission {self.id!r} has no duration, and the policy orders by it; use las, or set the submission's duration"
            )
        return duration - (self.done + (now - self.since) * self._speed if self.state == "running" else self.done)

    @property
    def _speed(self) -> float:
        return 1.0 if self.rate is None else self.rate

    def columns(self) -> dict[str, Any]:
        """Return what its row keeps of it, beside the submission and the order: JSON types, for ``Book.put_back``."""
        return {name: getattr(self, name) for name in _PLAIN} | {
            "places": self.places,
            "reserved": [device.place for device in self.reserved],
        }

    def __repr__(self) -> str:
        return f"Entry({self.id!r}, {self.state}, {self.priority}, {self.places})"


_PLAIN = (
    "priority", "alone", "waiting_since", "since", "service", "on_devices", "done", "rate", "preemptions", "utilization",
    "memory", "entered", "key",
)  # fmt: skip
COLUMNS = (*_PLAIN, "places", "reserved")  # of ``Entry.columns``


class Book:
    """Entries, devices, reservations and quotas. A policy changes the book by its operations; each appends its action.

    Without tenants any tenant may submit, and quotas do not bind. ``changed`` are the ids of entries whose ``columns``
    may have changed, or that have left the book, since its owner emptied it.
    """

    def __init__(self, nodes: Iterable[Node], tenants: Sequence[Tenant] = ()) -> None:
        self.devices = Devices(nodes)
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.held: dict[str, int] = dict.fromkeys(self.tenants, 0)  # devices of guaranteed runs and reservations
        self.entries: dict[str, Entry] = {}
        self.changed: set[str] = set()
        self.entered = 0  # how often an entry came onto devices
        self.occupied = 0  # devices with anybody on them
        self.actions: list[Action] = []
        self.now = 0.0

    # -- queries of policies

    def quota_left(self, tenant: str) -> int:
        """Return how many devices guaranteed submissions of a tenant may still take or reserve."""
        if not self.tenants:
            return self.devices.total
        return self.tenants[tenant].quota - self.held[tenant]

    def may_hold(self, entry: Entry, devices: int) -> bool:
        """Return whether its tenant's quota allows an entry ``devices`` devices in all."""
        if not self.tenants:
            return True
        # An entry's reservations and guaranteed devices count against the quota already.
        mine = len(entry.reserved) + (len(entry.devices) if entry.priority == "guaranteed" else 0)
        return devices - mine <= self.quota_left(entry.tenant)

    # -- operations of policies

    def start(self, entry: Entry, devices: list[Device], priority: Priority | None = None) -> None:
        """Run a waiting entry on ``devices``.

        Its reservations are given back. Raises ValueError if a device or the quota is not free.
        """
        if entry.state != "waiting":
            raise ValueError(f"{entry.id!r} is {entry.state}; only a waiting submission can be started")
        if entry.reserved:
            self.unreserve(entry)
        entry.priority = priority or entry.priority
        self._enter(entry, devices)
        entry.since = self.now
        entry.state = "running"
        self.actions.append(Start(entry.id, entry.places, entry.priority))

    def stop(self, entry: Entry, suspend: bool = True) -> None:
        """Take a running entry from its devices; it waits again. ``suspend`` keeps its state."""
        self._expect_running(entry)
        entry.account(self.now)
        self._leave(entry)
        entry.state = "waiting"
        # It may have run as opportunistic beyond its quota; it waits as what it was submitted as.
        entry.priority = entry.submission.priority
        entry.waiting_since = self.now
        entry.preemptions += 1
        self.actions.append(Stop(entry.id, suspend))

    def move(self, entry: Entry, devices: list[Device]) -> None:
        """Move a running entry to other devices, as many as it has."""
        self._replace(entry, devices)
        self.actions.append(Move(entry.id, entry.places))

    def resize(self, entry: Entry, devices: list[Device]) -> None:
        """Give a running entry more or fewer devices; ``devices`` are all that it has from now on."""
        self._replace(entry, devices)
        self.actions.append(Resize(entry.id, entry.places))

    def set_priority(self, entry: Entry, priority: Priority) -> None:
        """Change the priority of a running entry.

        Raises ValueError unless a new guaranteed one has quota and its devices alone.
        """
        self._expect_running(entry)
        if priority == entry.priority:
            return
        # Leave and enter again: both keep the counts by priority, and a refusal restores the entry as it was.
        devices, before = entry.devices, entry.priority
        self._leave(entry)
        entry.priority = priority
        try:
            self._enter(entry, devices)
        except ValueError:
            entry.priority = before
            self._enter(entry, devices)
            raise
        self.actions.append(SetPriority(entry.id, priority))

    def reserve(self, entry: Entry, devices: Sequence[Device]) -> None:
        """Keep free devices for a waiting guaranteed entry; opportunistic ones may run there meanwhile."""
        if entry.state != "waiting" or entry.submission.priority != "guaranteed":
            raise ValueError(f"{entry.id!r} is {entry.priority} and {entry.state}; reservations are for waiting guaranteed ones")
        self._claim_quota(entry, len(devices))
        self.devices.take(devices)
        for device in devices:
            device.reserved = entry
        entry.reserved.extend(devices)
        self.changed.add(entry.id)

    def unreserve(self, entry: Entry) -> None:
        """Give back all devices that an entry has reserved."""
        for device in entry.reserved:
            device.reserved = None
        self.devices.give(entry.reserved)
        self._return_quota(entry, len(entry.reserved))
        entry.reserved = []
        self.changed.add(entry.id)

    # -- operations of the scheduler

    def add(self, submission: Submission, order: int) -> Entry:
        """Add a waiting entry for ``submission``, and return it."""
        entry = self.entries[submission.id] = Entry(submission, order, self.now, self.changed)
        self.changed.add(entry.id)
        return entry

    def put_back(self, rows: Iterable[tuple[Submission, int, Mapping[str, Any]]]) -> None:
        """Add the entries of rows, (submission, order, ``Entry.columns``), to a book without any, on the same devices."""
        read = [(self.add(submission, order), columns) for submission, order, columns in sorted(rows, key=itemgetter(1))]
        # In the order in which they came onto their devices, as policies look at them in this order.
        for entry, columns in sorted(read, key=lambda pair: pair[1]["entered"]):
            for name in _PLAIN:
                setattr(entry, name, columns[name])
            if columns["places"]:
                entry.state = "running"
                self._enter(entry, [self.devices.at((node, index)) for node, index in columns["places"]])
                entry.entered = columns["entered"]
            if columns["reserved"]:
                self.reserve(entry, [self.devices.at((node, index)) for node, index in columns["reserved"]])
        self.entered = max((entry.entered for entry, _ in read), default=0)
        self.changed.clear()

    def remove(self, entry: Entry) -> None:
        """Remove an entry that ended, running or waiting; its devices and reservations are free again."""
        entry.account(self.now)
        if entry.state == "running":
            self._leave(entry)
        if entry.reserved:
            self.unreserve(entry)
        entry.state = "ended"
        del self.entries[entry.id]
        self.changed.add(entry.id)

    def check(self) -> None:
        """Walk the whole book; raise AssertionError if two parts of it contradict each other."""
        self.devices.check()
        held = dict.fromkeys(self.held, 0)
        for entry in self.entries.values():
            assert (entry.state == "running") == bool(entry.devices), f"{entry} runs nowhere, or waits somewhere"
            for device in entry.devices:
                place = device.guaranteed is entry if entry.priority == "guaranteed" else entry.id in device.opportunistic
                assert place, f"{entry} and {device} do not agree"
            for device in entry.reserved:
                assert device.reserved is entry, f"{entry} reserved {device}, which is not kept for it"
            if self.tenants:
                held[entry.tenant] += len(entry.reserved) + len(entry.devices) * (entry.priority == "guaranteed")
        assert held == self.held, f"devices held by tenant: {held}, counted {self.held}"
        for tenant in self.tenants.values():
            assert held[tenant.name] <= tenant.quota, f"{tenant} has {held[tenant.name]} devices"
        for device in self.devices:
            alone = [entry.id for entry in device.residents if entry.alone]
            assert not alone or len(device.residents) == 1, f"{device} is shared, and {alone} run alone"
        assert self.occupied == sum(bool(device.residents) for device in self.devices)
        for device in self.devices:
            for entry in [*device.residents, *([device.reserved] if device.reserved else [])]:
                assert self.entries.get(entry.id) is entry, f"{device} runs {entry}, which is not in the book"

    # -- parts

    def _expect_running(self, entry: Entry) -> None:
        if entry.state != "running":
            raise ValueError(f"{entry.id!r} is {entry.state}; this needs a running submission")

    def _replace(self, entry: Entry, devices: list[Device]) -> None:
        self._expect_running(entry)
        entry.account(self.now)
        before = entry.devices
        self._leave(entry)
        try:
            self._enter(entry, devices)
        except ValueError:
            self._enter(entry, before)
            raise

    def _claim_quota(self, entry: Entry, devices: int) -> None:
        if not self.tenants:
            return
        if devices > self.quota_left(entry.tenant):
            raise ValueError(
                f"{entry.id!r} takes {devices} devices; of the quota of {entry.tenant!r} "
                f"({self.tenants[entry.tenant].quota}) {self.quota_left(entry.tenant)} are left"
            )
        self.held[entry.tenant] += devices

    def _return_quota(self, entry: Entry, devices: int) -> None:
        if self.tenants:
            self.held[entry.tenant] -= devices

    def _enter(self, entry: Entry, devices: list[Device]) -> None:
        for device in devices:
            if not device.open_to(entry):
                raise ValueError(f"{device} and {entry.id!r} cannot be shared: one of those who meet there runs alone")
        if entry.priority == "guaranteed":
            for device in devices:
                if device.guaranteed is not None or device.reserved is not None:
                    raise ValueError(f"{device} is not free for the guaranteed submission {entry.id!r}")
            self._claim_quota(entry, len(devices))
            self.devices.take(devices)
            for device in devices:
                device.guaranteed = entry
                # ``occupied`` counts devices, not entries: one with opportunistic entries on it is counted already.
                self.occupied += not device.opportunistic
        else:
            for device in devices:
                self.occupied += device.guaranteed is None and not device.opportunistic
                device.opportunistic[entry.id] = entry
        entry.devices = devices
        self.entered += 1
        entry.entered = self.entered
        self.changed.add(entry.id)

    def _leave(self, entry: Entry) -> None:
        if entry.priority == "guaranteed":
            for device in entry.devices:
                device.guaranteed = None
                self.occupied -= not device.opportunistic
            self.devices.give(entry.devices)
            self._return_quota(entry, len(entry.devices))
        else:
            for device in entry.devices:
                del device.opportunistic[entry.id]
                self.occupied -= device.guaranteed is None and not device.opportunistic
        entry.devices = []
        self.changed.add(entry.id)
