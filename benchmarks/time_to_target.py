"""Time to a good model: orders of a study's trials, replayed from recorded curves, and live against Optuna's own.

    python -m benchmarks.time_to_target [replay table digits first twice deadline] [--save]

``replay``: the 300 recorded trials of a space (``benchmarks.curves``) as a study on two lanes, in virtual time: an epoch takes its
training steps. A sampler's point stands for the nearest recorded trial that was not taken yet. The target is the value of the third
best of the 300; it is reached when a trial reports it. ``crossing`` is made up: before its middle a curve
tells nothing of its end.

``first``: 100 trials of the table's space: when all have reported once, how much time pauses took, and what the order takes with 1,000
open trials. ``deadline``: ten studies that end after a minute. ``twice``: a deterministic study, twice.

``table``, ``digits``: live studies of 60 trials, ten seeds, TPE, each in processes of its own; seconds until a trial reports the value of
the tenth best of the 300, captures included. Optuna's ``study.optimize`` runs in two processes of one thread, with its successive
halving. A study that ends before counts as infinite.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import multiprocessing
import os
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import optuna
import torch
from optuna.trial import TrialState

import waterflow as wf
from benchmarks import curves, report
from benchmarks.curves import Recorded
from benchmarks.spaces import SPACES
from waterflow.study.order import Fifo, Policy, Promising, TrialOrder, TrialProgress

Row = dict[str, Any]
LANES, BEST = 2, 3


# -- the spaces that are replayed


@functools.cache
def recorded(space: str) -> list[Recorded]:
    """The trials of a space."""
    return _crossing() if space == "crossing" else curves.load(space)


def _crossing(count: int = 300, epochs: int = 27) -> list[Recorded]:
    numbers = random.Random(0)
    made = []
    for _ in range(count):
        x, y = numbers.random(), numbers.random()
        early, end = numbers.uniform(0.2, 0.5), 0.4 + 0.4 * x * (1 - (y - 0.5) ** 2) + numbers.gauss(0, 0.02)
        late = [1 / (1 + math.exp((epochs / 2 - epoch) / 2)) for epoch in range(epochs)]
        curve = [(1 - share) * early * (1 - math.exp(-epoch - 1)) + share * end for epoch, share in enumerate(late)]
        made.append(Recorded({"x": x, "y": y}, curve, 40.0))
    return made


def choose(space: str, trial: optuna.Trial) -> dict[str, Any]:
    """Ask for a point of the space."""
    if space == "crossing":
        return {name: trial.suggest_float(name, 0.0, 1.0) for name in ("x", "y")}
    SPACES[space].choose(trial)
    return trial.params


class Nearest:
    """Recorded trials by their values; each one is taken once."""

    def __init__(self, trials: list[Recorded]) -> None:
        self._left = {id(trial): trial for trial in trials}
        self._scales = {name: self._scale([trial.params[name] for trial in trials]) for name in trials[0].params}

    def take(self, params: dict[str, Any]) -> Recorded:
        """Return the nearest that is left, and take it."""
        found = min(self._left.values(), key=lambda trial: sum(self._apart(n, v, trial.params[n]) for n, v in params.items()))
        return self._left.pop(id(found))

    def _scale(self, values: list[Any]) -> tuple[float, float, bool] | None:
        if isinstance(values[0], str):
            return None
        low, high = min(values), max(values)
        log = low > 0 and high / low > 100
        return (math.log(low), math.log(high), True) if log else (low, high, False)

    def _apart(self, name: str, one: Any, other: Any) -> float:
        scale = self._scales[name]
        if scale is None:
            return float(one != other)
        low, high, log = scale
        return ((math.log(one) - math.log(other) if log else one - other) / (high - low)) ** 2


# -- replay


@dataclass(frozen=True)
class Way:
    """An order, with a pruner."""

    name: str
    policy: Callable[[], Policy]
    pruner: Callable[[], optuna.pruners.BasePruner] = optuna.pruners.NopPruner


FIFO, STOPPING, PROMISING = "fifo", "fifo, stopping successive halving", "promising"
WAYS = (
    Way(FIFO, Fifo),
    Way(STOPPING, Fifo, lambda: optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)),
    Way(PROMISING, Promising),
    Way("promising, median pruner", Promising, lambda: optuna.pruners.MedianPruner(n_warmup_steps=2)),
)
SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed),
}


def target_of(trials: list[Recorded], best: int) -> float:
    """Return the value of the trial with this rank."""
    return sorted(trial.curve[-1] for trial in trials)[-best]


def replay(space: str, way: Way, sampler: str, seed: int) -> float:
    """Return the steps of a lane after which the target was reported; infinity if it never was."""
    trials = recorded(space)
    target = target_of(trials, BEST)
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[sampler](seed), pruner=way.pruner())
    order, nearest = TrialOrder(way.policy(), maximize=True), Nearest(trials)
    asked: list[tuple[optuna.Trial, Recorded]] = []
    epochs: dict[int, int] = {}
    events: list[tuple[float, int]] = []  # the ends of epochs

    def begin(now: float) -> None:
        while len(events) < LANES and (found := order.next(LANES, len(trials) - len(asked), bool(events))) is not None:
            if found.state == "new":
                trial = study.ask()
                asked.append((trial, nearest.take(choose(space, trial))))
                order.add(trial.number, {})
                epochs[trial.number] = 0
            order.runs(found.number)
            heapq.heappush(events, (now + asked[found.number][1].steps, found.number))

    begin(0.0)
    while events:
        now, number = heapq.heappop(events)
        trial, known = asked[number]
        epoch, value = epochs[number], known.curve[epochs[number]]
        if value >= target:
            return now
        epochs[number] += 1
        trial.report(value, epoch)
        order.report(number, epoch, value)
        if epoch + 1 == len(known.curve) or trial.should_prune():
            if epoch + 1 == len(known.curve):
                study.tell(trial, value)
            else:
                study.tell(trial, state=TrialState.PRUNED)
            order.ended(number)
        elif order.goes_on(number, LANES, len(trials) - len(asked)):
            heapq.heappush(events, (now + known.steps, number))
        else:
            order.stands(number)
        begin(now)
    return math.inf


def _replayed(case: tuple[str, str, int, int]) -> float:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space, sampler, way, seed = case
    return replay(space, WAYS[way], sampler, seed)


def replays(seeds: int) -> list[Row]:
    """Median and 90th percentile of each way, and how often it is as fast as the first two."""
    spaces = ("table", "digits", "crossing")
    cases = [(s, sampler, w, seed) for s in spaces for sampler in SAMPLERS for w in range(len(WAYS)) for seed in range(seeds)]
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        found = dict(zip(cases, pool.map(_replayed, cases, chunksize=5)))
    rows: list[Row] = []
    for space in spaces:
        for sampler in SAMPLERS:
            steps = {w.name: sorted(found[space, sampler, i, seed] for seed in range(seeds)) for i, w in enumerate(WAYS)}
            for name, taken in steps.items():
                median = statistics.median(taken)
                gains = [statistics.median(steps[other]) / median for other in (FIFO, STOPPING)]
                goals = (3.0, 1.2) if space == "table" else (1 / 1.1, None)
                asked = name == PROMISING
                rows.append(
                    {
                        "what": f"{space}, {sampler}: {name}",
                        "steps of a lane": f"{median:,.0f}",
                        "90 of 100": f"{taken[math.ceil(0.9 * seeds) - 1]:,.0f}",
                        "times as fast as fifo": gains[0],
                        "as stopping": gains[1],
                        "goal": ", ".join(f"{goal:.2f}" for goal in goals if goal) if asked else None,
                        "holds": all(gain >= goal for gain, goal in zip(gains, goals) if goal) if asked else None,
                    }
                )
    return rows


# -- live

TRIALS, LIVE_SEEDS, LIVE_BEST = 60, 10, 10
OPTUNA = "study.optimize in two processes, stopping successive halving"
LIVE: dict[str, tuple[str, bool]] = {  # the order, and whether a pruner ends trials
    "promising": ("promising", False),
    "promising, stopping successive halving": ("promising", True),
    "fifo, stopping successive halving": ("fifo", True),
}


def live(space: str, goal: float) -> list[Row]:
    """Seconds to the target of each way, in rounds of one seed each."""
    target = target_of(recorded(space), LIVE_BEST)
    ways = [OPTUNA, *LIVE]
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(LIVE_SEEDS):
        for way in random.Random(seed).sample(ways, len(ways)):
            taken[way].append(_seconds_to(target, space, way, seed))
    rows: list[Row] = []
    medians = {way: statistics.median(seconds) for way, seconds in taken.items()}
    best = min(LIVE, key=lambda way: medians[way])
    for way, seconds in taken.items():
        gain = medians[OPTUNA] / medians[way]
        rows.append(
            {
                "what": f"{space}, live: {way}",
                "seconds": f"{medians[way]:.1f} ({report.spread(seconds)})",
                "as study.optimize": gain,
                "goal": f"{goal:.1f}" if way == best else None,
                "holds": gain >= goal if way == best else None,
                "all": seconds,
            }
        )
    return rows


def _seconds_to(target: float, space: str, way: str, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="time-to-target-") as folder:
        given = ["--work", space, way, str(seed), str(target), str(Path(folder) / "journal")]
        command = [sys.executable, "-m", "benchmarks.time_to_target", *given]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2 if way == OPTUNA else 1)
        ]
        streams = [(worker, worker.stdin, worker.stdout) for worker in workers]
        with selectors.DefaultSelector() as selector:
            for _, _, lines in streams:
                assert lines is not None and lines.readline() == "ready\n"
                selector.register(lines, selectors.EVENT_READ)
            began = time.monotonic()
            for _, orders, _ in streams:
                assert orders is not None
                orders.write("go\n")
                orders.flush()
            reached = math.inf
            while selector.get_map() and reached == math.inf:
                for key, _ in selector.select():
                    lines = cast(TextIO, key.fileobj)
                    told = lines.readline()
                    selector.unregister(lines)
                    if told:
                        reached = float(told) - began
        for worker in workers:
            worker.kill()
            worker.wait()
        return reached


def work(space: str, way: str, seed: int, target: float, path: str) -> None:
    """Run a study in this process; tell when the target is reached, and end."""
    torch.set_num_threads(1)
    SPACES[space].read()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports

    def see(value: float) -> float:
        if value >= target:
            os.write(1, f"{time.monotonic()}\n".encode())
            os._exit(0)
        return value

    def build(trial: optuna.Trial) -> wf.Job:
        job = SPACES[space].job(trial)
        evaluate = cast(Any, job.evaluate)
        return replace(job, evaluate=lambda model: see(evaluate(model)))

    def eager(trial: optuna.Trial) -> float:
        report_ = trial.report
        trial.report = lambda value, step: report_(see(value), step)  # type: ignore[method-assign]
        return SPACES[space].eager(trial)

    prunes = way == OPTUNA or LIVE[way][1]
    settings: dict[str, Any] = {
        "sampler": optuna.samplers.TPESampler(seed=seed),
        "pruner": optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3) if prunes else optuna.pruners.NopPruner(),
        "direction": "maximize",
    }
    if way == OPTUNA:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
        settings |= {"study_name": "one", "storage": storage, "load_if_exists": True}
        settings["sampler"] = optuna.samplers.TPESampler(seed=None if Path(path).stat().st_size else seed)  # each its own numbers
    study = optuna.create_study(**settings)
    os.write(1, b"ready\n")
    sys.stdin.readline()
    if way != OPTUNA:
        wf.optimize(study, build, TRIALS, order=cast(Any, LIVE[way][0]))
        return
    callback = optuna.study.MaxTrialsCallback(TRIALS, states=None)
    study.optimize(eager, callbacks=[callback])


# -- what the order costs, and keeps


def _study(seed: int = 0, tpe: bool = False) -> optuna.Study:
    sampler = optuna.samplers.TPESampler(seed=seed) if tpe else optuna.samplers.RandomSampler(seed=seed)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())


def first(count: int = 100, opened: int = 1_000) -> list[Row]:
    """First reports of all trials, the share of pauses, and the order's cost."""
    torch.set_num_threads(1)
    wf.optimize(_study(1), SPACES["table"].job, 2)  # imports
    fifo = wf.optimize(_study(), SPACES["table"].job, count, keep_weights="none")
    done = wf.optimize(_study(), SPACES["table"].job, count, order="promising", keep_weights="none")
    seen: dict[int, float] = {}
    for made in done.timeline().reports:
        seen.setdefault(made.trial, made.seconds)
    all_seen, pausing = max(seen.values()), done.pausing / (done.seconds * len(done.lane_busy))
    order, numbers = TrialOrder(Promising(), maximize=True), random.Random(0)
    for number in range(opened):
        order.add(number, {epoch: numbers.random() for epoch in range(numbers.choice([1] * 6 + [3, 3, 9]))})
    order.runs(0)

    def decide() -> None:
        for _ in range(100):
            if not order.goes_on(0, 2, 1):
                order.runs(0)
            order.next(2, 1, running=True)

    each = report.seconds(decide) / 100
    asked = sum(Promising().asks(TrialProgress(0, [0.0] * count)) for count in range(1, SPACES["table"].epochs))
    cost = each * asked * count / done.seconds
    reported = f"after {all_seen:.1f} s, {all_seen / fifo.seconds:.2f} of the {fifo.seconds:.1f} s in which first-come ends all"
    paused = f"{done.pausing:.2f} s, {pausing:.1%} of two lanes' time"
    ordering = f"{each * 1e6:.0f} us for each of {asked} decisions of a trial, {cost:.2%} of such a study's time"
    return [
        _row(f"{count} trials: all have reported once", reported, "0.20", all_seen <= 0.2 * fifo.seconds),
        _row(f"{done.pauses} pauses of them", paused, "2 %", pausing <= 0.02),
        _row(f"ordering, {opened:,} open trials", ordering, "1 %", cost <= 0.01),
    ]


def _row(what: str, figure: str, goal: str, holds: bool) -> Row:
    return {"what": what, "figure": figure, "goal": goal, "holds": holds}


def twice() -> list[Row]:
    """The same deterministic study, twice."""

    def once() -> list[Any]:
        study = _study(tpe=True)
        torch.manual_seed(0)
        wf.optimize(study, SPACES["digits"].job, 24, order="promising", deterministic=True, max_concurrent=3)
        return [(trial.number, trial.params, trial.state, trial.intermediate_values) for trial in study.trials]

    same = once() == once()
    return [_row("deterministic=True, twice", "the same study" if same else "others", "the same", same)]


def deadlines(repeats: int = 10, seconds: float = 60.0) -> list[Row]:
    """Studies that end in time, with what they have."""
    took, best = [], []
    for seed in range(repeats):
        study = _study(seed)
        began = time.perf_counter()
        wf.optimize(study, SPACES["table"].job, deadline=seconds, order="promising", keep_weights="none")
        took.append(time.perf_counter() - began)
        last = [trial.intermediate_values[max(trial.intermediate_values)] for trial in study.trials if trial.intermediate_values]
        best.append(study.best_value == max(last) and all(trial.state.is_finished() for trial in study.trials))
    figure = f"{max(took):.2f} s at most; {sum(best)} of {repeats} have the best of all trials' last reports"
    holds = max(took) <= seconds + 2 and all(best)
    return [_row(f"deadline of {seconds:g} s, {repeats} times", figure, f"{seconds + 2:g} s; all", holds)]


def _replays(arguments: argparse.Namespace) -> list[Row]:
    return replays(arguments.seeds)


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "replay": _replays,
    "table": lambda _: live("table", 1.5),
    "digits": lambda _: live("digits", 1.2),
    "first": lambda _: first(),
    "twice": lambda _: twice(),
    "deadline": lambda _: deadlines(),
}


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if arguments.work:
        space, way, seed, target, path = arguments.work
        work(space, way, int(seed), float(target), path)
        return 0
    parts = {name: functools.partial(part, arguments) for name, part in PARTS.items()}
    return report.finish_parts("time_to_target", parser, arguments, parts)


if __name__ == "__main__":
    sys.exit(main())
