"""What training together must reach on two cores, against which of its peers; and rows that say whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.workers import SOLO, WAYS

EXACT, CLOSE = "waterflow", "waterflow, exact=False"  # the bits of each job alone, or close to them
OURS = (EXACT, CLOSE)
CALLS = ("waterflow, train()", "waterflow, exact=False, train()")
CAPTURED = ("one thread, captured",)
BEST = tuple(name for name, way in WAYS.items() if way.peer)
PROCESSES = ("process per job", "two processes")
TURNS = (SOLO,)
ENSEMBLE, COMPILED_ENSEMBLE = ("ensemble",), ("ensemble, compiled",)
STUDY_GOAL = 1.5


@dataclass(frozen=True)
class Goal:
    """In a set of jobs, the best of ``ours`` makes at least so many times the steps per second of the best of some peers."""

    what: str
    jobs: str
    against: str
    peers: tuple[str, ...]
    at_least: float
    ours: tuple[str, ...] = OURS


GOALS = (
    Goal("launch-bound, 2 jobs", "mlp x2", "best peer", BEST, 2.3),
    Goal("launch-bound, 2 jobs", "transformer x2", "best peer", BEST, 2.1),
    Goal("launch-bound, 8 of a shape", "mlp x8", "processes", PROCESSES, 4.0),
    Goal("launch-bound, 8 of a shape", "transformer x8", "processes", PROCESSES, 2.5),
    Goal("launch-bound, 8 of a shape", "mlp x8", "ensemble", ENSEMBLE, 4.0),
    Goal("launch-bound, 8 of a shape", "transformer x8", "ensemble", ENSEMBLE, 3.0),
    Goal("launch-bound, 8 of a shape", "mlp x8", "compiled ensemble", COMPILED_ENSEMBLE, 1.5),
    Goal("launch-bound, 8 of a shape", "transformer x8", "compiled ensemble", COMPILED_ENSEMBLE, 1.5),
    Goal("medium, 4 jobs", "lenet x4", "best peer", BEST, 1.05),
    Goal("medium, 4 jobs", "resnet8 x4", "best peer", BEST, 1.05),
    Goal("medium, 4 jobs", "lstm x4", "best peer", BEST, 1.3),
    Goal("saturating, 2 jobs", "resnet50 x2", "turns", TURNS, 1.0),
    Goal("saturating, 2 jobs", "bert x2", "turns", TURNS, 1.0),
    Goal("one job, one thread", "mlp x1", "eager", ("one thread, eager",), 2.8, CAPTURED),
    Goal("one job, one thread", "transformer x1", "eager", ("one thread, eager",), 2.4, CAPTURED),
)

Speeds = Mapping[str, Sequence[float]]  # steps per second of each way, one number for each round


def doubt(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Why two ways' speeds do not show which is faster: their spreads (lowest to highest) overlap, or are not known."""
    if len(ours) < 2:
        return "one round"
    return "tie" if min(ours) <= max(theirs) and min(theirs) <= max(ours) else ""


def best_of(speeds: Speeds, peers: Sequence[str]) -> str | None:
    """The peer with the highest median; None where none of them was measured."""
    measured = [peer for peer in peers if peer in speeds]
    return max(measured, key=lambda peer: report.median(list(speeds[peer])), default=None)


def row(
    what: str, jobs: str, against: str, ours: Sequence[float], theirs: Sequence[float], at_least: float,
) -> dict[str, Any]:  # fmt: skip
    """A ratio of speeds that were measured in the same rounds, beside its goal.

    Where there is doubt nothing is shown to be faster: that only holds a goal of one, with a median ratio of one or more.
    """
    ratio = report.ratio_of(list(ours), list(theirs))
    unclear = doubt(ours, theirs)
    return {
        "what": what, "jobs": jobs, "against": against, "ratio": ratio,
        "spread": report.spread([our / their for our, their in zip(ours, theirs, strict=True)]),
        "tie": unclear, "at least": at_least,
        "holds": ratio >= at_least and (not unclear or at_least == 1.0),
    }  # fmt: skip


def rows(speeds: Mapping[str, Speeds]) -> list[dict[str, Any]]:
    """A row for each goal whose set of jobs was measured, ``speeds`` by set and way.

    The ratios of what keeps all bits, and of ``wf.train``, stand beside where they were measured in the same rounds. A goal
    whose peers all failed has no ratio and does not hold.
    """
    made = []
    for goal in GOALS:
        of_set = speeds.get(goal.jobs)
        if of_set is None:
            continue
        peer, ours = best_of(of_set, goal.peers), best_of(of_set, goal.ours)
        if peer is None or ours is None:
            missing = " or ".join(goal.ours) if ours is None else goal.against
            made.append({
                "what": goal.what, "jobs": goal.jobs, "against": f"{goal.against}: {missing} was not measured",
                "at least": goal.at_least, "holds": False,
            })  # fmt: skip
            continue
        against = peer if goal.against == peer else f"{goal.against}: {peer}"
        entry = row(goal.what, goal.jobs, against, of_set[ours], of_set[peer], goal.at_least)
        entry["ours"] = ours
        for name, ways in (("exact", (EXACT,)), ("train()", CALLS)):
            if goal.ours is OURS and (way := best_of(of_set, ways)) is not None:
                entry[name] = report.ratio_of(list(of_set[way]), list(of_set[peer]))
        made.append(entry)
    return made
