"""The parts of the benchmark that puts the simulator beside a live cluster."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster_simulated as benchmark
from benchmarks.cluster_simulated import Asked, Ran
from waterflow.cluster import DeviceState, Node, Part

NODES = [Node("a", 1), Node("b", 1)]


def test_the_workload_follows_from_its_seed() -> None:
    jobs = benchmark.workload(30, seed=1)
    assert jobs == benchmark.workload(30, seed=1) != benchmark.workload(30, seed=2)
    times = [asked.submitted for asked in jobs]
    assert times == sorted(times) and times[0] == 0.0 and times[-1] <= 1.0
    assert {asked.kind for asked in jobs} == set(benchmark.MODELS) and len({asked.id for asked in jobs}) == 30
    assert all(asked.steps in benchmark.STEPS[asked.kind] for asked in jobs)
    later = benchmark.spread(jobs, {asked.id: Ran(0.1, 2.0) for asked in jobs}, load=0.75)
    assert [asked.submitted for asked in later] == pytest.approx([40.0 * at for at in times])


@pytest.mark.parametrize("kind", list(benchmark.MODELS))
def test_jobs_can_be_sent_and_have_their_steps(kind: str) -> None:
    job = pickle.loads(Asked("x", kind, 3, 0.0, seed=0).payload())[0]
    batches = list(job.data)
    assert len(batches) == 3 and job.model()(batches[0][0]).shape == (32, 10)


def test_each_start_is_paid_and_who_finds_no_device_waits() -> None:
    jobs = [Asked(id, "mlp", 1, at, seed=0) for id, at in (("p", 0.0), ("q", 0.0), ("r", 0.5))]
    ran = {id: Ran(7.0, duration) for id, duration in (("p", 2.0), ("q", 3.0), ("r", 1.0))}
    done = benchmark.simulated(jobs, ran, 0.1, "fifo_backfill", NODES)
    assert done == pytest.approx({"p": 2.1, "q": 3.1, "r": 2.1 + 0.1 + 1.0 - 0.5})


def test_averages_are_compared_with_the_goal() -> None:
    alone = {"p": Ran(0.1, 1.0), "q": Ran(0.1, 2.0)}
    live = {"p": Ran(0.1, 1.1), "q": Ran(1.7, 2.2)}  # 1.2 and 3.9
    found = benchmark.compared(live, {"p": 1.1, "q": 3.8})
    assert found["difference, %"] == pytest.approx(100 * (4.9 / 5.1 - 1))
    assert found["most, s"] == pytest.approx(0.1) and benchmark.longer(live, alone) == pytest.approx(10.0)


@pytest.mark.parametrize(("differences", "holds"), [((-30.0, 4.9, 5.0), True), ((5.1,), False), ((-5.1, -6.0, 1.0), False)])
def test_the_median_of_the_trials_is_held_against_the_goal(differences: tuple[float, ...], holds: bool) -> None:
    trials = [{"difference, %": one, "measured before, %": 9.0, "with live durations, %": 0.1} for one in differences]
    found = benchmark.judged(trials)
    assert found["holds"] == holds and found["trials"] == len(trials)
    assert found["difference, %"] == sorted(differences)[len(differences) // 2]


def progress(steps: int, of: int | None, phase: Any = "training") -> Part:
    """What a device tells of so many steps."""
    return Part("p", 1, phase, "guaranteed", steps=steps, fraction=steps / of if of else None, seconds=0.5 * steps)


def test_a_duration_is_told_by_the_pace_of_the_first_fifth() -> None:
    reports = [(at, progress(steps, 100)) for at, steps in ((1.0, 5), (2.0, 15), (3.0, 25), (9.0, 30))]
    assert benchmark.foretold(reports) == pytest.approx(3.0 + 75 * 2.0 / 20)
    assert benchmark.foretold(reports, 0.1) == pytest.approx(2.0 + 85 * 1.0 / 10)
    with pytest.raises(SystemExit, match="p ended before two reports"):
        benchmark.foretold(reports[:2])
    with pytest.raises(SystemExit, match="more steps"):
        benchmark.foretold([(1.0, progress(5, None)), (2.0, progress(95, None))])


def test_reports_are_heard_on_their_way() -> None:
    told = [progress(0, 10, "beginning"), progress(0, 10), progress(2, 10), progress(2, 10)]

    class Told:
        def listen(self, timeout: float) -> list[DeviceState]:
            return [DeviceState("a", 1, "here", 1, 0, 0.5, 0, (told.pop(0),))]

        def nodes(self) -> list[Node]:
            return NODES

    heard = benchmark.Listening(Told())  # type: ignore[arg-type]
    for _ in range(4):
        assert len(heard.listen(0.0)) == 1 and heard.nodes() == NODES
    [(at, report)] = heard.reports["p"]
    assert report.steps == 2 and at >= 0.0


@pytest.mark.campaign
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < benchmark.DEVICES, reason="a core for each device")
def test_a_live_cluster_of_this_machine(tmp_path: Path) -> None:
    jobs = [Asked(f"{number}", "mlp", 5 if number else 2000, 0.05 * number, seed=number) for number in range(3)]
    live = benchmark.Live("local", "fifo_backfill", tmp_path)
    try:
        crowded, together = live.crowded(jobs[::-1], "before"), live.together(jobs, 1)
        told = live.told({"0": together["0"]}, 1)
    finally:
        live.close()
    assert list(together) == ["0", "1", "2"] == sorted(crowded)
    assert all(ran.start > 0 and ran.duration > 0 for found in (crowded, together) for ran in found.values())
    assert told["0"].start == together["0"].start and told["0"].duration > 0
