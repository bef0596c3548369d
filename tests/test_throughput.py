"""The throughput benchmark: all ways do the same work, and its figures are what the tracks of the jobs say."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import agreement, goals, report, throughput
from benchmarks.throughput import Measured
from benchmarks.ways import RUNNERS, Track
from benchmarks.workers import SOLO, WAYS, Crew, Round, Way, WayError
from benchmarks.workloads import SETS, WORKLOADS, JobSet, JobSpec, MadeJob, mixed, same

pytestmark = pytest.mark.slow

STEPS = 3
CHANGES = 1e-6  # of how far training moved the weights


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled ways without Inductor, which takes a minute: all of torch.compile but the last stage."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def trained(runner: str, jobs: JobSet) -> tuple[list[Track], list[dict[str, torch.Tensor]]]:
    made = RUNNERS[runner]([MadeJob(spec, exact=True) for spec in jobs.jobs])
    tracks = made.run([STEPS] * len(jobs.jobs))
    weights = [{k: v.clone() for k, v in made.weights(number).items()} for number in range(len(jobs.jobs))]
    made.close()
    return tracks, weights


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], names: list[str]) -> float:
    return float(sum((some[name] - others[name]).square().sum() for name in names)) ** 0.5


def tiny_model(dropout: float) -> nn.Module:
    layers = [nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 64)]
    return nn.Sequential(*layers)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload of this process alone, as the deep MLP but for its model."""
    monkeypatch.setitem(WORKLOADS, "tiny", replace(WORKLOADS["mlp"], name="tiny", build=tiny_model))
    return "tiny"


@pytest.mark.parametrize("runner", [name for name in RUNNERS if name != "eager"])
@pytest.mark.parametrize("workload", ["tiny", "lenet"])
def test_every_way_trains_the_same(workload: str, runner: str, tiny: str, quick_compile: None) -> None:
    if workload != tiny and "compiled" in runner:
        pytest.skip("takes ten seconds and shows the same")
    jobs = same(workload, 2)
    tracks, weights = trained(runner, jobs)
    expected, moved = trained("eager", jobs)
    assert agreement.apart(tracks, expected) < agreement.TOLERANCE
    for number, spec in enumerate(jobs.jobs):
        start = MadeJob(spec, exact=True).model
        parameters = [name for name, _ in start.named_parameters()]
        buffers = [name for name, buffer in start.named_buffers() if buffer.is_floating_point()]
        for names in (parameters, buffers):
            whole = distance(moved[number], start.state_dict(), names)
            assert whole > 0
            assert distance(weights[number], moved[number], names) < CHANGES * whole


@pytest.mark.parametrize("runner", RUNNERS)
def test_tracks_have_every_step_in_order(runner: str, tiny: str, quick_compile: None) -> None:
    made = RUNNERS[runner]([MadeJob(spec) for spec in same(tiny, 2).jobs])
    counts = [4, 4] if "ensemble" in runner else [4, 2]
    for _ in range(2):
        tracks = made.run(counts)
        assert [len(track.ends) for track in tracks] == counts == [len(track.losses) for track in tracks]
        for track in tracks:
            times = [track.begin, *track.ends]
            assert times == sorted(times) and times[0] < times[-1]
    made.close()


@pytest.mark.parametrize("runner", ["eager", "threads", "ensemble", "steps", "train"])
def test_dropout_is_on_where_it_is_timed(runner: str) -> None:
    spec = JobSpec("lstm", 0)
    job = MadeJob(spec)
    for module in job.model.modules():
        if isinstance(module, (nn.Dropout, nn.LSTM)):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    without = float(job.workload.loss(job.model, job.batches[0]).detach())
    made = RUNNERS[runner]([MadeJob(spec) for _ in range(4)])
    firsts = [track.losses[0] for track in made.run([1] * 4)]
    made.close()
    # A mask may change a loss by little: all four are near it only without masks.
    assert not all(first == pytest.approx(without, rel=1e-5) for first in firsts)


def test_an_ensemble_with_another_learning_rate_is_noticed(tiny: str) -> None:
    expected, _ = trained("eager", same(tiny, 2))
    made = RUNNERS["ensemble"]([MadeJob(spec, exact=True) for spec in same(tiny, 2).jobs])
    made.ensemble.update.rates *= 1.001  # type: ignore[attr-defined]
    assert agreement.apart(made.run([STEPS] * 2), expected) > agreement.TOLERANCE


@pytest.mark.parametrize("seed", [0, 1])
def test_the_deep_mlp_learns_from_numbers_that_are_not_denormal(seed: int) -> None:
    job = MadeJob(JobSpec("mlp", seed))
    optimizer = job.optimizer(job.model.parameters())
    tiny = torch.finfo(torch.float32).tiny
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = job.workload.loss(job.model, job.batches[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        held = [*job.model.parameters(), *(p.grad for p in job.model.parameters())]
        held += [value for entries in optimizer.state.values() for value in entries.values()]
        assert not any(((one != 0) & (one.abs() < tiny)).any() for one in held if one is not None)
    assert losses[-1] < 0.5 * losses[0]


def test_an_ensemble_steps_all_jobs_at_once() -> None:
    made = RUNNERS["ensemble"]([MadeJob(spec) for spec in same("lenet", 2).jobs])
    with pytest.raises(ValueError, match=r"got \[2, 3\] steps"):
        made.run([2, 3])


# -- processes


def test_processes_train_the_same_and_keep_the_order_of_jobs() -> None:
    jobs = same("mlp", 3)
    expected = RUNNERS["eager"]([MadeJob(spec, exact=True) for spec in jobs.jobs]).run([3, 3, 3])
    for name in ("process per job", "two processes"):
        crew = Crew(WAYS[name], jobs, exact=True)
        try:
            assert len(crew.members) == {"process per job": 3, "two processes": 2}[name]
            assert agreement.apart(crew.warm, expected) < agreement.TOLERANCE
            one = crew.run([1, 2, 3])
        finally:
            crew.close()
        assert [len(track.ends) for track in one.tracks] == [1, 2, 3]
        assert one.steps == 6 and one.seconds > 0 and one.peak_bytes > 0


def test_what_a_way_cannot_do_is_told_and_the_others_are_measured() -> None:
    with pytest.raises(WayError, match="RuntimeError"):
        Crew(WAYS["ensemble"], mixed("launch-bound", 2))
    comparison = throughput.Comparison(same("mlp", 2), [2, 2])
    comparison.measured = {name: Measured([]) for name in (SOLO, "ensemble")}
    comparison.measured["ensemble"].failure = "not here"
    try:
        comparison.run(2)
    finally:
        comparison.close()
    assert [len(done.rounds) for done in comparison.measured.values()] == [2, 0]
    assert comparison.measured[SOLO].ready_seconds > 0 and not comparison.crews
    rows = throughput.table(same("mlp", 2), comparison.measured)
    assert rows[0]["normalized"] == pytest.approx(1, abs=0.5) and rows[1]["why not"] == "not here"


def test_a_first_loss_that_eager_training_does_not_have_is_refused() -> None:
    jobs, other = same("lenet", 1), same("lstm", 1)  # without dropout, and with it
    eager = [Track(0, [1, 2], [2.0, 1.0])]
    agreement.check_warm_up(jobs, WAYS[SOLO], [Track(0, [1, 2], [2.0002, 1.5])], eager)
    agreement.check_warm_up(other, WAYS[SOLO], [Track(0, [1, 2], [2.1, 1.5])], eager)
    for which, wrong in ((jobs, 2.02), (jobs, float("nan")), (other, 2.5)):
        with pytest.raises(agreement.DisagreementError, match="number 0 of"):
            agreement.check_warm_up(which, WAYS[SOLO], [Track(0, [1, 2], [wrong, 1.0])], eager)


def test_a_way_that_trains_something_else_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(way: object, jobs: JobSet) -> list[Track]:
        return [Track(0, [1], [1.0 if way is not WAYS["waterflow"] else 1.00001]) for _ in jobs.jobs]

    monkeypatch.setattr(agreement, "_losses", losses)
    with pytest.raises(agreement.DisagreementError, match="'waterflow' trains 'mlp' differently"):
        agreement.rows("mlp")


# -- figures


def turns() -> Round:
    """Two jobs, one after the other: four steps a second, then two."""
    return Round([Track(0.0, [0.25, 0.5, 0.75, 1.0], [0.0] * 4), Track(1.0, [1.5, 2.0], [0.0] * 2)], 10)


def together() -> Round:
    """Both at once, the first as fast as alone, the second twice as fast."""
    return Round([Track(0.0, [0.25, 0.5, 0.75, 1.0], [0.0] * 4), Track(0.0, [0.25, 0.5], [0.0] * 2)], 20)


def test_normalized_speeds_follow_from_the_tracks() -> None:
    jobs = JobSet("two", (JobSpec("mlp", 0), JobSpec("transformer", 1)))
    measured = {SOLO: Measured([turns(), turns()]), "process per job": Measured([together(), together()])}
    solo, both = throughput.table(jobs, measured)
    assert (solo["steps/s"], solo["normalized"], solo["normalized by job"]) == (3.0, 1.0, [0.5, 0.5])
    assert (both["steps/s"], both["normalized"], both["normalized by job"]) == (6.0, 2.0, [1.0, 2.0])
    assert (solo["p99 ms"], both["p99 ms"]) == (500.0, 250.0)


def test_percentile_is_the_highest_of_few() -> None:
    assert throughput.percentile([1, 2, 3], 0.99) == 3
    assert throughput.percentile(list(range(1000)), 0.99) == 990


def test_spreads_that_overlap_are_a_tie_and_hold_no_goal_above_one() -> None:
    apart = goals.row("w", "j", "p", [3.0, 3.2], [1.0, 1.1], 2.0)
    assert apart["tie"] == "" and apart["holds"] and apart["ratio"] == pytest.approx(2.95, abs=0.01)
    over = goals.row("w", "j", "p", [1.0, 1.3], [0.9, 1.1], 1.05)
    assert over["tie"] == "tie" and over["ratio"] > 1.05 and not over["holds"]
    assert goals.row("w", "j", "p", [1.0, 1.3], [0.9, 1.1], 1.0)["holds"]
    assert not goals.row("w", "j", "p", [0.9, 1.1], [1.0, 1.3], 1.0)["holds"]
    assert not goals.row("w", "j", "p", [3.0], [1.0], 2.0)["holds"]  # one round has no spread


def test_goals_are_against_the_best_of_their_peers() -> None:
    speeds = {"mlp x2": {SOLO: [1.0, 1.0], "ensemble": [2.0, 2.1], "waterflow": [5.0, 5.2], goals.CALLS[0]: [4.0, 4.2]}}
    (entry,) = goals.rows(speeds)
    assert entry["against"] == "best peer: ensemble" and entry["holds"]
    assert entry["ratio"] == entry["exact"] == pytest.approx(2.49, abs=0.02) and entry["train()"] == pytest.approx(2.0)


def test_the_better_of_our_own_ways_counts_and_is_named() -> None:
    speeds = {"mlp x2": {SOLO: [1.0, 1.0], goals.EXACT: [2.0, 2.0], goals.CLOSE: [3.0, 3.1]}}
    (entry,) = goals.rows(speeds)
    assert entry["ours"] == goals.CLOSE and entry["ratio"] > entry["exact"] == pytest.approx(2.0)


def test_a_goal_without_its_peer_does_not_hold() -> None:
    entries = goals.rows({"mlp x8": {SOLO: [1.0, 1.0], goals.CLOSE: [9.0, 9.0], "process per job": [1.5, 1.6]}})
    assert [entry["holds"] for entry in entries] == [True, False, False]
    assert "was not measured" in entries[1]["against"]


def test_every_goal_can_be_measured() -> None:
    for goal in goals.GOALS:
        jobs = SETS[goal.jobs]
        assert all(WAYS[way].fits(jobs) for way in goal.ours)
        assert any(WAYS[peer].fits(jobs) for peer in goal.peers)


def test_large_sets_of_large_models_are_neither_kept_nor_compiled() -> None:
    for name, kept in (("resnet50 x2", True), ("resnet50 x4", False), ("mlp x8", True), ("saturating mix x8", False)):
        jobs = SETS[name]
        assert jobs.kept == kept == WAYS["one after the other, compiled"].fits(jobs)
        assert WAYS[SOLO].fits(jobs) and WAYS["waterflow"].fits(jobs) and WAYS["process per job"].fits(jobs)


def test_sets_that_are_not_kept_are_made_again_for_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[str] = []
    made: list[str] = []

    class Fake:
        ready_seconds = 1.0

        def __init__(self, way: Way, jobs: JobSet) -> None:
            self.name, self.warm = way.name, [Track(0, [1], [1.0]) for _ in jobs.jobs]
            made.append(way.name)
            alive.append(way.name)
            assert jobs.kept or len(alive) == 1

        def run(self, steps: list[int]) -> Round:
            return turns()

        def close(self) -> None:
            alive.remove(self.name)

    monkeypatch.setattr(throughput, "Crew", Fake)
    monkeypatch.setattr(throughput, "PAUSE", 0)
    for name, lives in (("resnet50 x4", 3), ("mlp x4", 1)):
        made.clear()
        measured = throughput.measure(SETS[name], SETS[name].steps(), 3)
        assert {way: made.count(way) for way in measured} == dict.fromkeys(measured, lives)
        assert all(len(done.rounds) == 3 for done in measured.values()) and not alive


def test_all_kinds_come_with_two_four_and_eight_jobs_same_and_mixed() -> None:
    for count in (2, 4, 8):
        assert {f"{name} x{count}" for name in WORKLOADS} <= SETS.keys()
        assert {f"{kind} mix x{count}" for kind in ("launch-bound", "medium", "saturating")} <= SETS.keys()
    for jobs in SETS.values():
        assert len(set(jobs.jobs)) == len(jobs.jobs) and all(count >= 2 for count in jobs.steps())


# -- the command


def test_names_that_match_nothing_are_told() -> None:
    with pytest.raises(SystemExit, match="matches no set of jobs; there are mlp x1"):
        throughput.main(["--only", "mpl*"])


def test_the_command_writes_tables_and_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(agreement, "rows", lambda workload: [{"workload": workload, "losses apart": 0.0}])
    seen = []

    def measure(jobs: JobSet, steps: list[int], repeats: int) -> dict[str, Measured]:
        seen.append((jobs.name, repeats))
        return {SOLO: Measured([turns()] * repeats), "ensemble": Measured([], failure="not here"),
                "waterflow": Measured([together()] * repeats)}  # fmt: skip

    monkeypatch.setattr(throughput, "measure", measure)
    assert throughput.main(["--only", "mlp x[24]", "--repeats", "2", "--save"]) == 1  # 2.0x is below the goal
    assert seen == [("mlp x2", 2), ("mlp x4", 2)]
    saved = json.loads((tmp_path / "throughput.json").read_text())
    assert [row["jobs"] for row in saved["speed"]] == ["mlp x2"] * 3 + ["mlp x4"] * 3
    assert [(row["jobs"], row["holds"]) for row in saved["rows"]] == [("mlp x2", False)]
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "not here" in capsys.readouterr().out
