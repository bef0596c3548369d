"""Ordinary loops, as people write them, in a study: ``wf.optimize`` against what they run today.

Peers: ``study.optimize`` with one and with two of torch's threads, and two processes over a journal storage. Studies whose trials are
mostly Python (``--only processes``) run in ``processes=2``, against those two processes and against ``processes=1``; their clocks
start when the first trial begins. All ways try the same points. Every run is a new process that has captured nothing;
clocks start behind the imports and what torch puts off until the first optimizer is made, and hold the captures.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from tqdm import tqdm

import waterflow as wf
from benchmarks import report

Objective = Callable[[optuna.Trial], Any]
StepOf = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Any], Tensor]]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
    """The four lines of an ordinary loop."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return step


def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> wf.Step:
    """What stands in their place."""
    return wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)


# -- a table


@cache
def table() -> TensorDataset:
    """20,000 rows of 50 numbers, and a class for each."""
    x = torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :5].sum(1) > 0).long() + (x[:, 5:9].sum(1) > 0).long())


def perceptron(width: int, inputs: int = 50) -> nn.Module:
    """An MLP for it."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def point(trial: optuna.Trial) -> tuple[int, float]:
    """Width and learning rate."""
    return trial.suggest_categorical("width", [64, 128]), trial.suggest_float("lr", 1e-4, 1e-1, log=True)


def of_table(step_of: StepOf, loader: Any) -> Objective:
    """Three epochs over the table."""

    def objective(trial: optuna.Trial) -> float:
        width, lr = point(trial)
        model = perceptron(width)
        step = step_of(model, torch.optim.AdamW(model.parameters(), lr=lr))
        for _ in range(3):
            for batch in loader(table(), batch_size=256, shuffle=True):
                loss = step(batch)
        return loss.item()

    return objective


def table_job(trial: optuna.Trial) -> wf.Job:
    """The same as a job."""
    width, lr = point(trial)
    return wf.Job(
        name=f"trial-{trial.number}", model=lambda: perceptron(width), data=DataLoader(table(), batch_size=256, shuffle=True),
        loss=F.cross_entropy, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr), epochs=3,
    )  # fmt: skip


def logged(step_of: StepOf) -> Objective:
    """The table with a progress bar, and two scalars written at each step."""

    def objective(trial: optuna.Trial) -> float:
        width, lr = point(trial)
        model = perceptron(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 79)
        step, log, mean = step_of(model, optimizer), csv.writer(StringIO()), 0.0
        for epoch in range(3):
            bar = tqdm(DataLoader(table(), batch_size=256, shuffle=True), file=StringIO())
            for number, batch in enumerate(bar):
                loss = step(batch).item()
                scheduler.step()
                mean = 0.9 * mean + 0.1 * loss
                bar.set_postfix(loss=f"{mean:.3f}")
                log.writerow(["loss", 79 * epoch + number, loss])
                log.writerow(["lr", 79 * epoch + number, scheduler.get_last_lr()[0]])
        return mean

    return objective


# -- digits


@cache
def digits() -> Any:
    """Scikit-learn's digits as 8 x 8 pictures, split by chance."""
    from sklearn.datasets import load_digits

    source = load_digits()
    data = TensorDataset(torch.tensor(source.images, dtype=torch.float32)[:, None] / 16, torch.tensor(source.target))
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def cnn(width: int) -> nn.Module:
    """A small network for them."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * width, 10),
    )  # fmt: skip


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of the right ones."""
    return (output.argmax(1) == target).float().mean()


def evaluated(model: nn.Module, data: Dataset[Any]) -> float:
    """As in plain PyTorch."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64):
            right += int((model(x).argmax(1) == y).sum())
    model.train()
    return right / len(data)  # type: ignore[arg-type]


def evaluated_at_once(model: nn.Module, data: Dataset[Any]) -> float:
    """As in waterflow."""
    return float(wf.evaluate(model, data, metrics={"accuracy": accuracy})["accuracy"])


def of_digits(step_of: StepOf, loader: Any, evaluate: Callable[[nn.Module, Any], float]) -> Objective:
    """At most twelve epochs a trial."""

    def objective(trial: optuna.Trial) -> float:
        train, test = digits()
        model = cnn(trial.suggest_categorical("width", [8, 16]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        step = step_of(model, optimizer)
        for epoch in range(12):
            for batch in loader(train, batch_size=64, shuffle=True):
                step(batch)
            value = evaluate(model, test)
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    return objective


# -- pictures as bytes


@cache
def pictures() -> tuple[Tensor, Tensor]:
    """4,000 of 3 x 16 x 16 bytes, and a class for each."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(256, (4000, 3, 16, 16), dtype=torch.uint8, generator=numbers), torch.randint(
        10, (4000,), generator=numbers
    )


class Pictures(Dataset[Any]):
    """Row by row: normalized, and flipped by chance."""

    def __len__(self) -> int:
        return len(pictures()[0])

    def __getitem__(self, index: int) -> Any:
        x, y = (part[index] for part in pictures())
        x = (x.float() / 255 - 0.5) / 0.25
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), y


def normalized(batch: Any) -> Any:
    """The same of a whole batch."""
    x, y = batch
    x = (x.float() / 255 - 0.5) / 0.25
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x), y


def of_pictures(step_of: StepOf, loader: Callable[[], Any]) -> Objective:
    """Two epochs with a small network."""

    def objective(trial: optuna.Trial) -> float:
        width, lr = trial.suggest_categorical("width", [4, 8]), trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        model = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * width, 10),
        )  # fmt: skip
        step = step_of(model, torch.optim.AdamW(model.parameters(), lr=lr))
        for _ in range(2):
            for batch in loader():
                loss = step(batch)
        return loss.item()

    return objective


# -- mostly Python


class Rows(Dataset[Any]):
    """Rows that NumPy makes, some 0.2 ms each."""

    def __len__(self) -> int:
        return 64 * 40

    def __getitem__(self, index: int) -> Any:
        numbers = np.random.default_rng(index)
        signal = np.zeros(50)
        for _ in range(8):
            wave = np.sin(np.arange(50) * numbers.uniform(0.1, 1.0) + numbers.uniform(0, 6))
            signal += np.clip(wave, -0.8, 0.8) * numbers.uniform(0, 1)
        return torch.from_numpy(signal.astype(np.float32)), int(signal.sum() > 0) + int(signal[:25].sum() > 0)


def of_rows(step_of: StepOf) -> Objective:
    """One epoch over them."""

    def objective(trial: optuna.Trial) -> float:
        width, lr = point(trial)
        model = perceptron(width)
        step = step_of(model, torch.optim.AdamW(model.parameters(), lr=lr))
        for batch in DataLoader(Rows(), batch_size=64, shuffle=True):
            loss = step(batch)
        return loss.item()

    return objective


def pole(state: Any, right: bool) -> tuple[Any, bool]:
    """A step of a cart with a pole (Barto, Sutton and Anderson 1983): the state behind a push, and whether the pole stands."""
    x, speed, angle, turning = state
    sine, cosine = np.sin(angle), np.cos(angle)
    pushed = ((10.0 if right else -10.0) + 0.05 * turning**2 * sine) / 1.1
    falling = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
    faster = pushed - 0.05 * falling * cosine / 1.1
    now = np.array([x + 0.02 * speed, speed + 0.02 * faster, angle + 0.02 * turning, turning + 0.02 * falling])
    return now, abs(now[0]) < 2.4 and abs(now[2]) < 0.21


def of_pole(step_of: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Any], Tensor]]) -> Objective:
    """Deep Q-learning on the cart-pole, 500 steps: four pushes for each step of the network."""

    def objective(trial: optuna.Trial) -> float:
        width, lr = point(trial)
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        step = step_of(model, torch.optim.AdamW(model.parameters(), lr=lr))
        numbers, memory = np.random.default_rng(trial.number), []
        state, length, lengths = numbers.uniform(-0.05, 0.05, 4), 0, []
        for number in range(2_000):
            with torch.no_grad():
                values = model(torch.from_numpy(state.astype(np.float32)))
            push = int(values.argmax()) if numbers.random() > 0.1 else int(numbers.integers(2))
            after, stands = pole(state, bool(push))
            memory.append((state, push, after, stands))
            state, length = after, length + 1
            if not stands:
                lengths.append(length)
                state, length = numbers.uniform(-0.05, 0.05, 4), 0
            if number >= 64 and number % 4 == 0:
                drawn = [memory[int(at)] for at in numbers.integers(len(memory), size=64)]
                before, pushes, behind, standing = (np.array(part, dtype=np.float32) for part in zip(*drawn))
                step(tuple(map(torch.from_numpy, (before, pushes.astype(np.int64), behind, standing))))
        return float(np.mean(lengths[-10:]))

    return objective


def q_loss(model: nn.Module, batch: Any) -> Tensor:
    """The error of the values of the pushes that were made."""
    before, pushes, behind, standing = batch
    with torch.no_grad():
        wanted = 1.0 + 0.95 * model(behind).max(1).values * standing
    return F.smooth_l1_loss(model(before).gather(1, pushes[:, None]).squeeze(1), wanted)


def plain_q(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Tensor]:
    """As in plain PyTorch."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = q_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def our_q(model: nn.Module, optimizer: torch.optim.Optimizer) -> wf.Step:
    """As in waterflow."""
    return wf.Step(model, step=q_loss, optimizer=optimizer)


# -- what is run


THREADS = ("1 thread", "2 threads")
ONE = "processes=1"
PEERS = (*THREADS, "two processes")


@dataclass(frozen=True)
class Row:
    """A study; ``ours`` by name, with what each must reach against the best of which peers."""

    what: str
    plain: Objective
    ours: dict[str, tuple[Objective, float, tuple[str, ...]]]
    trials: int = 12
    settings: dict[str, Any] = field(default_factory=lambda: {"pruner": optuna.pruners.NopPruner()})  # of the study
    by_epoch: bool = False  # seconds for each epoch trained, as trials are pruned
    against_one: float | None = None  # what processes=2 must reach against processes=1

    @property
    def peers(self) -> list[str]:
        """All of them."""
        named = [peer for _, _, peers in self.ours.values() for peer in peers] + [ONE] * (self.against_one is not None)
        return [peer for peer in (*PEERS, ONE) if peer in named]


ROWS = {
    row.what: row
    for row in (
        Row("table", of_table(plain, DataLoader), {
            "wf.DataLoader": (of_table(ours, wf.DataLoader), 2.2, PEERS), "wf.Job": (table_job, 2.5, PEERS),
            "torch's DataLoader": (of_table(ours, DataLoader), 1.1, THREADS),
        }),
        Row("digits", of_digits(plain, DataLoader, evaluated), {
            "wf.evaluate": (of_digits(ours, wf.DataLoader, evaluated_at_once), 1.8, PEERS),
        }, by_epoch=True, settings={"direction": "maximize", "pruner": optuna.pruners.MedianPruner(n_startup_trials=4)}),
        Row("pictures as bytes", of_pictures(plain, lambda: DataLoader(Pictures(), batch_size=64, shuffle=True)), {
            "batch_transform=": (of_pictures(ours, lambda: wf.DataLoader(
                TensorDataset(*pictures()), batch_size=64, shuffle=True, batch_transform=normalized
            )), 3.0, PEERS),
        }, trials=4),
        Row("table, logged", logged(plain), {"torch's DataLoader": (logged(ours), 1.1, THREADS)}, trials=8),
        Row("processes: digits", of_digits(plain, DataLoader, evaluated), {
            "processes=2": (of_digits(ours, wf.DataLoader, evaluated_at_once), 0.0, (ONE,)),
        }, by_epoch=True, settings={"direction": "maximize", "pruner": optuna.pruners.MedianPruner(n_startup_trials=4)}),
        Row("processes: rows by NumPy", of_rows(plain), {"processes=2": (of_rows(ours), 0.95, PEERS[2:3])}, 8, against_one=1.6),
        Row("processes: cart-pole", of_pole(plain_q), {"processes=2": (of_pole(our_q), 1.15, PEERS[2:3])}, 8, against_one=1.5),
    )
}  # fmt: skip


def prepare() -> None:
    """The data, what waterflow imports at the first use, and what the first optimizer does: the same for all ways."""
    assert table() and digits() and pictures() and wf.optimize and wf.evaluate
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.manual_seed(0)


def fresh(row: Row, **where: Any) -> optuna.Study:
    """A study with all of its points laid down."""
    study = optuna.create_study(**row.settings, **where)
    points = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    widths = {"digits": [8, 16], "processes: digits": [8, 16], "pictures as bytes": [4, 8]}.get(row.what, [64, 128])
    for _ in range(row.trials):
        trial = points.ask()
        trial.suggest_categorical("width", widths), trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        study.enqueue_trial(trial.params)
    return study


def told(study: optuna.Study, seconds: float, summary: Any = "") -> dict[str, Any]:
    """Seconds of a run, and what became of its trials."""
    trials = study.get_trials(deepcopy=False)
    epochs = sum(len(trial.intermediate_values) for trial in trials)
    failed = sum(trial.state == TrialState.FAIL for trial in trials)
    return {"seconds": seconds, "epochs": epochs, "failed": failed, "summary": str(summary)}


def run_here(row: Row, way: str) -> dict[str, Any]:
    """One run in this process."""
    prepare()
    if way == "two processes":
        return in_processes(row)
    study, began = fresh(row), time.perf_counter()
    if way.startswith("processes="):
        run = timed(row.ours["processes=2"][0])
        summary = wf.optimize(study, run, n_trials=row.trials, processes=int(way[-1]))
        return told(study, time.time() - min(trial.user_attrs["began"] for trial in study.trials), summary)
    if way in row.ours:
        summary = wf.optimize(study, row.ours[way][0], n_trials=row.trials)
    else:
        torch.set_num_threads(int(way.split()[0]))
        summary = study.optimize(row.plain, n_trials=row.trials)
    return told(study, time.perf_counter() - began, summary)


def timed(objective: Objective) -> Objective:
    """The same, with the time at which each trial began: by then its process has imported what peers have before their clocks start."""

    def run(trial: optuna.Trial) -> Any:
        trial.set_user_attr("began", time.time())
        return objective(trial)

    return run


def in_processes(row: Row) -> dict[str, Any]:
    """Two processes that take trials of one study until there are none, each with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "journal.log")
        study = fresh(row, storage=JournalStorage(JournalFileBackend(path)), study_name="shared")
        command = [sys.executable, "-m", "benchmarks.ordinary", "--run", row.what, "worker", path]
        workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        began = datetime.datetime.now()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            worker.communicate()
        ended = [trial.datetime_complete for trial in study.trials if trial.datetime_complete is not None]
        return told(study, (max(ended) - began).total_seconds())


def work(row: Row, path: str) -> None:
    """One of the two."""
    torch.set_num_threads(1)
    prepare()
    pruner = row.settings.get("pruner")
    study = optuna.load_study(study_name="shared", storage=JournalStorage(JournalFileBackend(path)), pruner=pruner)
    print("ready", flush=True)
    sys.stdin.readline()
    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.optimize(row.plain, n_trials=1)


START = "processes: start"


def started() -> float:
    """Seconds until both of ``processes=2`` have asked for a trial."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:

        def objective(trial: optuna.Trial) -> float:
            (Path(folder) / str(os.getpid())).touch()
            while len(os.listdir(folder)) < 2:
                time.sleep(0.001)
            return os.getpid()

        study, began = optuna.create_study(), datetime.datetime.now()
        wf.optimize(study, objective, n_trials=8, processes=2)
        asked: dict[float, datetime.datetime] = {}
        for trial in study.trials:
            assert trial.datetime_start is not None
            asked.setdefault(trial.values[0], trial.datetime_start)
        return (max(asked.values()) - began).total_seconds()


def imported() -> float:
    """Seconds until two processes, begun together, have imported torch and Optuna."""
    began = time.perf_counter()
    both = [subprocess.Popen([sys.executable, "-c", "import torch, optuna"]) for _ in range(2)]
    if any(process.wait() for process in both):
        raise RuntimeError("torch and Optuna cannot be imported")
    return time.perf_counter() - began


def measure_start(repeats: int) -> list[dict[str, Any]]:
    """The row of how long processes need until they begin."""
    command = [sys.executable, "-m", "benchmarks.ordinary", "--run", START]
    times = report.interleaved(
        {"processes=2": lambda: float(subprocess.check_output(command, text=True)), "two imports": imported}, repeats
    )
    ratios = [ours / theirs for ours, theirs in zip(times["processes=2"], times["two imports"])]
    return [{
        "study": START, "way": "processes=2", "s": report.median(times["processes=2"]), "best peer": "two imports",
        "its s": report.median(times["two imports"]), "ratio": report.median(ratios), "spread": report.spread(ratios),
        "at most": 1.5, "holds": report.median(ratios) <= 1.5, "summary": [],
    }]  # fmt: skip


def measure(row: Row, repeats: int) -> list[dict[str, Any]]:
    """The rows of one study."""
    ran: dict[str, dict[str, Any]] = {}

    def run(way: str) -> float:
        command = [sys.executable, "-m", "benchmarks.ordinary", "--run", row.what, way]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{row.what}, {way} failed:\n{done.stderr[-2000:]}")
        ran[way] = json.loads(done.stdout.strip().splitlines()[-1])
        return float(ran[way]["seconds"]) / (ran[way]["epochs"] if row.by_epoch else 1)

    times = report.interleaved({way: lambda way=way: run(way) for way in (*row.ours, *row.peers)}, repeats)
    found = []
    for way, (_, least, peers) in row.ours.items():
        best = min(peers, key=lambda peer: report.median(times[peer]))
        ratios = [p / t for p, t in zip(times[best], times[way])]
        found.append({
            "study": row.what, "way": way, "s": report.median(times[way]), "best peer": best, "its s": report.median(times[best]),
            "ratio": report.median(ratios), "spread": report.spread(ratios), "at least": least,
            "holds": report.median(ratios) >= least, "failed": ran[way]["failed"], "summary": ran[way]["summary"].split("\n"),
        })  # fmt: skip
        if row.against_one is not None:
            ratios = [p / t for p, t in zip(times[ONE], times[way])]
            found.append(found[-1] | {
                "best peer": ONE, "its s": report.median(times[ONE]), "ratio": report.median(ratios),
                "spread": report.spread(ratios), "at least": row.against_one, "holds": report.median(ratios) >= row.against_one,
            })  # fmt: skip
    return found


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--only", nargs="+", default=[], help="studies whose names have one of these words")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.run == [START]:
        print(started())
        return 0
    if arguments.run:
        row, way, *rest = ROWS[arguments.run[0]], *arguments.run[1:]
        print(json.dumps(run_here(row, way)) if way != "worker" else work(row, *rest) or "")
        return 0

    def wanted(what: str) -> bool:
        return not arguments.only or any(word in what for word in arguments.only)

    parts = {what: lambda row=row: measure(row, arguments.repeats) for what, row in ROWS.items()}
    parts[START] = lambda: measure_start(arguments.repeats)
    rows = []
    for measured in (part() for what, part in parts.items() if wanted(what)):
        rows += measured
        for each in measured if not arguments.json else ():
            print(
                f"{each['study']}, {each['way']}: {each['ratio']:.2f} ({each['spread']})",
                *each["summary"],
                sep="\n  ",
                flush=True,
            )
    return report.finish(
        "ordinary", arguments, rows, "s: of the study, or for each epoch trained; ratio: the best peer's over ours"
    )


if __name__ == "__main__":
    sys.exit(main())
