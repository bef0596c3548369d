"""Whether all ways of training do the same work: a job's losses must be the same in each of them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.ways import Track
from benchmarks.workers import SOLO, WAYS, Crew, Way, WayError
from benchmarks.workloads import WORKLOADS, JobSet, same

TOLERANCE = 1e-6  # of a loss, without dropout and in float64, over all steps of a warm-up
FIRST_LOSS = 1e-3  # in float32 before anything was amplified
WITH_DROPOUT = 0.1  # where each way draws its own random numbers


class DisagreementError(AssertionError):
    """A way trains something else than the others."""


def apart(ours: Sequence[Track], theirs: Sequence[Track]) -> float:
    """The largest relative difference of two losses of the same job and step; infinite where one is not a number."""
    differences = [
        abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.losses, other.losses, strict=True)
    ]
    return max(differences)


def rows(workload: str) -> list[dict[str, Any]]:
    """Each way that need not be compiled against eager training, two jobs of one workload.

    Raises:
        DisagreementError: A way's losses are further from eager ones than the tolerance.
        WayError: Eager training itself fails.
    """
    jobs = same(workload, 2)
    ways = [WAYS[SOLO], *(w for w in WAYS.values() if w.name != SOLO and w.fits(jobs) and not w.compiles)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reference, *others = pool.map(lambda way: _losses(way, jobs), ways)
    if isinstance(reference, WayError):
        raise reference
    made: list[dict[str, Any]] = []
    for way, tracks in zip(ways[1:], others, strict=True):
        if isinstance(tracks, WayError):
            made.append({"workload": workload, "way": way.name, "why not": str(tracks)})
            continue
        difference = apart(tracks, reference)
        if difference > TOLERANCE:
            raise DisagreementError(
                f"{way.name!r} trains {workload!r} differently from eager training: losses are up to "
                f"{difference:.1e} apart, {TOLERANCE:.0e} is allowed"
            )
        made.append({"workload": workload, "way": way.name, "losses apart": difference})
    return made


def _losses(way: Way, jobs: JobSet) -> list[Track] | WayError:
    try:
        crew = Crew(way, jobs, exact=True)
    except WayError as error:
        return error
    crew.close()
    return crew.warm


def check_warm_up(jobs: JobSet, way: Way, tracks: Sequence[Track], eager: Sequence[Track]) -> None:
    """Compare what a way did in its warm-up, as it is timed, with eager training of the same jobs: the first losses.

    Raises:
        DisagreementError: They are further apart than rounding, or other random numbers of dropout, could bring them.
    """
    for spec, track, other in zip(jobs.jobs, tracks, eager, strict=True):
        allowed = WITH_DROPOUT if WORKLOADS[spec.workload].dropout else FIRST_LOSS
        got, expected = track.losses[0], other.losses[0]
        if not abs(got - expected) <= allowed * abs(expected):
            raise DisagreementError(
                f"{way.name!r} begins {spec.workload!r} number {spec.number} of {jobs.name!r} with a loss of {got:.6g}; "
                f"eager training begins with {expected:.6g}"
            )
