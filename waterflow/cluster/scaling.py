"""Speed of a submission on fewer or more devices than it asks for, from a table of measured throughputs."""

from __future__ import annotations

import csv
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from waterflow.cluster.submission import Submission
from waterflow.errors import WorkloadError

Scaling: TypeAlias = Callable[[Submission, int], float]  # speed on so many devices against those asked for
Curve: TypeAlias = Sequence[tuple[int, float]]  # devices, throughput; devices rise
COLUMNS = ("model", "global_batch", "num_gpus", "iters_s")


class LinearScaling:
    """Linear scaling: twice as fast on twice as many devices."""

    def __call__(self, submission: Submission, devices: int) -> float:
        """Return the speed on ``devices`` devices relative to that on the devices asked for."""
        return devices / submission.devices

    def __str__(self) -> str:
        return "linear"


LINEAR = LinearScaling()


class TableScaling:
    """Throughput by number of devices: linear between the points of a table, and constant beyond the last.

    A submission whose model is in the table takes one of the model's curves (they differ by batch size), any other one takes
    any curve; the choice depends on ``seed`` and the submission's id alone.
    """

    def __init__(self, curves: dict[str, Sequence[Curve]], seed: int = 0, name: str = "a table") -> None:
        self._curves = curves
        self._name = name
        self._all = [curve for each in curves.values() for curve in each]
        self._seed = seed
        self._of: dict[str, Curve] = {}
        self._known: dict[tuple[str, int, int], float] = {}

    @classmethod
    def read(cls, path: Path | str, seed: int = 0) -> TableScaling:
        """Read a CSV file with the columns ``COLUMNS``. Raises WorkloadError."""
        path = Path(path)
        if not path.is_file():
            raise WorkloadError(f"there is no file {path}")
        points: dict[tuple[str, str], dict[int, float]] = {}
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise WorkloadError(f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(COLUMNS)}")
            for row in reader:
                points.setdefault((row["model"], row["global_batch"]), {})[int(row["num_gpus"])] = float(row["iters_s"])
        curves: dict[str, list[Curve]] = {}
        for (model, _), curve in points.items():
            curves.setdefault(model, []).append(sorted(curve.items()))
        if not curves:
            raise WorkloadError(f"{path} has no throughputs")
        return cls({model: tuple(each) for model, each in curves.items()}, seed, str(path))

    def curve_of(self, submission: Submission) -> Curve:
        """Return the throughput curve of a submission."""
        curve = self._of.get(submission.id)
        if curve is None:
            own = self._curves.get(submission.model or "", self._all)
            curve = self._of[submission.id] = random.Random(f"{self._seed} {submission.id}").choice(own)
        return curve

    def __call__(self, submission: Submission, devices: int) -> float:
        """Return the speed on ``devices`` devices relative to that on the devices asked for."""
        key = (submission.id, devices, submission.devices)
        speed = self._known.get(key)
        if speed is None:
            curve = self.curve_of(submission)
            speed = self._known[key] = _at(curve, devices) / _at(curve, submission.devices)
        return speed

    def __str__(self) -> str:
        return f"{self._name} ({len(self._all)} curves, seed {self._seed})"


def _at(curve: Curve, devices: int) -> float:
    place = bisect_left(curve, (devices, 0.0))
    if place == len(curve):
        return curve[-1][1]
    right, fast = curve[place]
    if right == devices or place == 0:
        # Below the first point: proportional, as no measurement tells more.
        return fast * (devices / right if place == 0 else 1)
    left, slow = curve[place - 1]
    return slow + (fast - slow) * (devices - left) / (right - left)
