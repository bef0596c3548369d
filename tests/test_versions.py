"""Two versions compared: what the interval and the verdict are, and that each process has its own version's waterflow."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versions
from benchmarks.versions import Bench, MeasurementError, Version, holds, interval_of_median

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_the_interval_is_of_order_statistics() -> None:
    values = [float(n) for n in range(1, 11)]
    random.Random(0).shuffle(values)
    assert interval_of_median(values) == (2.0, 9.0)  # ten: coverage 0.979; the third and eighth would have 0.891
    assert interval_of_median([float(n) for n in range(1, 21)]) == (6.0, 15.0)  # as in tables of the sign test
    assert interval_of_median([1.0] * 5) is None and interval_of_median([]) is None  # five: 0.9375 at most
    assert interval_of_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)


@pytest.mark.parametrize("count", range(6, 60))
def test_the_interval_is_the_narrowest_with_its_coverage(count: int) -> None:
    interval = interval_of_median([float(n) for n in range(count)])
    assert interval is not None
    rank = int(interval[0]) + 1  # of its lower end among values in order
    assert interval[1] == count - rank

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(k)) / 2**count

    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        interval = interval_of_median([draw.lognormvariate(0, 0.3) for _ in range(12)])
        assert interval is not None
        held += interval[0] <= 1 <= interval[1]
    assert held / 2000 >= 0.945


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.97] * 10, True),
        ([0.969] * 10, False),  # narrow, but without 1
        ([0.94] + [0.96] * 7 + [1.01] * 2, True),  # 0.96 .. 1.01
        ([0.90] * 2 + [0.96] * 6 + [1.01] * 2, False),  # has 1, but is 0.11 wide
        ([0.5] + [0.98] * 2, True),  # three pairs have a median
        ([0.96] * 3, False),  # but no interval
    ],
)
def test_a_row_holds_by_its_median_or_by_a_narrow_interval_around_one(ratios: list[float], expected: bool) -> None:
    random.Random(1).shuffle(ratios)
    assert holds(ratios) is expected
    made = versions.row("a", [10.0] * len(ratios), [10.0 * ratio for ratio in ratios])
    assert made["holds"] is expected and made["ratios"] == pytest.approx(ratios)


def checkout(name: str, folder: Path = ROOT) -> Version:
    return Version(name, folder, "c0ffee")


def test_pairs_begin_with_each_version_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, order = Bench(tmp_path), []

    def measure(version: Version, name: str) -> dict[str, Any]:
        order.append(version.name)
        return {"speed": {"a": 2.0, "b": 3.0}[version.name]}

    monkeypatch.setattr(bench, "measure", measure)
    made = bench.compare(checkout("a"), checkout("b"), "study", 4)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert made["ratios"] == [1.5] * 4 and made["old"] == 2.0 and made["holds"] and "differs" in made["note"]
    assert all(one == two for one, two in list(pairwise(order))[1::2])


def test_a_version_that_cannot_train_a_row_misses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Bench, version: Version, name: str) -> dict[str, Any]:
        if name == "study":
            raise MeasurementError("a: ImportError: no such thing")
        return {"speed": 1.0}

    monkeypatch.setattr(Bench, "measure", measure)
    saved = tmp_path / "folder" / "versions.json"
    assert versions.main([str(ROOT), str(ROOT), "--rows", "study", "mlp x2", "--pairs", "2", "--save", str(saved)]) == 1
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["row"], row["holds"]) for row in rows] == [("study", False), ("mlp x2", True)]
    assert rows[0]["why not"] == "a: ImportError: no such thing"
    assert versions.main([str(ROOT), str(ROOT), "--rows", "mlp x2", "--pairs", "2"]) == 0


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree's package in another folder, as an older version would be, which lacks the zoo; its ``benchmarks`` must not be used."""
    folder = tmp_path_factory.mktemp("other") / "checkout"
    shutil.copytree(ROOT / "waterflow", folder / "waterflow", ignore=shutil.ignore_patterns("csrc", "__pycache__", "zoo*"))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").write_text("raise ImportError('the benchmarks of the other version')\n")
    return folder


def test_two_equal_checkouts_are_measured_each_with_its_own_waterflow(copied: Path, tmp_path: Path) -> None:
    saved = tmp_path / "versions.json"
    command = [str(copied), str(ROOT), "--pairs", "1", "--rows", "mlp x2", "--seconds", "0", "--save", str(saved)]
    assert versions.main(command) in (0, 1)  # one short pair says nothing of speed
    (made,) = json.loads(saved.read_text())["rows"]
    assert "why not" not in made and made["speeds of old"][0] > 0 and made["speeds of new"][0] > 0


def test_a_study_is_measured_in_trials_per_hour() -> None:
    assert versions.measure_here("study", versions.WAY, 0.0, trials=2)["speed"] > 0


def test_a_process_that_has_another_waterflow_is_noticed(copied: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "definitions").mkdir()
    bench = Bench(tmp_path / "definitions", seconds=0.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MeasurementError, match="the package came from"):
        patch.setenv("PYTHONPATH", str(copied))
        bench.measure(checkout("empty", empty), "mlp x1")


def test_a_revision_is_checked_out_built_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repository"
    (root / "waterflow").mkdir(parents=True)
    (root / "waterflow" / "__init__.py").write_text("")
    (root / "setup.py").write_text(
        "import sys, pathlib\nassert sys.argv[1:] == ['build_ext', '--inplace']\npathlib.Path('waterflow/_C.so').write_text('')\n"
    )
    monkeypatch.setattr(versions, "ROOT", root)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *words], cwd=root, check=True)
    with versions.version("HEAD") as made:
        assert (made.folder / "waterflow" / "_C.so").exists() and not (root / "waterflow" / "_C.so").exists()
        assert made.commit == versions.git(root, "rev-parse", "HEAD")[:9]
        assert len(versions.git(root, "worktree", "list").splitlines()) == 2
    assert not made.folder.exists() and len(versions.git(root, "worktree", "list").splitlines()) == 1
    (root / "setup.py").write_text("raise RuntimeError('no compiler')\n")
    subprocess.run(["git", *identity, "commit", "-qam", "second"], cwd=root, check=True)
    with pytest.raises(SystemExit, match="does not build: RuntimeError: no compiler"), versions.version("HEAD"):
        pass
    assert len(versions.git(root, "worktree", "list").splitlines()) == 1


def test_what_is_no_version_and_no_row_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="'nowhere' is no folder with waterflow/__init__.py"), versions.version("nowhere"):
        pass
    (tmp_path / "waterflow").mkdir()
    (tmp_path / "waterflow" / "__init__.py").write_text("")
    with pytest.raises(SystemExit, match="Build it: cd .* && python setup.py"), versions.version(str(tmp_path)):
        pass
    with pytest.raises(SystemExit, match="knows no 'mpl x2'; there are study"):
        versions.parse(["a", "b", "--rows", "mpl x2"])
    with pytest.raises(SystemExit, match="--pairs must be 1 or more; got 0"):
        versions.parse(["a", "b", "--pairs", "0"])
