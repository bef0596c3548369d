"""train(checkpoint=): a second call goes on where the first one was interrupted, failed, or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import waterflow as wf
from tests.support import Net, images

EPOCHS, STEPS = 3, 10


def jobs_of(act: Callable[[str, int], None] = lambda name, step: None, seed: int | None = None) -> list[wf.Job]:
    """Three jobs; ``act`` is called with a job's name and the batch that it reads, counted in this process."""

    def make(name: str, dropout: float) -> wf.Job:
        read = [0]

        class Data:
            def __iter__(self) -> Any:
                for batch in images(STEPS):
                    act(name, read[0])
                    read[0] += 1
                    yield batch

        return wf.Job(
            name, lambda: Net(dropout=dropout), Data(), lambda p: torch.optim.AdamW(p, lr=1e-2),
            loss=F.cross_entropy, evaluate=lambda model: float(model(torch.ones(2, 6)).sum()), epochs=EPOCHS, seed=seed,
        )  # fmt: skip

    return [make("a/b", 0.0), make("a b", 0.2), make("c", 0.4)]


def undisturbed() -> wf.Results:
    torch.manual_seed(0)
    return wf.train(jobs_of(), lanes=2, memory="1GiB")


def assert_equal(one: wf.Results, other: wf.Results) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.name, mine.status) == (theirs.name, theirs.status)
        assert mine.losses == theirs.losses and mine.metrics == theirs.metrics
        assert mine.state_dict is not None and theirs.state_dict is not None
        for name, tensor in mine.state_dict.items():
            assert torch.equal(tensor, theirs.state_dict[name]), name


class Fault(Exception):
    """What breaks a job on purpose."""


def test_results_of_before_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="waterflow")
    found = [
        wf.train([Net()], data=images(2), optimizer=lambda p: torch.optim.SGD(p, lr=lr), loss=F.cross_entropy,  # noqa: B023
                 checkpoint=tmp_path)[0] for lr in (0.1, 0.9)
    ]  # fmt: skip
    assert found[0].losses == found[1].losses
    (told,) = [line for line in caplog.messages if line.startswith("1 jobs had ended in")]
    assert str(tmp_path) in told and "their stored results are returned" in told


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_goes_on_after_a_failure(tmp_path: Path) -> None:
    read: dict[str, int] = {}

    def fail(name: str, step: int) -> None:
        read[name] = step + 1
        if name == "c":
            time.sleep(0.02)
            if step == 14:
                raise Fault

    checkpoints = wf.Checkpoints(tmp_path, every=None, steps=5)
    torch.manual_seed(0)
    with pytest.raises(Fault):
        wf.train(jobs_of(fail), lanes=2, memory="1GiB", checkpoint=checkpoints, max_concurrent=1)
    assert read["c"] == 15
    last = max(tmp_path.glob("c-*/step-*.state"), key=steps_of)  # the one before may still be there
    read.clear()
    torch.manual_seed(1)  # seeds are those of the first call
    again = wf.train(jobs_of(lambda name, step: read.update({name: step + 1})), lanes=2, checkpoint=str(tmp_path))
    assert_equal(again, undisturbed())
    assert read == {"c": EPOCHS * STEPS - steps_of(last) // STEPS * STEPS}  # the others had ended
    read.clear()
    assert_equal(wf.train(jobs_of(fail), checkpoint=tmp_path), again)
    assert not read
    assert not list(tmp_path.glob("*/step-*"))  # results have taken their place


def test_jobs_that_had_not_begun_keep_their_seeds(tmp_path: Path) -> None:
    def fail(name: str, step: int) -> None:
        if name == "a/b" and step == 3:
            raise Fault

    torch.manual_seed(0)
    with pytest.raises(Fault):
        wf.train(jobs_of(fail), memory="1GiB", checkpoint=tmp_path, max_concurrent=1)
    torch.manual_seed(1)
    assert_equal(wf.train(jobs_of(), memory="1GiB", checkpoint=tmp_path), undisturbed())


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_a_module_that_was_trained_already(tmp_path: Path) -> None:
    """One that is handed in begins as the first call found it, however far that call changed it."""
    torch.manual_seed(0)
    module = Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def job(act: Callable[[int], None]) -> wf.Job:
        def data() -> Any:
            for number, batch in enumerate(images(STEPS)):
                act(number)
                yield batch

        return wf.Job("net", module, lambda: data(), lambda p: torch.optim.SGD(p, 0.1), loss=F.cross_entropy, seed=1)

    expected = wf.train([job(lambda number: None)], lanes=1, memory="1GiB")[0]
    module.load_state_dict(before)

    def fail(number: int) -> None:
        time.sleep(0.03)
        if number == 7:
            raise Fault

    with pytest.raises(Fault):
        wf.train([job(fail)], lanes=1, memory="1GiB", checkpoint=wf.Checkpoints(tmp_path, every=None))
    with torch.no_grad():
        module.last.weight.fill_(0.0)
    result = wf.train([job(lambda number: None)], lanes=1, memory="1GiB", checkpoint=tmp_path)[0]
    assert result.losses == expected.losses
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(before)
    wf.train([job(fail)], checkpoint=tmp_path)  # it has ended, and its module is the trained one
    assert all(torch.equal(tensor, trained[name]) for name, tensor in module.state_dict().items())


PROGRAM = """
import pathlib, signal, sys, threading, time
import torch
from tests.training.test_checkpoint_dir import jobs_of
import waterflow as wf

signal.signal(signal.SIGINT, signal.default_int_handler)
folder, every = sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2])
halfway = threading.Barrier(3)
def act(name, step):
    time.sleep(0.01)
    if step == 15:  # no job ends before all are here and have what the test looks for
        first = halfway.wait() == 0
        while every is not None and len({path.parent for path in pathlib.Path(folder).glob("*/step-*.state")}) < 3:
            time.sleep(0.01)
        if first:
            print("under way", flush=True)

torch.manual_seed(0)
try:
    wf.train(jobs_of(act), lanes=2, memory="1GiB", checkpoint=wf.Checkpoints(folder, every=None, steps=every))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.needs_time("a process is killed, and another goes on: the README promises its bits")
@pytest.mark.parametrize(
    "how, every",
    [pytest.param(signal.SIGKILL, 3, id="killed"), pytest.param(signal.SIGINT, None, id="Ctrl-C", marks=pytest.mark.slow)],
)
def test_goes_on_in_another_process(how: signal.Signals, every: int | None, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "under way\n", process.stderr.read()
            process.send_signal(how)
            if how is signal.SIGINT:
                assert process.stdout.read() == "interrupted\n" and process.stderr.read() == ""
            process.wait()
        finally:
            process.kill()
    written = {path.parent.name: path for path in sorted(tmp_path.glob("*/step-*.state"))}
    assert len(written) == 3
    read: list[str] = []
    torch.manual_seed(0)
    again = wf.train(jobs_of(lambda name, step: read.append(name)), lanes=2, memory="1GiB", checkpoint=tmp_path)
    assert_equal(again, undisturbed())
    assert not list(tmp_path.glob("**/.*.part"))
    if how is signal.SIGINT:  # nothing that was trained is lost
        assert sum(steps_of(path) for path in written.values()) >= 40


def steps_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def stopped_at(step: int, folder: Path, **settings: Any) -> None:
    """Leave checkpoints of job c, the last one at about that step."""

    def act(name: str, number: int) -> None:
        if name == "c":
            time.sleep(0.02)
            if number == step:
                raise Fault

    torch.manual_seed(0)
    with pytest.raises(Fault):
        wf.train(jobs_of(act)[2:], lanes=1, memory="1GiB", checkpoint=wf.Checkpoints(folder, every=None, **settings))


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_the_one_before_where_the_last_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    expected = wf.train(jobs_of()[2:], lanes=1, memory="1GiB")
    stopped_at(20, tmp_path, steps=4, keep=2)
    _, last = sorted(tmp_path.glob("c-*/step-*.state"))
    last.write_bytes(last.read_bytes()[:-100])
    with caplog.at_level("WARNING", logger="waterflow"):
        again = wf.train(jobs_of()[2:], lanes=1, memory="1GiB", checkpoint=tmp_path)
    assert f"{last} is no checkpoint" in caplog.text
    assert_equal(again, expected)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_all_damaged(tmp_path: Path) -> None:
    stopped_at(20, tmp_path, steps=4, keep=3)
    for path in tmp_path.glob("c-*/step-*.state"):
        path.write_bytes(b"x" * 100)
    with pytest.raises(wf.CheckpointError, match="is no checkpoint") as refused:
        wf.train(jobs_of()[2:], checkpoint=tmp_path)
    (folder,) = tmp_path.glob("c-*")
    assert f"{folder}/step-" in str(refused.value)
    assert str(refused.value).endswith(f"To start job 'c' anew, remove {folder}")


def test_one_call_at_a_time(tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    def act(name: str, step: int) -> None:
        inside.set()
        assert done.wait(timeout=30)

    thread = threading.Thread(target=lambda: wf.train(jobs_of(act)[2:], memory="1GiB", checkpoint=tmp_path))
    thread.start()
    try:
        assert inside.wait(timeout=30)
        with pytest.raises(wf.CheckpointError, match="in use by another call"):
            wf.train(jobs_of()[2:], memory="1GiB", checkpoint=tmp_path)
    finally:
        done.set()
        thread.join(timeout=30)


def test_a_fork_does_not_hold_the_folder(tmp_path: Path) -> None:
    """A worker that loads data may live on for a moment: its process has the lock no more."""
    read, write = os.pipe()
    begun, begins = os.pipe()
    with wf.Checkpoints(tmp_path).opened(()):
        with warnings.catch_warnings(action="ignore"):  # of threads beside it, in newer versions of Python
            child = os.fork()
        if child == 0:  # lives until the parent closes its end
            os.close(write)
            os.write(begins, b"1")
            os.read(read, 1)
            os._exit(0)
    try:
        os.read(begun, 1)
        with wf.Checkpoints(tmp_path).opened(()):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)
        for end in (read, begun, begins):
            os.close(end)


@pytest.mark.needs_time("checkpoints are written by the clock")
def test_by_time(tmp_path: Path) -> None:
    seen: set[str] = set()

    def act(name: str, step: int) -> None:
        time.sleep(0.02)
        seen.update(path.name for path in tmp_path.glob("c-*/step-*.state"))
        assert len(list(tmp_path.glob("c-*/step-*.state"))) <= 2  # one more than are kept, for a moment

    wf.train(jobs_of(act)[2:], lanes=1, memory="1GiB", checkpoint=wf.Checkpoints(tmp_path, every=0.1, keep=1))
    assert 2 <= len(seen) <= 12


def test_a_full_disk_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.save", full)
    with caplog.at_level("WARNING", logger="waterflow"):
        results = wf.train(jobs_of()[2:], lanes=1, memory="1GiB", checkpoint=tmp_path)
    assert results[0].status == "completed" and "'c' could not be written: no space left" in caplog.text


@pytest.mark.parametrize(
    "settings, message",
    [({"every": 0}, "every must be"), ({"steps": 0}, "steps of checkpoints"), ({"keep": None}, "keep of checkpoints")],
)
def test_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(wf.InvalidJobError, match=message):
        wf.Checkpoints(tmp_path, **settings)


def test_jobs_that_could_not_go_on(tmp_path: Path) -> None:
    job = wf.Job("net", Net, iter(images(3)), lambda p: torch.optim.SGD(p, 0.1), loss=F.cross_entropy)
    with pytest.raises(wf.CheckpointError, match="only once"):
        wf.train([job], checkpoint=tmp_path)
    (tmp_path / "seeds.json").write_text("{")
    with pytest.raises(wf.CheckpointError, match=r"seeds.json is damaged"):
        wf.train(jobs_of(), checkpoint=tmp_path)
    (tmp_path / "seeds.json").write_text(json.dumps({"c": 1}))


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_another_model_of_the_same_name(tmp_path: Path) -> None:
    stopped_at(20, tmp_path, steps=4)
    job = jobs_of()[2]
    job.model = lambda: Net(width=8)
    with pytest.raises(wf.CheckpointError, match="of another job than 'c'"):
        wf.train([job], memory="1GiB", checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"epochs": 4}, r"of 3 epochs; it has 4 now\. Give the job another name"),
     ({"model": lambda: torch.nn.Linear(6, 4)}, r"(?s)of another model: .*another folder")],
)  # fmt: skip
def test_a_result_of_another_job_is_not_handed_out(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    first = wf.train(jobs_of()[:1], lanes=1, checkpoint=tmp_path)
    assert_equal(wf.train(jobs_of()[:1], lanes=1, checkpoint=tmp_path), first)
    job = jobs_of()[0]
    for name, value in changed.items():
        setattr(job, name, value)
    with pytest.raises(wf.CheckpointError, match=told):
        wf.train([job], lanes=1, checkpoint=tmp_path)
