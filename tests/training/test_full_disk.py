"""train(checkpoint=) on a disk that is full: training goes on, and whoever reads the log knows what is not written."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import images
from waterflow.training.checkpoint import write
from waterflow.training.checkpoint_dir import Checkpoints

STEPS = 24


def job(act: Any = lambda step: None, name: str = "wide") -> wf.Job:
    """Its state has more than 100 KiB."""

    class Data:
        def __iter__(self) -> Any:
            for step, batch in enumerate(images(STEPS)):
                act(step)
                yield batch

    return wf.Job(
        name, lambda: nn.Sequential(nn.Linear(6, 3000), nn.Linear(3000, 4)), Data(), lambda p: torch.optim.SGD(p, lr=1e-3),
        loss=F.cross_entropy, seed=1,
    )  # fmt: skip


# No file may grow beyond 32 KiB from step 8 on (EFBIG, as ENOSPC comes), until step 16 where the first argument says so.
PROGRAM = """
import json, logging, resource, sys, time
from pathlib import Path
from tests.training.test_full_disk import job
import waterflow as wf

until, folder = int(sys.argv[1]), Path(sys.argv[2])
said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("waterflow").addHandler(Said(logging.WARNING))
kept = []
def act(step):
    time.sleep(0.06)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if step == 8:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32768, hard))
    if step in (8, 15):
        time.sleep(0.3)
        kept.append(sorted(path.name for path in folder.glob("*/*")))
    if step == until:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
result = wf.train([job(act)], lanes=1, memory="1GiB", on_error="continue",
                  checkpoint=wf.Checkpoints(folder, every=None, steps=2))[0]
print(json.dumps({"status": result.status, "losses": result.losses, "said": said, "kept": kept}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("until", [16, 1000], ids=["for a while", "to the end"])
def test_training_goes_on_where_the_disk_is_full(until: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM, str(until), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=100, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    expected = wf.train([job()], lanes=1, memory="1GiB")[0]
    assert told["status"] == "completed" and told["losses"] == list(expected.losses)
    before, during = told["kept"]
    assert before == during and len(before) == 2  # whole ones, and no half of another
    first, *others = told["said"]
    assert "job 'wide' could not be written" in first and f"free space in {tmp_path}" in first
    files = [path.name for path in tmp_path.glob("*/*")]
    if until == 16:
        assert not others and files == ["result.state"]
    else:
        (last,) = others
        assert "are old" in last and f"'wide' (step {int(Path(before[-1]).stem[5:])})" in last and sorted(files) == before
        assert not list(tmp_path.glob("**/.*.part"))
    read: list[int] = []
    again = wf.train([job(read.append)], lanes=1, memory="1GiB", checkpoint=tmp_path)[0]
    assert again.losses == expected.losses and bool(read) == (until != 16)


def failing(error: Exception) -> Any:
    def save(*_: Any) -> None:
        raise error

    return save


@pytest.mark.needs_time("checkpoints are written by the clock")
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"),
     RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")],
    ids=["ENOSPC", "EDQUOT", "RuntimeError"],
)  # fmt: skip
def test_nothing_is_raised_and_one_warning_says_so(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.save", failing(error))
    jobs = [job(lambda step: time.sleep(0.03), name) for name in ("a", "b")]
    with caplog.at_level("WARNING", logger="waterflow"):
        results = wf.train(
            jobs, lanes=2, memory="1GiB", checkpoint=wf.Checkpoints(tmp_path, every=None, steps=2), on_error="continue"
        )
    assert [result.status for result in results] == ["completed"] * 2
    told = [record.getMessage() for record in caplog.records]
    first, last = [one for one in told if "runs eagerly" not in one]
    assert str(error) in first and "could not be written" in first
    assert "'a' (none)" in last and "'b' (none)" in last
    assert [path for path in tmp_path.glob("**/*") if path.is_file() and path.name not in ("in-use", "seeds.json")] == []


@pytest.mark.needs_time("checkpoints are written by the clock")
def test_a_result_is_written_as_soon_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that ends while the disk is full, beside another one that trains on."""
    good, torch_save = [False], torch.save

    def save(*given: Any) -> None:
        if not good[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        torch_save(*given)

    def act(step: int) -> None:
        time.sleep(0.03)
        good[0] = step > 20

    monkeypatch.setattr("torch.save", save)
    wf.train([job(name="short"), job(act, "long")], lanes=2, memory="1GiB", checkpoint=tmp_path)
    assert len(list(tmp_path.glob("*/result.state"))) == 2


def test_seeds_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level("WARNING", logger="waterflow"):
        results = wf.train([job()], lanes=1, memory="1GiB", checkpoint=tmp_path)
    assert results[0].status == "completed" and "seeds.json could not be written" in caplog.text
    assert not list(tmp_path.glob(".*"))


@pytest.mark.needs_time("checkpoints are written by the clock")
def test_a_state_that_cannot_be_copied_ends_no_other_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> Any:
            raise LookupError("on purpose")

    broken, good = job(lambda step: time.sleep(0.03), "broken"), job(lambda step: time.sleep(0.04), "good")
    broken.scheduler = lambda optimizer: Broken(optimizer, 1)
    seen: list[Path] = []
    good.evaluate = lambda model: seen.extend(tmp_path.glob("good-*/step-*")) or 0.0
    with caplog.at_level("WARNING", logger="waterflow"):
        results = wf.train([broken, good], lanes=2, memory="1GiB", checkpoint=Checkpoints(tmp_path, every=None, steps=2))
    assert [result.status for result in results] == ["completed"] * 2 and seen
    assert "job 'broken' trains without checkpoints: on purpose" in caplog.text


def test_the_error_of_the_disk_is_raised_and_not_one_of_torchs_writer(tmp_path: Path) -> None:
    """On a file system that is full from the start (/dev/full takes nothing)."""

    class Full:
        def __init__(self) -> None:
            self.file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    from waterflow.training import checkpoint

    full = Full().file
    through = checkpoint._Through(full)
    torch.save({"a": torch.zeros(1000)}, through)
    assert isinstance(through.error, OSError) and through.error.errno == errno.ENOSPC
    full.close()
    write(tmp_path / "state", {"a": torch.zeros(1000)}, {"job": "a", "steps": 1})
    assert (tmp_path / "state").stat().st_size > 4000
