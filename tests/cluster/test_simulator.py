"""Time, overheads and neighbours in simulation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.simulated import TRACES, Overheads, cluster, simulate
from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.policies import ElasticTiresias, Fifo, Las, Policy
from waterflow.cluster.scaling import LINEAR, TableScaling
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import Simulated
from waterflow.cluster.submission import Resize, Submission
from waterflow.cluster.summary import save_pictures, share_ratios, summarize
from waterflow.cluster.workload import read_workload
from waterflow.errors import WorkloadError


def job(id: str, seconds: float, devices: int = 1, at: float = 0.0, **more: object) -> Submission:
    return Submission(id, devices=devices, duration=seconds, submitted=at, **more)  # type: ignore[arg-type]


def ends(run: Simulated) -> dict[str, float]:
    return {job.id: job.ended for job in run.jobs}


def test_each_start_and_resume_costs_once() -> None:
    jobs = [job("long", 100), job("short", 10, at=50)]
    policy = Las((30.0,))  # long is demoted at 30, and gives way at 50
    assert ends(simulate(policy, jobs, 1)) == {"long": 110, "short": 60}
    run = simulate(Las((30.0,)), jobs, 1, overheads=Overheads(start=2, resume=5))
    assert ends(run) == {"long": 2 + 48 + (2 + 10) + 5 + 52, "short": 62}
    assert {job.id: (job.preemptions, job.ran) for job in run.jobs} == {"long": (1, 107), "short": (0, 12)}


def test_demotion_at_the_limit_and_not_before() -> None:
    # After 8 devices x 50 s = 400 the large one leaves the first queue; the small one came at 10 and starts then.
    jobs = [job("large", 100, 8), job("small", 20, 1, at=10)]
    assert ends(simulate(Las((400.0, 1e9)), jobs, 8)) == {"large": 120, "small": 70}
    assert ends(simulate(Las((400.0, 1e9), by="time"), jobs, 8)) == {"large": 100, "small": 120}


class Beside(Policy):
    """All on the first device: the first submission guaranteed, others opportunistic."""

    name = "beside"

    def __init__(self) -> None:
        self._waiting: list[Entry] = []

    def submitted(self, entry: Entry) -> None:
        self._waiting.append(entry)

    def ended(self, entry: Entry) -> None:
        pass

    def decide(self, now: float) -> None:
        device = self.book.devices.at(("n0", 0))
        for entry in self._waiting:
            self.book.start(entry, [device], "opportunistic" if device.residents else "guaranteed")
        self._waiting = []

    def restore(self, state: object) -> None:
        pass


def test_neighbours_slow_each_other_down() -> None:
    def speeds(device: Device, residents: Sequence[Entry]) -> Sequence[float]:
        others = len(residents) - (device.guaranteed is not None)
        return [1.0 if entry is device.guaranteed else (0.5 if device.guaranteed else 1.0) / others for entry in residents]

    jobs = [job("g", 100), job("o", 40, at=20), job("p", 10, at=40)]
    run = simulate(Beside(), jobs, 1, check=True, speeds=speeds)
    # o does 10 in 20..40, p and o do 10 each in 40..80; o does 10 until g ends at 100, and its last 10 alone.
    assert ends(run) == {"g": 100, "p": 80, "o": 110}
    assert summarize(run).utilization == 1.0
    alone = simulate(Beside(), jobs, 1, check=True)
    assert ends(alone) == {"g": 100, "o": 60, "p": 50}


def test_on_several_devices_the_slowest_sets_the_pace() -> None:
    class Wide(Beside):
        def decide(self, now: float) -> None:
            devices = [self.book.devices.at(("n0", at)) for at in (0, 1)]
            for entry in self._waiting:
                self.book.start(entry, devices[: entry.wanted], "opportunistic")
            self._waiting = []

    def speeds(device: Device, residents: Sequence[Entry]) -> Sequence[float]:
        return [1 / len(residents)] * len(residents)

    # The wide one runs at half its speed while the narrow one is beside it on one of its two devices.
    run = simulate(Wide(), [job("wide", 100, 2), job("narrow", 20, 1, at=10)], 2, check=True, speeds=speeds)
    assert ends(run) == {"narrow": 50, "wide": 120}


def test_a_speed_of_nothing_waits_for_better_times() -> None:
    def speeds(device: Device, residents: Sequence[Entry]) -> Sequence[float]:
        return [1.0] + [0.0] * (len(residents) - 1)

    assert ends(simulate(Beside(), [job("g", 100), job("o", 40, at=20)], 1, speeds=speeds)) == {"g": 100, "o": 140}


def test_elastic_rule_1_halves_all_but_the_first_queue() -> None:
    jobs = [job("old", 100, 4), job("new", 10, 2, at=50)]
    policy = ElasticTiresias((40.0, 1e9), pending=0)
    run = simulate(policy, jobs, 4, check=True)
    # old runs on 4 until 50, on 2 beside new until 60, on 4 after: 45 s of work are left then.
    assert ends(run) == {"new": 60, "old": 105}
    assert ends(simulate(ElasticTiresias((40.0, 1e9), pending=1), jobs, 4)) == {"old": 110, "new": 60}
    first = simulate(ElasticTiresias((1e6,), pending=0), jobs, 4)
    assert ends(first) == {"old": 100, "new": 105}, "in the first queue nobody is halved; then new has all 4"


def test_elastic_rule_2_gives_idle_devices_to_whoever_gains_most() -> None:
    steep, flat = ((1, 1.0), (8, 8.0)), ((1, 1.0), (2, 1.5), (3, 1.6), (8, 1.6))
    table = TableScaling({"steep": (steep,), "flat": (flat,)})
    jobs = [job("s", 80, model="steep"), job("f", 30, model="flat")]
    run = simulate(ElasticTiresias(scaling=table), jobs, 8, check=True, scaling=table)
    # The flat one gets a second device (+50 %), and its third (+7 %) when the steep one, on 6, has ended.
    assert ends(run) == {"s": pytest.approx(80 / 6), "f": pytest.approx(80 / 6 + (30 - 80 / 6 * 1.5) / 1.6)}
    limited = simulate(ElasticTiresias(scaling=table, most=2), jobs, 8, scaling=table)
    assert ends(limited) == {"s": 40.0, "f": 20.0}


def test_limits_come_sooner_to_those_that_grew() -> None:
    scheduler = Scheduler(cluster(4), ElasticTiresias((100.0,)))
    scheduler.submit(0.0, job("a", 1e3, 2), decide=False)
    scheduler.submit(0.0, job("b", 1e3, 2))
    assert scheduler.next_tick == 50.0
    (grown,) = scheduler.ended(10.0, "b", "completed")
    assert grown == Resize("a", scheduler.book.entries["a"].places) and len(grown.places) == 4
    assert scheduler.next_tick == 10.0 + (100.0 - 20.0) / 4


def test_growing_stops_a_job_and_shrinking_does_not() -> None:
    jobs = [job("a", 100, 2), job("b", 10, 2, at=50)]
    policy = ElasticTiresias((10.0,), scaling=LINEAR, most=1)
    # b halves a until it leaves the first queue itself, at 55; then a came first, and grows again: 47.5 are left.
    run = simulate(policy, jobs, 3, check=True, overheads=Overheads(grow=1.5))
    assert ends(run) == {"a": 55 + 1.5 + 47.5, "b": 65}


def test_tables_of_throughputs(tmp_path: Path) -> None:
    table = TableScaling({"m": (((1, 1.0), (2, 1.8), (4, 3.0)),)})
    one = job("x", 1, 2, model="m")
    assert table(one, 2) == 1.0 and table(one, 3) == pytest.approx(2.4 / 1.8) and table(one, 64) == pytest.approx(3 / 1.8)
    real = TableScaling.read(TRACES / "elasticflow_scaling_a100.csv", seed=3)
    known = job("x", 1, 1, model="bert")
    assert real.curve_of(known)[0] in ((1, 6.0307), (1, 3.5749))
    assert real(known, 1) == 1.0
    (tmp_path / "t.csv").write_text("model,num_gpus\nm,1\n")
    with pytest.raises(WorkloadError, match="lacks the columns global_batch, iters_s"):
        TableScaling.read(tmp_path / "t.csv")


def test_speed_is_recorded_for_the_same_seed() -> None:
    table = TableScaling.read(TRACES / "elasticflow_scaling_a100.csv", seed=0)
    again = TableScaling.read(TRACES / "elasticflow_scaling_a100.csv", seed=0)
    other = TableScaling.read(TRACES / "elasticflow_scaling_a100.csv", seed=1)
    jobs = [job(str(i), 1, 1) for i in range(20)]
    assert [table.curve_of(j) for j in jobs] == [again.curve_of(j) for j in jobs] != [other.curve_of(j) for j in jobs]


@pytest.mark.slow
def test_a_month_in_a_moment() -> None:
    """The benchmark asks for 10,000 jobs a second on a core of its own; others may be at work here."""
    jobs = read_workload(TRACES / "philly_multigpu_month.csv").submissions
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        simulate(Las(), jobs, 400)
        seconds.append(time.process_time() - begin)
    assert len(jobs) / min(seconds) > 5_000


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(WorkloadError, match=r"1 of 2 jobs ask for more than the 8 devices .*job 'b' for 9"):
        simulate(Fifo(), [job("a", 1), job("b", 1, 9)], 8)
    with pytest.raises(WorkloadError, match="'a' has no duration"):
        simulate(Fifo(), [Submission("a")], 8)

    class Never(Beside):
        def decide(self, now: float) -> None:
            pass

    with pytest.raises(WorkloadError, match="nothing runs and policy 'beside' starts none of 1 waiting"):
        simulate(Never(), [job("a", 1)], 8)


def test_jobs_of_no_length_and_equal_times() -> None:
    jobs = [job("a", 0), job("b", 0), job("c", 5), job("d", 5)]
    assert ends(simulate(Fifo(), jobs, 1)) == {"a": 0, "b": 0, "c": 5, "d": 10}


def test_summary_and_pictures(tmp_path: Path) -> None:
    run = simulate(Fifo(), [job("a", 10), job("b", 10), job("c", 10, at=5)], 1)
    found = summarize(run)
    assert (found.average, found.p50, found.p99, found.makespan) == (55 / 3, 20, 25, 30)
    assert (found.queueing, found.utilization, found.preemptions) == (25 / 3, 1.0, 0)
    # Equal share: 2 ask for 1 device in 0..5, 3 in 5..10, 2 in 10..20, 1 in 20..30.
    expected = [10 / (10 * 2.5), 20 / (10 * (10 + 15 + 20) / 20), 25 / (10 * (15 + 20 + 10) / 25)]
    assert np.allclose(share_ratios(run), expected)
    assert found.unfair == 1 / 3
    assert share_ratios(simulate(Fifo(), [job("a", 10)], 2)) == 1.0, "who is alone gets no more than was asked for"
    save_pictures(tmp_path / "a.png", {"fifo": run, "las": simulate(Las(), [job("z", 0)], 1)}, "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


HEADER = "job_id,submit_s,duration_s,num_gpus,tenant,model,status\n"


def test_workloads(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(HEADER + "b,7,3,2,lab,resnet,\na,5,1.5,1,,,\nc,7,,1,,,\nd,9, ,1,,,\n")
    workload = read_workload(path)
    assert workload.submissions == [
        Submission("a", duration=1.5, submitted=5.0),
        Submission("b", "lab", 2, model="resnet", duration=3.0, submitted=7.0),
    ]
    assert workload.notes == ["2 of 4 jobs have no duration_s and are left out (lines 4, 5)"]
    assert {s.priority for s in read_workload(TRACES / "muri_testbed_400.csv").submissions} == {"guaranteed", "opportunistic"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("job_id,submit_s\n1,2\n", "lacks the columns duration_s, num_gpus"),
        ("", "lacks the columns job_id"),
        (HEADER, "has no job with a duration"),
        (HEADER + "a,0,,1,,,\n", "no job with a duration .1 rows"),
        (HEADER + "a,x,1,1,,,\nb,0,-1,1,,,\nc,0,1,0,,,\nd,0,nan,1,,,\n", "line 2: .*line 3: .*line 4: .*; and 1 more"),
        (HEADER + "a,0,1,1,,,\na,0,1,1,,,\n", "line 3: job_id 'a' appears twice"),
        (HEADER + "a,0\n", "line 2|no job with a duration"),
        (HEADER.replace("status", "priority") + "a,0,1,1,,,5\n", "priority is '5'"),
    ],
)
def test_bad_workloads(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        read_workload(path)
