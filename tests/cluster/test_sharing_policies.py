"""antman, gandiva, gandiva-packing and capacity in small stories, each with what the papers say of it."""

from __future__ import annotations

import math
import random

import pytest

from tests.cluster.simulated import restarted, simulate
from waterflow.cluster.book import Entry
from waterflow.cluster.interference import Interference, Resident
from waterflow.cluster.model_profiles import GIB, ModelProfile
from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.capacity import Capacity
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.policies.gandiva_packing import GandivaPacking
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import Simulated
from waterflow.cluster.submission import Move, Node, Report, Resize, SetPriority, Start, Stop, Submission, Tenant
from waterflow.errors import SubmissionError

MODELS = Interference(
    models={
        "light": ModelProfile("light", 0.2, 4 * GIB, "made up", demand=0.2),
        "heavy": ModelProfile("heavy", 0.9, 4 * GIB, "made up", demand=1.2),
    }
)


def new(policy: Policy, sizes: tuple[int, ...] = (2,), memory: int = 0, **quotas: int) -> Scheduler:
    nodes = [Node(f"n{i}", size, memory) for i, size in enumerate(sizes)]
    return Scheduler(nodes, policy, [Tenant(name, quota) for name, quota in quotas.items()])


def guaranteed(id: str, devices: int = 1, tenant: str = "a", auto: bool = False, memory: int = 0) -> Submission:
    return Submission(id, tenant, devices, "guaranteed", auto, memory)


def extra(id: str, devices: int = 1, tenant: str = "a", memory: int = 0, model: str | None = None) -> Submission:
    return Submission(id, tenant, devices, "opportunistic", memory=memory, model=model)


def busy(scheduler: Scheduler, now: float, **utilization: float) -> None:
    for id, value in utilization.items():
        scheduler.report(now, id, Report(utilization=value))


def state(scheduler: Scheduler, id: str) -> Entry:
    return scheduler.book.entries[id]


def ends(run: Simulated) -> dict[str, float]:
    return {job.id: round(job.ended, 6) for job in run.jobs}


# -- antman


def test_antman_reserves_and_lends_what_it_reserved() -> None:
    cluster = new(AntMan(), (3,), a=3)
    cluster.submit(0, guaranteed("one"))
    assert cluster.submit(0, guaranteed("wide", 3)) == []
    assert len(state(cluster, "wide").reserved) == 2
    assert cluster.submit(0, guaranteed("later")) == [], "reserved devices are never another guaranteed one's"
    (start,) = cluster.submit(0, extra("low"))
    assert isinstance(start, Start) and start.priority == "opportunistic"
    assert state(cluster, "low").devices[0].reserved is state(cluster, "wide")
    (start,) = cluster.ended(5, "one")
    assert start.id == "wide" and len(start.places) == 3
    assert state(cluster, "low").devices[0].guaranteed is state(cluster, "wide"), "nobody is stopped for it"


def test_antman_reserves_no_more_than_the_quota() -> None:
    cluster = new(AntMan(), (4,), a=3)
    cluster.submit(0, guaranteed("two", 2))
    cluster.submit(0, guaranteed("wide", 2))
    assert len(state(cluster, "wide").reserved) == 1 and cluster.book.quota_left("a") == 0


def test_antman_takes_devices_that_stayed_below_m() -> None:
    cluster = new(AntMan(busy=0.8, window=10.0), (1,), a=1)
    cluster.submit(0, guaranteed("g"))
    busy(cluster, 100, g=0.5)
    assert cluster.submit(100, extra("low")) == [] and cluster.next_tick == 110
    assert cluster.tick(109.9) == []
    (start,) = cluster.tick(110)
    assert start.id == "low"
    busy(cluster, 111, low=0.4)
    assert cluster.submit(200, extra("more")) == [] and cluster.next_tick is None, "0.9 of 0.8 is in use"
    busy(cluster, 300, low=0.2)
    assert cluster.next_tick == 310


def test_antman_takes_a_device_that_nobody_uses_at_once() -> None:
    cluster = new(AntMan(window=10.0), (1,), a=1)
    for number in range(40):
        (start,) = cluster.submit(number, extra(str(number)))
        assert start.id == str(number)
        busy(cluster, number, **{str(number): 0.9})
        assert cluster.ended(number, str(number)) == []
    cluster.submit(100, extra("one"))
    busy(cluster, 100, one=0.9)
    cluster.submit(100, extra("two"))
    (start,) = cluster.ended(101, "one")
    assert start.id == "two"


@pytest.mark.parametrize("restarts", [False, True])
def test_antman_forgets_who_left_without_a_report(restarts: bool) -> None:
    """The device was calm all the time; one that was measured to be busy has to prove itself."""
    cluster = new(AntMan(busy=0.8, window=10.0), (1,), a=1)
    cluster.submit(0, guaranteed("g"))
    busy(cluster, 0, g=0.1)
    for number in range(5):
        (start,) = cluster.submit(20, extra(str(number)))
        assert start.id == str(number) and cluster.submit(20, extra("next")) == []
        if restarts:
            cluster = restarted(cluster, AntMan(busy=0.8, window=10.0))
        cluster.cancel(20, "next", decide=False)
        assert cluster.ended(20, str(number)) == []
    (start,) = cluster.submit(20, extra("loud"))
    busy(cluster, 21, loud=0.8)
    if restarts:
        cluster = restarted(cluster, AntMan(busy=0.8, window=10.0))
    cluster.ended(22, "loud")
    assert cluster.submit(22, extra("waits")) == [] and cluster.next_tick == 32


def test_antman_takes_the_least_loaded() -> None:
    cluster = new(AntMan(window=0.0), (3,), a=3)
    for id, value in (("x", 0.6), ("y", 0.1), ("z", 0.3)):
        cluster.submit(0, guaranteed(id))
        busy(cluster, 0, **{id: value})
    (start,) = cluster.submit(1, extra("low"))
    assert start.places == state(cluster, "y").places


@pytest.mark.parametrize("auto", [True, False])
def test_antman_long_waits_turn_opportunistic_unless_forbidden_and_are_upgraded(auto: bool) -> None:
    cluster = new(AntMan(patience=600.0), (2,), a=1)
    cluster.submit(0, guaranteed("first"))
    cluster.submit(0, guaranteed("second", auto=auto))
    assert cluster.next_tick == (600 if auto else None)
    actions = cluster.tick(600)
    if not auto:
        assert actions == [] and cluster.ended(700, "first")[0].priority == "guaranteed"
        return
    assert actions == [Start("second", (("n0", 1),), "opportunistic")]
    cluster.submit(650, guaranteed("third"))
    actions = cluster.ended(700, "first")
    assert actions == [SetPriority("second", "guaranteed")], "an upgrade goes before a new one"


def test_antman_restarts_with_who_lost_patience_before() -> None:
    cluster = new(AntMan(patience=600.0), (1,))
    cluster.submit(0, guaranteed("first"))
    busy(cluster, 0, first=0.9)
    cluster.submit(0, guaranteed("second", auto=True))
    cluster.tick(600)
    again = restarted(cluster, AntMan(patience=600.0))
    assert again.next_tick == cluster.next_tick
    for each in (cluster, again):
        busy(each, 700, first=0.1)
        assert each.tick(710) == [Start("second", (("n0", 0),), "opportunistic")]


def test_antman_upgrades_all_workers_or_none() -> None:
    cluster = new(AntMan(patience=0.0), (2,), a=2, b=1)
    cluster.submit(0, guaranteed("other", tenant="b"))
    busy(cluster, 0, other=0.1)
    (start,) = cluster.submit(20, guaranteed("wide", 2, auto=True))
    assert start.priority == "opportunistic" and cluster.book.quota_left("a") == 2
    assert cluster.ended(30, "other") == [SetPriority("wide", "guaranteed")]


def test_antman_waits_for_one_node() -> None:
    together, anywhere = new(AntMan(one_node=True), (2, 2), a=4), new(AntMan(), (2, 2), a=4)
    for cluster in (together, anywhere):
        cluster.submit(0, guaranteed("x"))
        cluster.submit(0, guaranteed("y"))
        cluster.submit(0, guaranteed("z"))
        cluster.ended(1, "x")
    # x and y stood on the first node, z on the second: one device of each is free.
    assert together.submit(2, guaranteed("pair", 2)) == []
    assert len(state(together, "pair").reserved) == 1
    assert anywhere.submit(2, guaranteed("pair", 2)) != []


def test_antman_keeps_guaranteed_jobs_as_if_alone() -> None:
    jobs = [
        Submission("g", "a", 1, "guaranteed", False, model="light", duration=1000.0),
        Submission("o", "b", 1, "opportunistic", model="light", duration=1000.0, submitted=100.0),
    ]
    run = simulate(
        AntMan(), jobs, 1, check=True, tenants=[Tenant("a", 1), Tenant("b", 0)], speeds=MODELS.under_control,
        utilization=lambda job: MODELS.utilization(job.model),
    )  # fmt: skip
    speeds = MODELS.speeds([Resident("light", "guaranteed"), Resident("light", "opportunistic")], controlled=True)
    assert speeds[0] > 0.99 and speeds[1] == pytest.approx(12 / 13, rel=0.001), "held while the coordinator looks"
    g = 100 + 900 / speeds[0]
    assert ends(run) == pytest.approx({"g": g, "o": g + 1000 - (g - 100) * speeds[1]})


# -- capacity


def test_capacity_lends_idle_quota_and_waits_for_it() -> None:
    cluster = new(Capacity(), (2,), a=2, b=0)
    cluster.submit(0, extra("low", 2, tenant="b"))
    assert cluster.submit(1, guaranteed("g")) == []
    assert [a.id for a in cluster.ended(2, "low")] == ["g"]


def test_capacity_takes_back_what_it_lent() -> None:
    cluster = new(Capacity(preempt=True), (2,), a=2, b=0)
    cluster.submit(0, extra("old", tenant="b"))
    cluster.submit(1, extra("new", tenant="b"))
    stop, start = cluster.submit(2, guaranteed("g"))
    assert stop == Stop("new", suspend=False) and start.id == "g" and state(cluster, "old").state == "running"
    assert cluster.submit(3, guaranteed("wide", 2)) == [], "a guaranteed run is not stopped"


def test_capacity_begins_anew_unless_kept() -> None:
    jobs = [
        Submission("b", "b", 1, "opportunistic", duration=100.0),
        Submission("a", "a", 1, "guaranteed", duration=10.0, submitted=50.0),
    ]
    tenants = [Tenant("a", 1), Tenant("b", 0)]
    assert ends(simulate(Capacity(preempt=True), jobs, 1, tenants=tenants)) == {"a": 60, "b": 160}
    assert ends(simulate(Capacity(preempt=True, keep=True), jobs, 1, tenants=tenants)) == {"a": 60, "b": 110}


def test_capacity_goes_by_use_of_quota_and_covers_what_it_lent() -> None:
    cluster = new(Capacity(), (3,), a=1, b=2)
    cluster.submit(0, guaranteed("a1"))
    (start,) = cluster.submit(0, guaranteed("a2", auto=True))
    assert start.priority == "opportunistic"
    cluster.submit(0, guaranteed("b1", tenant="b"))
    cluster.submit(0, guaranteed("a3", auto=True))
    cluster.submit(0, guaranteed("b2", tenant="b"))
    actions = cluster.ended(1, "a1")
    assert actions[0] == SetPriority("a2", "guaranteed")
    assert [action.id for action in actions[1:]] == ["b2"], "b uses half of its quota, a all of it"


def test_capacity_holds_devices_for_the_first_or_lets_others_overtake() -> None:
    for backfill in (False, True):
        cluster = new(Capacity(backfill=backfill), (2,), a=2)
        cluster.submit(0, guaranteed("one"))
        cluster.submit(0, guaranteed("wide", 2))
        assert bool(cluster.submit(0, guaranteed("small"))) is backfill


def test_capacity_goes_on_with_other_parameters() -> None:
    """What was reserved under the parameters before is given back."""
    cluster = new(Capacity(), (2,), a=2)
    cluster.submit(0, guaranteed("one"))
    cluster.submit(0, guaranteed("wide", 2))
    cluster = restarted(cluster, Capacity(backfill=True))
    assert [action.id for action in cluster.submit(0, guaranteed("small"))] == ["small"]


def test_capacity_without_tenants_is_fifo() -> None:
    assert _average(simulate(Capacity(), "philly_480", 64)) == 32727.0
    assert _average(simulate(Capacity(backfill=True), "philly_480", 64)) == pytest.approx(23411.0, abs=0.5)


def _average(run: Simulated) -> float:
    return round(sum(job.completion for job in run.jobs) / len(run.jobs), 2)


def test_capacity_that_lends_nothing_refuses_what_no_quota_covers() -> None:
    with pytest.raises(SubmissionError, match=r"quota of 'a' is 1.*submit it as opportunistic"):
        new(Capacity(elastic=False), (4,), a=1).submit(0, guaranteed("wide", 2, auto=True))


# -- gandiva


def test_gandiva_places_by_affinity() -> None:
    """Figure 7: jobs of one size share servers, other sizes get their own."""
    cluster = new(Gandiva(), (4, 4, 4))
    for number in range(4):
        cluster.submit(0, Submission(f"s{number}", devices=1))
    cluster.submit(0, Submission("pair", devices=2))
    cluster.submit(0, Submission("four", devices=4))
    where = {id: {place[0] for place in state(cluster, id).places} for id in ("s0", "s3", "pair", "four")}
    assert where["s0"] == where["s3"] and len(where["s0"] | where["pair"] | where["four"]) == 3
    cluster.submit(0, Submission("s4", devices=1))
    assert {place[0] for place in state(cluster, "s4").places} == where["pair"], "free devices before overload"


def test_gandiva_shares_time_fairly() -> None:
    """Figure 9: six jobs on four devices get four minutes of every six."""
    jobs = [Submission(f"j{number}", duration=6000.0) for number in range(6)]
    run = simulate(Gandiva(packing=False), jobs, 4, check=True)
    assert min(job.ended for job in run.jobs) >= 6000 * 6 / 4 - 6 * 60
    assert max(job.ended for job in run.jobs) == pytest.approx(9000, abs=60)


def test_gandiva_gives_newcomers_the_next_turn() -> None:
    waits = {}
    for first in (True, False):
        jobs = [Submission(f"j{n}", duration=6000.0) for n in range(5)]
        jobs.append(Submission("new", duration=30.0, submitted=430.0))
        run = simulate(Gandiva(newest_first=first, packing=False), jobs, 1)
        waits[first] = next(job.first_start for job in run.jobs if job.id == "new") - 430
    assert waits[True] <= 60 < waits[False]


def test_gandiva_packs_and_undoes_it() -> None:
    """Table 1: packing gains with low utilization, and loses with high."""
    counts = {}
    for model in ("light", "heavy"):
        policy = Gandiva()
        jobs = [Submission(f"j{n}", duration=600.0, model=model, memory=4 * GIB) for n in range(2)]
        run = simulate(policy, jobs, 1, check=True, speeds=MODELS.packed, utilization=lambda job: MODELS.utilization(job.model))
        counts[model] = policy.packed, policy.unpacked, max(job.ended for job in run.jobs)
    assert counts["light"][:2] == (1, 0) and counts["light"][2] < 900
    packed, unpacked, end = counts["heavy"]
    assert packed == unpacked == 1 and 1200 < end < 1300


def test_gandiva_packs_nothing_beyond_memory() -> None:
    policy = Gandiva()
    cluster = new(policy, (1,), memory=10)
    for id in ("x", "y"):
        cluster.submit(0, Submission(id, memory=6))
    for turn in range(1, 6):
        busy(cluster, turn * 60 - 1, x=0.1, y=0.1)
        cluster.tick(turn * 60.0)
    assert policy.packed == 0


def test_gandiva_moves_to_vacated_devices_and_together() -> None:
    cluster = new(Gandiva(packing=False), (1, 1))
    for id in ("x", "y", "z"):
        cluster.submit(0, Submission(id))
    assert state(cluster, "z").state == "waiting"
    actions = cluster.ended(10, "y")
    assert [type(action) for action in actions] == [Start] and actions[0].id == "z"
    spread = new(Gandiva(), (2, 2))
    for id in ("p", "q", "r"):
        spread.submit(0, Submission(id))
    spread.ended(1, "p")
    spread.submit(2, Submission("pair", devices=2))
    assert len({place[0] for place in state(spread, "pair").places}) in (1, 2)
    spread.ended(3, "r")
    spread.ended(4, "q")
    assert len({place[0] for place in state(spread, "pair").places}) == 1


def test_gandiva_empties_loose_servers() -> None:
    cluster = new(Gandiva(), (4, 4))
    for number in range(8):
        cluster.submit(0, Submission(f"j{number}"))
    on = {id: state(cluster, id).places[0][0] for id in cluster.book.entries}
    first = [id for id, node in on.items() if node == "n0"]
    second = [id for id, node in on.items() if node == "n1"]
    actions = [a for id in [*first[:2], *second[:3]] for a in cluster.ended(1, id)]
    assert any(isinstance(action, Move) for action in actions)
    assert len({entry.places[0][0] for entry in cluster.book.entries.values()}) == 1


def test_gandiva_grows_when_nothing_comes_and_shrinks_at_once() -> None:
    """Figure 11."""
    cluster = new(Gandiva(growable=("m",), grow_after=60.0), (4,))
    cluster.submit(0, Submission("long", model="m"))
    cluster.submit(0, Submission("short", devices=2, model="other"))
    assert cluster.next_tick == 60
    (grown,) = cluster.tick(60)
    assert isinstance(grown, Resize) and len(grown.places) == 2
    cluster.ended(100, "short")
    assert len(state(cluster, "long").devices) == 2
    cluster.tick(160)
    assert len(state(cluster, "long").devices) == 4
    shrunk, start = cluster.submit(200, Submission("pair", devices=2))
    assert isinstance(shrunk, Resize) and len(shrunk.places) == 1 and start.id == "pair"


def test_gandiva_decides_the_same_after_a_restart() -> None:
    rng = random.Random(1)
    cluster, again = (new(Gandiva(quantum=10.0), (4, 4, 2), memory=16) for _ in range(2))
    for number in range(300):
        now = number * 7.0
        running = [entry.id for entry in cluster.book.entries.values() if entry.state == "running"]
        reports = [Report(utilization=rng.choice((0.1, 0.5, 0.9)), rate=rng.uniform(0.3, 1.0)) for _ in running]
        newcomer = Submission(str(number), devices=rng.choice((1, 1, 2, 5)), memory=rng.choice((4, 8)))
        gone = rng.choice(running) if number % 3 == 2 else None
        decided = []
        for each in (cluster, again):
            for id, report in zip(running, reports):
                each.report(now, id, report)
            decided.append(each.submit(now, newcomer) if gone is None else each.ended(now, gone))
        assert decided[0] == decided[1], number
        again = restarted(again, Gandiva(quantum=10.0))
    counts = cluster.policy.notes()["counts"]
    assert counts == again.policy.notes()["counts"] and min(counts) > 1, counts


@pytest.mark.parametrize("wrong", [{"quantum": 0}, {"grow_after": -1}, {"defragment": 0}])
def test_gandiva_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="quantum="):
        Gandiva(**wrong)  # type: ignore[arg-type]


# -- gandiva's packing


def test_packing_takes_the_lowest_utilization_with_room() -> None:
    cluster = new(GandivaPacking(), (3,), memory=10)
    for id, value, memory in (("x", 0.1, 8), ("y", 0.5, 4), ("z", 0.3, 4)):
        cluster.submit(0, extra(id, memory=memory))
        busy(cluster, 0, **{id: value})
    (start,) = cluster.submit(1, extra("new", memory=4))
    assert start.places == state(cluster, "z").places, "x has the lowest utilization, and no room"
    assert cluster.submit(2, extra("unknown")) == [], "nobody packs what does not say its memory"


def test_packing_is_undone_by_throughput() -> None:
    policy = GandivaPacking(undo=True, trial=60.0)
    cluster = new(policy, (1,), memory=10)
    cluster.submit(0, extra("x", memory=2))
    cluster.submit(0, extra("y", memory=2))
    for id in ("x", "y"):
        cluster.report(1, id, Report(rate=0.45))
    assert cluster.next_tick == 60
    assert cluster.tick(60) == [Stop("y", suspend=True)] and policy.undone == 1
    assert cluster.tick(120) == [] and cluster.next_tick is None, "not beside the same one again"
    assert [action.id for action in cluster.ended(200, "x")] == ["y"]


@pytest.mark.parametrize("policy", [AntMan, GandivaPacking])
def test_parameters_that_cannot_be(policy: type[Policy]) -> None:
    with pytest.raises(ValueError, match="0"):
        policy(**({"busy": 0.0} if policy is AntMan else {"trial": 0.0}))


# -- what the simulator tells of those who share


def test_milestones_are_timed_within_a_run() -> None:
    jobs = [Submission("x", duration=100.0), Submission("y", duration=100.0)]
    run = simulate(Gandiva(packing=False), jobs, 1, milestone=lambda job: 70.0)
    # x runs 0..60 and 120..160, y 60..120 and later: 70 seconds of work are done 10 into the second turn.
    assert [job.milestone for job in run.jobs] == [130.0, pytest.approx(170.0)]
    assert all(math.isfinite(job.ended) for job in run.jobs)
    assert all(job.milestone is None for job in simulate(Gandiva(), jobs, 1).jobs)


def test_antman_puts_together_what_fits_together() -> None:
    """Memory that is known counts; who has no room waits, and those behind it do not wait for it."""
    scheduler = new(AntMan(), (2,), memory=10 * GIB)
    scheduler.submit(0.0, guaranteed("g", memory=6 * GIB))
    busy(scheduler, 1.0, g=0.1)
    (g,) = state(scheduler, "g").places
    scheduler.submit(20.0, extra("a", memory=5 * GIB))
    assert state(scheduler, "a").places != (g,) and state(scheduler, "a").places
    busy(scheduler, 21.0, a=0.1)
    scheduler.submit(40.0, extra("b", memory=6 * GIB))
    scheduler.submit(40.0, extra("c", memory=4 * GIB))
    assert state(scheduler, "b").state == "waiting" and state(scheduler, "c").state == "running"
    busy(scheduler, 41.0, c=0.1)
    scheduler.tick(60.0)
    assert state(scheduler, "b").state == "waiting"
    scheduler.ended(80.0, "a")
    scheduler.tick(100.0)
    assert state(scheduler, "b").places and state(scheduler, "b").places != (g,)
    for device in scheduler.book.devices:
        assert device.memory_used <= 10 * GIB


def test_a_job_that_reports_more_than_a_device_has_starts_again_on_one_of_its_own() -> None:
    """A group fits by its highest step, and reports the sum of all of them."""
    scheduler = Scheduler([Node("a", 1, 4 * GIB)], AntMan())
    for id, memory in (("group", 3 * GIB), ("other", 2 * GIB)):
        scheduler.submit(0, Submission(id, priority="opportunistic", memory=memory))
    scheduler.report(1, "group", Report(memory=5 * GIB))
    scheduler.node_lost(2, "a")
    scheduler.node_joined(3, Node("a", 1, 4 * GIB))
    scheduler.tick(4)
    assert {id: entry.state for id, entry in scheduler.book.entries.items()} == {"group": "running", "other": "waiting"}
