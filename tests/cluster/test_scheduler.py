"""Events, refusals, reservations and quotas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.simulated import Checked
from waterflow.cluster.book import Entry
from waterflow.cluster.policies import Fifo, Las, Policy, Srtf
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.submission import Move, Node, Report, Resize, SetPriority, Start, Stop, Submission, Tenant
from waterflow.errors import SubmissionError

NODES = [Node("a", 2, memory=100), Node("b", 2, memory=200)]


class Told(Policy):
    """Does what a test tells it; remembers what it heard."""

    name = "told"

    def __init__(self) -> None:
        self.heard: list[str] = []

    def submitted(self, entry: Entry) -> None:
        self.heard.append(f"submitted {entry.id}")

    def stopped(self, entry: Entry) -> None:
        self.heard.append(f"stopped {entry.id}")

    def ended(self, entry: Entry) -> None:
        assert entry.devices == [] and entry.state == "ended"
        self.heard.append(f"ended {entry.id}")

    def reported(self, entry: Entry, report: Report) -> bool:
        return report.progress is not None

    def decide(self, now: float) -> None:
        self.heard.append(f"decide {now:g}")

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


def told(tenants: tuple[Tenant, ...] = ()) -> tuple[Scheduler, Told]:
    policy = Told()
    return Checked(NODES, policy, tenants), policy


def test_one_submission_from_submit_to_end() -> None:
    scheduler = Scheduler(NODES, Fifo())
    (start,) = scheduler.submit(1.0, Submission("x", devices=2))
    assert start == Start("x", (("a", 0), ("a", 1)), "guaranteed")
    assert scheduler.submit(1.0, Submission("x", devices=2)) == []
    assert scheduler.ended(5.0, "x") == []
    assert scheduler.ended(5.0, "x") == []
    assert scheduler.book.devices.free == 4


def test_strict_order_and_cancel() -> None:
    scheduler = Scheduler(NODES, Fifo())
    scheduler.submit(0.0, Submission("x", devices=3))
    assert scheduler.submit(0.0, Submission("large", devices=2)) == []
    assert scheduler.submit(0.0, Submission("small")) == [], "the head of the line blocks"
    assert [action.id for action in scheduler.cancel(1.0, "large")] == ["small"]
    stop, *rest = scheduler.cancel(2.0, "x")
    assert stop == Stop("x", suspend=False) and rest == []
    assert scheduler.cancel(2.0, "nobody") == []


@pytest.mark.parametrize(
    ("submission", "says"),
    [
        (Submission("x", tenant="nobody"), r"unknown tenant 'nobody'; there are \['lab', 'shop'\]"),
        (Submission("x", "lab", devices=5), "asks for 5 devices; the cluster has 4"),
        (Submission("x", "lab", devices=0), "asks for 0 devices"),
        (Submission("x", "lab", memory=300), "needs 300 bytes on each device; the largest has 200"),
        (Submission("x", "lab", devices=4, auto=False), "the quota of 'lab' is 3"),
        (Submission("x", "lab", devices=4), "the quota of 'lab' is 3"),
        (Submission("x", "lab", priority="low"), "priority 'low'"),  # type: ignore[arg-type]
    ],
)
def test_refused_with_its_reason(submission: Submission, says: str) -> None:
    scheduler = Scheduler(NODES, Fifo(), [Tenant("lab", 3), Tenant("shop", 4)])
    with pytest.raises(SubmissionError, match=says):
        scheduler.submit(0.0, submission)
    assert scheduler.book.entries == {}
    assert scheduler.submit(0.0, Submission("x", "lab")), "the id is still open"


def test_srtf_wants_durations() -> None:
    with pytest.raises(SubmissionError, match="'srtf' orders by the time that is left"):
        Scheduler(NODES, Srtf()).submit(0.0, Submission("x"))


def test_quotas_bind_and_others_go_past() -> None:
    for policy in (Fifo(), Las()):
        scheduler = Checked(NODES, policy, [Tenant("lab", 1), Tenant("shop", 4)])
        scheduler.submit(0.0, Submission("x", "lab"))
        assert scheduler.submit(0.0, Submission("y", "lab")) == []
        assert [a.id for a in scheduler.submit(0.0, Submission("z", "shop"))] == ([] if policy.name == "fifo" else ["z"])
        assert "y" in [action.id for action in scheduler.ended(1.0, "x")]


def test_time_does_not_go_back() -> None:
    scheduler, _ = told()
    scheduler.tick(2.0)
    with pytest.raises(ValueError, match=r"time goes back from 2\.0 to 1\.0"):
        scheduler.tick(1.0)


def test_events_of_one_moment_are_decided_once() -> None:
    scheduler, policy = told()
    scheduler.submit(1.0, Submission("x"), decide=False)
    scheduler.submit(1.0, Submission("y"), decide=False)
    scheduler.tick(1.0)
    assert policy.heard == ["submitted x", "submitted y", "decide 1"]


def test_reports() -> None:
    scheduler, policy = told()
    scheduler.submit(0.0, Submission("x", duration=100.0))
    entry, book = scheduler.book.entries["x"], scheduler.book
    assert scheduler.report(0.0, "x", Report(memory=3)) == [] and entry.memory == 0, "it does not run"
    book.start(entry, [book.devices.at(("a", 1))])
    scheduler.report(10.0, "x", Report(rate=0.5, memory=7, utilization=0.25))
    assert (entry.done, entry.memory) == (10.0, 7)
    assert entry.remaining_at(30.0) == 80.0 and entry.service_at(30.0) == 30.0
    device = book.devices.at(("a", 1))
    assert device.utilization == 0.25 and device.memory_used == 7
    heard = len(policy.heard)
    scheduler.report(30.0, "x", Report(progress=0.5), decide=False)
    assert entry.done == 50.0 and len(policy.heard) == heard
    assert scheduler.next_tick == 30.0, "the policy wants to decide, and is asked at once"
    scheduler.tick(30.0)
    assert scheduler.next_tick is None


def test_one_guaranteed_and_several_opportunistic_on_a_device() -> None:
    scheduler, _ = told((Tenant("lab", 2),))
    book = scheduler.book
    for name in "gwxyz":
        scheduler.submit(0.0, Submission(name, "lab"))
    g, w, x, y, z = book.entries.values()
    device, other = book.devices.at(("a", 0)), book.devices.at(("a", 1))
    book.start(g, [device])
    for entry in (x, y):
        book.start(entry, [device], "opportunistic")
    assert [entry.id for entry in device.residents] == ["g", "x", "y"] and book.occupied == 1
    with pytest.raises(ValueError, match="is not free for the guaranteed submission 'z'"):
        book.start(z, [device], "guaranteed")
    with pytest.raises(ValueError, match="is not free"):
        book.set_priority(x, "guaranteed")
    book.check()
    book.actions = []
    book.move(x, [other])
    book.set_priority(x, "guaranteed")
    assert book.actions == [Move("x", (("a", 1),)), SetPriority("x", "guaranteed")]
    assert book.quota_left("lab") == 0
    with pytest.raises(ValueError, match=r"of the quota of 'lab' \(2\) 0 are left"):
        book.start(w, [book.devices.at(("b", 0))])
    book.check()
    book.set_priority(x, "opportunistic")
    book.resize(g, [device, book.devices.at(("b", 1))])
    assert book.actions[-1] == Resize("g", (("a", 0), ("b", 1))) and book.quota_left("lab") == 0
    with pytest.raises(ValueError, match="only a waiting submission"):
        book.start(g, [other])
    book.check()
    book.stop(g)
    assert book.quota_left("lab") == 2 and g.preemptions == 1
    book.check()


def test_reservations_are_open_to_opportunistic_ones_and_do_not_leak() -> None:
    scheduler, _ = told((Tenant("lab", 4),))
    book = scheduler.book
    for name, priority in (("gang", "guaranteed"), ("o", "opportunistic"), ("g", "guaranteed")):
        scheduler.submit(0.0, Submission(name, "lab", devices=2, priority=priority))  # type: ignore[arg-type]
    gang, o, g = book.entries.values()
    a = [book.devices.at(("a", 0)), book.devices.at(("a", 1))]
    b = [book.devices.at(("b", 0)), book.devices.at(("b", 1))]
    book.reserve(gang, a[:1])
    assert book.devices.free == 3 and book.quota_left("lab") == 3
    book.start(o, a, None)
    with pytest.raises(ValueError, match="not free"):
        book.start(g, a)
    with pytest.raises(ValueError, match="reservations are for waiting guaranteed"):
        book.reserve(o, b)
    book.start(gang, a)
    assert gang.reserved == [] and book.devices.free == 2
    book.check()
    book.reserve(g, b[:1])
    scheduler.node_lost(1.0, "b")
    assert g.reserved == [] and book.quota_left("lab") == 2
    scheduler.node_joined(2.0, NODES[1])
    book.reserve(g, [book.devices.at(("b", 0))])
    scheduler.cancel(3.0, "g")
    assert book.devices.free == 2 and book.quota_left("lab") == 2
    book.check()


def test_a_lost_node_stops_what_ran_there() -> None:
    scheduler = Checked([*NODES, Node("c", 2)], Las())
    scheduler.submit(0.0, Submission("two", devices=2))
    scheduler.submit(0.0, Submission("three", devices=3))
    assert {node for node, _ in scheduler.book.entries["three"].places} == {"b", "c"}
    actions = scheduler.node_lost(5.0, "b")
    assert actions == [Stop("three", suspend=False)], "its workers on c; those on b are gone"
    assert scheduler.book.entries["three"].preemptions == 0
    assert scheduler.node_lost(5.0, "b") == []
    (start,) = scheduler.node_joined(9.0, Node("b", 2))
    assert start.id == "three"
    actions = scheduler.node_joined(9.0, Node("b", 2))  # it was away so shortly that nobody saw it
    assert [type(action) for action in actions] == [Stop, Start]


def test_state_of_another_policy_is_refused() -> None:
    notes = Scheduler(NODES, Fifo()).notes()
    with pytest.raises(ValueError, match="is of policy 'fifo', not 'las'"):
        Scheduler.restored(notes, [], Las())


def test_nodes_have_names_of_their_own_and_devices() -> None:
    with pytest.raises(ValueError, match="already part"):
        Scheduler([Node("a", 1), Node("a", 1)], Fifo())
    with pytest.raises(ValueError, match="at least one"):
        Scheduler([Node("a", 0)], Fifo())


def test_devices_are_chosen_on_the_fullest_node_that_has_them() -> None:
    scheduler, _ = told()
    devices = scheduler.book.devices
    devices.take([devices.at(("a", 0))])
    assert [device.place for device in devices.choose(1) or ()] == [("a", 1)]
    assert [device.place for device in devices.choose(2) or ()] == [("b", 0), ("b", 1)]
    assert len(devices.choose(3) or ()) == 3
    assert devices.choose(4) is None
