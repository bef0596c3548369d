"""Studies whose process is killed at drawn moments, and called again until all their trials have ended.

    python -m benchmarks.study_kills [kills samplers ordered ender memory paused cost] [--seed 0] [--save]

Trials are networks of the demo's space that read handwritten digits; their data knows its position, so that what is read twice is
trained twice. A study's process is forked from one that has everything imported. It is killed some time after its first batch, or then as
it enters or leaves one of its own functions: where it asks for a trial, marks or tells it, captures a step, writes or replaces a
file.

``kills``: 24 enqueued trials that return jobs, on SQLite and in a journal; twenty deaths each. Each curve (reports, value, losses)
is compared with that of a study that nobody killed, bit for bit. ``samplers``: the same with TPE and a pruner, and with loops of
their own; each curve with that of its values alone. ``ordered``: jobs with ``order="promising"``, ten deaths. ``ender``: one trial
ends its process each time that it runs. ``memory``: three of twelve trials exceed ``memory=``, one of them also when it recomputes.
``paused``: jobs that are paused after each epoch, in memory and on disk; how long that takes; and 300 of them. ``cost``: the demo's
study with and without ``checkpoint=``.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages.journal import JournalFileBackend
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from benchmarks import report
from examples import demo

Row = dict[str, Any]
TRIALS, EPOCHS, EVERY = 24, 24, 0.5
PATIENCE = 2.0  # seconds after which a process dies that does not come to where it was to die
CALLS = 120  # of one study, at most
TRAINS = threading.Event()  # in a study's process: its first batch was read
# Functions of a study's process in which it is killed, and where they are.
PLACES = {
    "asks": ("waterflow.study.run", "ask_marked"),
    "asks, marked": ("optuna.study.Study", "ask"),
    "begins": ("waterflow.study.coordinator.StudyRunner", "_value"),
    "captures": ("waterflow.executor.program.capture_cache", "build"),
    "writes": ("waterflow.training.checkpoint.Checkpoint", "save"),
    "replaces": ("os", "replace"),
    "reports": ("optuna.trial.Trial", "report"),
    "tells": ("waterflow.study.coordinator", "tell_quietly"),
    "forgets": ("waterflow.training.checkpoint_dir.Checkpoints", "remove"),
}


class Positioned(demo.Batches):
    """The demo's batches, which know their position. Each one is noted in a file before it is trained."""

    def __init__(self, batch_size: int, note: Callable[[int], None]) -> None:
        super().__init__(batch_size)
        self._note, self._passes, self._at, self._loaded = note, 0, 0, False

    def state_dict(self) -> dict[str, int]:
        """Passes that were begun, and batches of the last one that were read."""
        return {"passes": self._passes, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self._passes, self._at, self._loaded = state["passes"], state["at"], True

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:  # behind the last batch of a pass, too, that pass goes on first
            self._passes, self._at = self._passes + 1, 0
        self._loaded = False
        numbers = torch.Generator().manual_seed(self._passes)
        order = torch.randperm(len(self._data.images), generator=numbers).split(self.batch_size)
        while self._at < len(self):
            rows = order[self._at]
            self._at += 1
            self._note((self._passes - 1) * len(self) + self._at)
            yield self._data.images.index_select(0, rows), self._data.labels.index_select(0, rows)


def objective(trial: optuna.Trial, log: Path, loops: bool = False, ends: int | None = None) -> Any:
    """A trial of the demo's space, of a few epochs: a job, or a loop of its own. Number ``ends`` ends its process."""
    choice = demo.choose(trial)

    def note(step: int) -> None:
        if trial.number == ends and step > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        TRAINS.set()
        os.write(file, f"{os.getpid()} {trial.number} {step} {time.monotonic()}\n".encode())

    file = _opened(log)
    batches = Positioned(choice.batch_size, note)
    model = functools.partial(demo.make_model, choice.kind, choice.depth, choice.width, choice.dropout)
    optimizer = functools.partial(demo.make_optimizer, choice)
    if not loops:
        return wf.Job("job", model, batches, optimizer, loss=F.cross_entropy, evaluate=demo.accuracy, epochs=EPOCHS)
    module = model()
    step = wf.Step(module, loss=F.cross_entropy, optimizer=optimizer(module.parameters()))
    value = 0.0
    for epoch in range(EPOCHS // 4):  # they begin anew
        for batch in batches:
            step(batch)
        value = demo.accuracy(module)
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


@functools.cache
def _opened(log: Path) -> int:
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def storage_in(folder: Path, kind: str) -> Any:
    """A storage in a file: ``sqlite`` or ``journal``."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'study.sqlite3'}"
    return optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal")))


def create(folder: Path, kind: str, enqueued: list[dict[str, Any]] | None, prunes: bool) -> None:
    """Make the study, with these trials waiting."""
    study = _load(folder, kind, prunes)
    for params in enqueued or ():
        study.enqueue_trial(params)


def _load(folder: Path, kind: str, prunes: bool) -> optuna.Study:
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=8, constant_liar=True)
    pruner = optuna.pruners.MedianPruner(5, 1) if prunes else optuna.pruners.NopPruner()
    return optuna.create_study(
        study_name="one",
        storage=storage_in(folder, kind),
        sampler=sampler,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )


# -- one call of a study, in a process of its own


def call(folder: Path, kind: str, prunes: bool, arguments: dict[str, Any], death: tuple[str, bool, float] | None) -> None:
    """Run or continue the study, and die as ``death`` says: where, before or behind the call, so many seconds behind its first batch."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sys.stderr = open(folder / "stderr", "a")  # noqa: SIM115
    torch.manual_seed(0)
    study = _load(folder, kind, prunes)
    if death is not None:
        _arm(*death)
    order = arguments.pop("order", "fifo")
    act = functools.partial(objective, log=folder / "log", **arguments)
    files = wf.Checkpoints(folder / "c", every=EVERY)
    done = wf.optimize(study, act, TRIALS, max_concurrent=4, lanes=2, checkpoint=files, order=order)
    losses = [[result.name, list(result.losses)] for result in done.results]
    (folder / "ended").write_text(json.dumps({"losses": losses}))


def _arm(place: str, behind: bool, seconds: float) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    due = threading.Event()

    def wait() -> None:
        if seconds:
            TRAINS.wait()
            time.sleep(seconds)
        due.set()
        if place != "time":
            time.sleep(PATIENCE)
        die()

    threading.Thread(target=wait, daemon=True).start()
    if place == "time":
        return
    where, name = PLACES[place]
    owner = _find(where)
    real = getattr(owner, name)

    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        mine = due.is_set()
        if mine and not behind:
            die()
        result = real(*args, **kwargs)
        if mine:
            die()
        return result

    setattr(owner, name, watched)


def _find(where: str) -> Any:
    import importlib

    try:
        return importlib.import_module(where)
    except ModuleNotFoundError:
        module, _, name = where.rpartition(".")
        return getattr(importlib.import_module(module), name)


def run(folder: Path, kind: str, prunes: bool, arguments: dict[str, Any], deaths: list[Any]) -> tuple[int, int]:
    """Call the study until it ends, the first times with these deaths. Returns how often it was called, and how often it died."""
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["examples.demo", "waterflow.study", "benchmarks.report", "sqlalchemy", "sklearn.datasets"])
    died = 0
    for number in range(CALLS):
        process = spawn.Process(target=call, args=(folder, kind, prunes, arguments, deaths.pop(0) if deaths else None))
        process.start()
        process.join()
        if process.exitcode == 0 and not deaths:
            return number + 1, died
        if process.exitcode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a call ended with {process.exitcode}: {(folder / 'stderr').read_text()[-3000:]}")
        died += process.exitcode != 0
        if process.exitcode == 0:  # it ended before its death came
            deaths.clear()
    raise RuntimeError(f"the study did not end in {CALLS} calls")


def drawn(numbers: random.Random, count: int) -> list[tuple[str, bool, float]]:
    """Deaths: half of them at some time, the others in each of the places in turn; every fifth at the first such call."""
    places = list(PLACES)
    numbers.shuffle(places)
    return [
        (
            "time" if number % 2 else places[number // 2 % len(places)], numbers.random() < 0.5,
            numbers.uniform(0.5, 2.5) if number % 5 or number % 2 else 0.0,
        )
        for number in range(count)
    ]  # fmt: skip


# -- what came out


def trials_of(folder: Path, kind: str) -> list[Any]:
    """The study's trials, by number."""
    return _load(folder, kind, prunes=False).get_trials()


def curves_of(trials: list[Any]) -> dict[int, Any]:
    """Of each trial its state, values and reports."""
    return {trial.number: (trial.state.name, trial.params, trial.values, trial.intermediate_values) for trial in trials}


def again(log: Path) -> list[float]:
    """Of each step that was trained twice: how long before its process died it was trained first, in seconds."""
    ended: dict[str, float] = {}
    first: dict[tuple[str, str], tuple[str, float]] = {}
    found = []
    entries = [line.split() for line in log.read_text().splitlines()]
    for process, _, _, when in entries:
        ended[process] = float(when)
    for process, trial, step, when in entries:
        if (trial, step) in first:
            before, at = first[trial, step]
            found.append(ended[before] - at)
        first[trial, step] = (process, float(when))
    return found


def points(count: int, numbers: random.Random) -> list[dict[str, Any]]:
    """Points of the demo's space."""
    return [
        {
            "kind": numbers.choice(["cnn", "mlp"]), "depth": numbers.randint(1, 3), "width": numbers.choice([8, 16, 32]),
            "dropout": numbers.uniform(0, 0.5), "optimizer": numbers.choice(["SGD", "Adam", "AdamW"]),
            "lr": 10 ** numbers.uniform(-4, -1), "batch_size": numbers.choice([16, 32, 64]),
        }
        for _ in range(count)
    ]  # fmt: skip


def _row(what: str, found: Any, wanted: Any, holds: bool) -> Row:
    return {"what": what, "measured": str(found), "at least": str(wanted), "holds": holds}


# -- parts


def kills(folder: Path, seed: int, deaths: int = 20) -> list[Row]:
    """Jobs of enqueued trials."""
    rows = []
    enqueued = points(TRIALS, random.Random(seed))
    undisturbed = _study(folder / "undisturbed", "journal", enqueued)
    run(folder / "undisturbed", "journal", False, {}, [])
    expected = curves_of(undisturbed())
    for kind in ("sqlite", "journal"):
        here = folder / kind
        found = _study(here, kind, enqueued)
        calls, died = run(here, kind, False, {}, drawn(random.Random(f"{seed} {kind}"), deaths))
        rows += [
            *_ended(f"{kind}, {died} deaths in {calls} calls", found(), TRIALS),
            _row(
                f"{kind}: curves that differ",
                _differing(expected, curves_of(found()), whole=True),
                "none",
                expected == curves_of(found()),
            ),
            _twice(kind, here / "log"),
        ]
    return rows


def samplers(folder: Path, seed: int, deaths: int = 8) -> list[Row]:
    """TPE and a pruner; jobs, and loops of their own."""
    rows = []
    for what, loops in (("jobs", False), ("loops", True)):
        here, alone = folder / what, folder / f"{what} alone"
        found = _study(here, "journal", None, prunes=True)
        calls, died = run(here, "journal", True, {"loops": loops}, drawn(random.Random(f"{seed} {what}"), deaths))
        trials = found()
        expected = _study(alone, "journal", [trial.params for trial in trials])
        run(alone, "journal", False, {"loops": loops}, [])
        differing = _differing(curves_of(expected()), curves_of(trials), whole=False)
        rows += [
            *_ended(f"TPE and pruner, {what}, {died} deaths in {calls} calls", trials, TRIALS),
            _row(f"TPE and pruner, {what}: curves other than those of their values alone", differing, "none", not differing),
        ]
    return rows


def ordered(folder: Path, seed: int, deaths: int = 10) -> list[Row]:
    """Jobs that are paused while others promise more."""
    enqueued = points(TRIALS, random.Random(seed))
    expected, found = _study(folder / "undisturbed", "sqlite", enqueued), _study(folder / "ordered", "sqlite", enqueued)
    run(folder / "undisturbed", "sqlite", False, {}, [])
    calls, died = run(
        folder / "ordered", "sqlite", False, {"order": "promising"}, drawn(random.Random(f"{seed} ordered"), deaths)
    )
    differing = _differing(curves_of(expected()), curves_of(found()), whole=True)
    return [
        *_ended(f"order='promising', {died} deaths in {calls} calls", found(), TRIALS),
        _row("order='promising': curves other than in first-come's order, undisturbed", differing, "none", not differing),
    ]


def ender(folder: Path, seed: int) -> list[Row]:
    """Trial 5 ends its process each time."""
    found = _study(folder, "journal", points(TRIALS, random.Random(seed)))
    calls, died = run(folder, "journal", False, {"ends": 5}, [])
    states = [trial.state.name for trial in found()]
    holds = states == ["COMPLETE"] * 5 + ["FAIL"] + ["COMPLETE"] * (TRIALS - 6)
    told = f"{states.count('COMPLETE')} COMPLETE, {states.count('FAIL')} FAIL; {died} deaths in {calls} calls"
    return [_row("one trial of 24 ends its process", told, "23 COMPLETE, that one FAIL", holds)]


def _study(folder: Path, kind: str, enqueued: list[dict[str, Any]] | None, prunes: bool = False) -> Callable[[], list[Any]]:
    folder.mkdir(exist_ok=True)
    create(folder, kind, enqueued, prunes)
    return lambda: trials_of(folder, kind)


def _ended(what: str, trials: list[Any], count: int) -> list[Row]:
    ended = sum(trial.state.is_finished() and trial.state.name != "FAIL" for trial in trials)
    numbers = [trial.number for trial in trials] == list(range(count))
    return [
        _row(
            what,
            f"{ended} of {len(trials)} ended well",
            f"{count} of {count}, numbers 0 to {count - 1}",
            numbers and ended == count,
        )
    ]


def _differing(expected: dict[int, Any], found: dict[int, Any], whole: bool) -> str:
    def differs(number: int) -> bool:
        (state, params, values, reports), (wanted_state, wanted_params, wanted_values, wanted) = found[number], expected[number]
        if params != wanted_params or any(wanted.get(epoch) != value for epoch, value in reports.items()):
            return True
        return (whole or state == "COMPLETE") and (state, values, reports) != (wanted_state, wanted_values, wanted)

    return ", ".join(str(number) for number in found if differs(number))


def _twice(kind: str, log: Path) -> Row:
    ages = again(log)
    steps, oldest = len(log.read_text().splitlines()), max(ages, default=0.0)
    told = f"{len(ages)} of {steps}, the oldest {oldest:.2f} s before the death"
    # A state is that of a moment before its file was whole, and the clock of the next one runs from there.
    return _row(f"{kind}: steps trained twice", told, f"those of {EVERY:g} s and of a write", oldest <= EVERY + 0.5)


# -- memory, and what it costs


def memory(folder: Path, seed: int) -> list[Row]:
    """Twelve trials of which three have a batch that exceeds the limit; the third one exceeds it with recomputing, too."""
    del folder, seed
    limit = 64 << 20
    sizes = {3: 14_000, 6: 14_000, 9: 1 << 20}
    tell: dict[int, Any] = {}

    def build(trial: optuna.Trial) -> wf.Job:
        rows = sizes.get(trial.number, 256)
        model = functools.partial(demo.make_model, "mlp", 12, 16)
        data = [(torch.zeros(rows, 1, demo.SIDE, demo.SIDE), torch.zeros(rows, dtype=torch.long))] * 2
        return wf.Job("job", model, data, torch.optim.SGD, loss=F.cross_entropy, seed=trial.number)

    def keep(study: optuna.Study, trial: Any) -> None:
        tell[trial.number] = trial.state.name

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    done = wf.optimize(study, build, 12, memory=limit, lanes=2, max_concurrent=4, catch=wf.MemoryLimitError, callbacks=[keep])
    error = next((result.error for result in done.results if result.error is not None), None)
    largest = getattr(error, "largest_batch", None)
    failed = [number for number, state in sorted(tell.items()) if state == "FAIL"]
    told = f"{list(tell.values()).count('COMPLETE')} COMPLETE, {failed} FAIL, {done.run_again} ran twice; largest batch {largest}"
    holds = failed == [9] and done.run_again == 3 and largest is not None
    return [_row("three of twelve trials exceed memory=", told, "11 COMPLETE, [9] FAIL, its largest batch", holds)]


def cost(folder: Path, seed: int, pairs: int = 5) -> list[Row]:
    """The demo's study of jobs with and without ``checkpoint=``, in turns; both in SQLite."""
    numbers = itertools.count()

    def study(checkpoint: bool) -> float:
        (here := folder / str(next(numbers))).mkdir()
        made = demo.create_study(storage_in(here, "sqlite"), seed, "one")
        given: dict[str, Any] = {"checkpoint": here / "c"} if checkpoint else {}
        torch.manual_seed(0)
        return wf.optimize(made, demo.build, TRIALS, max_concurrent=4, lanes=2, **given).seconds

    times = report.interleaved({"plain": lambda: study(False), "checkpoint": lambda: study(True)}, pairs)
    ratios = [ours / plain for ours, plain in zip(times["checkpoint"], times["plain"])]
    told = f"{report.median(ratios):.3f} times ({report.spread(ratios)}); {report.median(times['plain']):.3g} s"
    return [_row("the demo's study of jobs, with checkpoint=", told, "<= 1.03", report.median(ratios) <= 1.03)]


# -- paused jobs


def paused(folder: Path, seed: int, jobs: int = 8) -> list[Row]:
    """Jobs of the demo's space that are paused after each epoch, and taken up by another thread, two at a time, in drawn order."""
    rows = []
    made = [_job(point, number) for number, point in enumerate(points(jobs, random.Random(seed)))]
    alone = [wf.train([job], lanes=1, memory="1GiB")[0] for job in made]
    for where in ("in memory", "on disk"):
        (here := folder / where).mkdir()
        results, segments = _in_pieces(made, random.Random(f"{seed} {where}"), here if where == "on disk" else None)
        differ = [number for number, (mine, theirs) in enumerate(zip(results, alone)) if not _same(mine, theirs)]
        told = f"{len(differ)} of {jobs} in {segments} segments"
        rows.append(_row(f"paused after each epoch, states {where}: results that differ", told, "none", not differ))
    return [*rows, *_pause_and_take_up(), _many()]


def _job(point: dict[str, Any], seed: int) -> wf.Job:
    """A job with dropout, BatchNorm, a scheduler, accumulation, and a shuffled loader with a worker."""
    data = demo.digits()
    loader = DataLoader(TensorDataset(data.images, data.labels), point["batch_size"], shuffle=True, num_workers=seed % 2)
    choice = demo.Choice(**point)
    return wf.Job(
        f"job {seed}", lambda: demo.make_model(choice.kind, choice.depth, choice.width, choice.dropout), loader,
        lambda p: demo.make_optimizer(choice, p), loss=F.cross_entropy, evaluate=demo.accuracy, epochs=3, seed=seed, accumulate=2,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7),
    )  # fmt: skip


def _pause(epoch: int, metrics: Any) -> None:
    raise wf.PauseJob


def _in_pieces(jobs: list[wf.Job], numbers: random.Random, folder: Path | None) -> tuple[list[Any], int]:
    results: list[Any] = [None] * len(jobs)
    states: dict[int, Any] = dict.fromkeys(range(len(jobs)))
    segments = 0

    def segment(number: int, state: Any) -> None:
        resume = wf.Checkpoint.load(state) if isinstance(state, Path) else state
        runner = wf.JobRunner(jobs[number], engine, _pause, resume=resume)
        with wf.within(engine):
            result = runner.run()
        if runner.paused is None:
            results[number] = result
        elif folder is None:
            states[number] = runner.paused
        else:
            runner.paused.save(folder / f"{number}.state", durable=False)
            states[number] = folder / f"{number}.state"

    with wf.Engine("cpu", memory="1GiB", lanes=2) as engine:
        while states:
            pair = numbers.sample(sorted(states), min(2, len(states)))
            threads = [threading.Thread(target=segment, args=(number, states.pop(number))) for number in pair]
            segments += len(threads)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return results, segments


def _same(one: wf.JobResult, other: wf.JobResult) -> bool:
    tensors = one.state_dict or {}, other.state_dict or {}
    return one.losses == other.losses and one.metrics == other.metrics and all(
        torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items()
    )  # fmt: skip


def _pause_and_take_up(times: int = 9) -> list[Row]:
    """From the call of ``on_epoch`` that pauses to the end of the thread; from a new runner to the end of its first step."""
    rows = []
    for what, width, most in (("a small job", 32, 0.010), ("100 MB of state", 2900, 0.25)):
        at: dict[str, float] = {}

        def batches(at: dict[str, float] = at, width: int = width) -> Iterator[Any]:
            yield torch.zeros(8, width), torch.zeros(8, width)
            at["stepped"] = time.perf_counter()
            yield torch.zeros(8, width), torch.zeros(8, width)

        def stop(epoch: int, metrics: Any, at: dict[str, float] = at) -> None:
            at["asked"] = time.perf_counter()
            raise wf.PauseJob

        model = functools.partial(nn.Linear, width, width)
        adam = functools.partial(torch.optim.Adam, fused=True)  # its state is twice the model's
        job = wf.Job("job", model, batches, adam, loss=F.mse_loss, epochs=times + 2, seed=0)
        pause, take_up, size, state = [], [], 0, None
        with wf.Engine("cpu", memory="2GiB", lanes=1) as engine, wf.within(engine):
            for _ in range(times):
                began = time.perf_counter()
                runner = wf.JobRunner(job, engine, stop, resume=state)
                runner.run()
                ended = time.perf_counter()
                state = runner.paused
                assert state is not None
                size = state.nbytes
                pause.append(ended - at["asked"])
                take_up.append(at["stepped"] - began)
        both = [p + t for p, t in zip(pause[1:], take_up[1:])]
        told = f"{report.median(both) * 1e3:.1f} ms ({min(both) * 1e3:.1f} .. {max(both) * 1e3:.1f})"
        rows.append(
            _row(f"pause and take up, {what} ({size / 1e6:.1f} MB)", told, f"<= {most * 1e3:g} ms", report.median(both) <= most)
        )
    return rows


def _many(count: int = 300) -> Row:
    """So many paused jobs: what is left of each beside its state, and what they do in a second."""
    made = [_job(point, 2 * number) for number, point in enumerate(points(8, random.Random(0)))]
    runners = []
    with wf.Engine("cpu", memory="1GiB", lanes=1) as engine, wf.within(engine):
        for number in range(count + 8):
            if number == 8:  # captures, and what a first run leaves
                gc.collect()
                threads, before = threading.active_count(), _resident()
                runners.clear()
            runner = wf.JobRunner(replace(made[number % 8], epochs=2, evaluate=None), engine, _pause)
            runner.run()
            runners.append(runner.paused)
        gc.collect()
        states = sum(state.nbytes for state in runners if state is not None)
        beyond = (_resident() - before - states) / count
        began, used = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        used = (time.process_time() - used) / (time.perf_counter() - began)
        held = len(engine.reservations)
    told = f"{threading.active_count() - threads} threads, {held} claims, {used:.1%} of a core, {beyond / 1e3:.1f} KB each"
    holds = threading.active_count() == threads and not held and used < 0.005 and beyond <= 50e3
    return _row(f"{count} paused jobs", told, "no thread, claim or time; 50 KB beyond its state", holds)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PARTS: dict[str, Callable[[Path, int], list[Row]]] = {
    "kills": kills, "samplers": samplers, "ordered": ordered, "ender": ender, "memory": memory, "paused": paused, "cost": cost,
}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seed", type=int, default=0, help="of the points, and of the moments of death")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    demo.digits()
    parts = {name: functools.partial(_in_folder, part, arguments.seed) for name, part in PARTS.items()}
    return report.finish_parts("study_kills", parser, arguments, parts)


def _in_folder(part: Callable[[Path, int], list[Row]], seed: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="study-kills-") as folder:
        return part(Path(folder), seed)


if __name__ == "__main__":
    sys.exit(main())
