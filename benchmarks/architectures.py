"""A search over architectures, where each trial is another graph: waterflow against ``study.optimize`` with one and with two threads.

    python -m benchmarks.architectures [PART ...] [--rounds 3] [--save]

``sizes``: ``A of S`` are A cells of ``examples.cells`` of S steps each, on batches of 16 digits, a plain step of 2 to 4 ms. ``recipe``
is the study of that example, ``lengths`` are loops in a study. Runs are processes of their own, in turn; captures count.
``limited`` has memory for three cells, and ``flat`` looks at the memory of 400.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import optuna
import psutil
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from benchmarks import report
from benchmarks.memory_limit import Watch
from examples import cells, demo

Row = dict[str, Any]
SIZES = {(40, 60): 0.97, (6, 600): 1.3, (2, 6_000): 2.0}
BATCH = 16
WAYS = ("waterflow", "one thread", "two threads")
TRIALS = 60
LENGTHS, HINDSIGHT = (5, 20, 60, 200, 1_000), ("never", "at once", "ours")
ROWS = 5_120  # of a batch where memory counts
FLAT_MIB, BESIDE = 5.0, 64 << 20


def points(count: int) -> list[dict[str, Any]]:
    """Architectures, no two of them equal."""
    numbers, seen = random.Random(0), dict[tuple[Any, ...], dict[str, Any]]()
    while len(seen) < count:
        point: dict[str, Any] = {f"edge{n}": numbers.choice(cells.OPERATIONS[1:]) for n in range(len(cells.EDGES))}
        point["channels"] = numbers.choice(cells.WIDTHS)
        seen[tuple(point.values())] = point
    return list(seen.values())


class Batches(demo.Batches):
    """As many batches as a trial has steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(BATCH)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        left = self.steps
        while left > 0:
            for batch in super().__iter__():
                yield batch
                left -= 1
                if left == 0:
                    return


def job(trial: optuna.Trial, steps: int) -> wf.Job:
    """A trial as a job."""
    edges, channels = cells.choose(trial)
    return wf.Job(
        f"trial {trial.number}", lambda: cells.network(edges, channels), lambda: Batches(steps), loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True), evaluate=demo.accuracy, epochs=1, seed=0,
        read_ahead=True,
    )  # fmt: skip


def made(trial: Any, lr: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A trial's model and optimizer."""
    edges, channels = cells.choose(trial)
    torch.manual_seed(0)
    model = cells.network(edges, channels)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    """PyTorch's ordinary loop."""
    for images, labels in batches:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def eager(trial: optuna.Trial, steps: int) -> float:
    """``job`` as an ordinary objective."""
    model, optimizer = made(trial)
    train_plainly(model, optimizer, Batches(steps))
    return demo.accuracy(model)


def eager_recipe(trial: optuna.Trial) -> float:
    """``cells.build`` as an ordinary objective."""
    model, optimizer = made(trial, lr=3e-3)
    batches, value = demo.Batches(cells.BATCH), 0.0
    for epoch in range(cells.EPOCHS):
        train_plainly(model, optimizer, batches)
        value = demo.accuracy(model)
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def _run(way: str, count: int, steps: int) -> float:
    """Seconds of a study of trials of ``steps`` steps, in this process; of the recipe's, seconds for each of its epochs, if 0."""
    _warm(2 if way == "two threads" else 1)
    if steps:
        study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
        for point in points(count):
            study.enqueue_trial(point)
    else:
        study = cells.make_study()
    began = time.perf_counter()
    if way == "waterflow":
        wf.optimize(study, functools.partial(job, steps=steps) if steps else cells.build, count, keep_weights="none")
    else:
        study.optimize(functools.partial(eager, steps=steps) if steps else eager_recipe, count)
    seconds = time.perf_counter() - began
    return seconds if steps else seconds / sum(len(trial.intermediate_values) for trial in study.trials)


def _compared(what: str, count: int, steps: int, goal: float, rounds: int) -> Row:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(rounds):
        for way in random.Random(seed).sample(WAYS, len(WAYS)):
            taken[way].append(_in_process("run", way, str(count), str(steps)))
    medians = {way: report.median(seconds) for way, seconds in taken.items()}
    gain = min(medians[way] for way in WAYS[1:]) / medians["waterflow"]
    shown = {way: f"{medians[way]:.3g} s ({report.spread(taken[way])})" for way in WAYS}
    return {"what": what, **shown, "times as fast": gain, "goal": goal, "holds": gain >= goal}


def _in_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.architectures", "--do", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def sizes(rounds: int) -> list[Row]:
    """Architectures of a few lengths."""
    return [_compared(f"{count} of {steps:,}", count, steps, goal, rounds) for (count, steps), goal in SIZES.items()]


def recipe(rounds: int) -> list[Row]:
    """The example's study."""
    return [_compared(f"examples.cells, {TRIALS} trials, by epoch", TRIALS, 0, 1.2, rounds)]


def lengths(rounds: int) -> list[Row]:
    """Loops of a length that nobody knows, against the faster of never capturing and of capturing at once; then of a known one."""
    rows = []
    for steps in LENGTHS:
        ways = random.Random(steps).sample(HINDSIGHT, len(HINDSIGHT))
        taken = {way: [_in_process("loops", way, str(steps)) for _ in range(rounds)] for way in ways}
        for number, (what, goal) in enumerate((("unknown", 1.8), ("known", 1.3))):
            never, at_once, ours = (report.median([one[number] for one in taken[way]]) for way in HINDSIGHT)
            rows.append({
                "what": f"a loop of {steps:,} steps, {what} before", "never captured": f"{never:.3g} s", "at once": f"{at_once:.3g} s",
                "waterflow": f"{ours:.3g} s", "times as long": ours / min(never, at_once), "goal": goal,
                "holds": ours <= goal * min(never, at_once),
            })  # fmt: skip
    return rows


def _loops(way: str, steps: int) -> tuple[float, float]:
    """Seconds of the first loop in a study, and of the third."""
    _warm()
    given, seconds = points(8), list[float]()

    def train(steps: int) -> float:
        (model, optimizer), batches = made(optuna.trial.FixedTrial(given.pop())), list(Batches(steps))
        began = time.perf_counter()
        if way == "never":
            train_plainly(model, optimizer, batches)
        else:
            step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
            for batch in batches:
                step(batch)
        seconds.append(time.perf_counter() - began)
        return 0.0

    for _ in range(2):  # outside of a study: it is captured at once, and what that costs is known
        train(60)
    if way == "ours":
        wf.optimize(optuna.create_study(), lambda trial: train(3), 1)
        wf.optimize(optuna.create_study(), lambda trial: train(steps), 3, max_concurrent=1)
    else:
        for length in (3, steps, steps, steps):
            train(length)
    return seconds[-3], seconds[-1]


def limited(_rounds: int) -> list[Row]:
    """A search under a limit for three of its cells."""
    limit, most, states = _in_process("limited")
    held = most <= limit + BESIDE and states == {"COMPLETE": 40}
    return [{
        "what": f"40 cells of 6 steps on {ROWS:,} rows, memory for three", "limit MiB": limit / 2**20,
        "most MiB": most / 2**20, "states": states,
        "goal": "limit and 64 MiB", "holds": held,
    }]  # fmt: skip


def _large(trial: Any) -> wf.Job:
    data, large = demo.digits(), job(trial, 1)
    rows = torch.arange(ROWS) % len(data.images)
    large.data, large.epochs = [(data.images[rows], data.labels[rows])] * 3, 2
    return large


def _plan() -> float:
    peaks = []
    for point in points(40)[:10]:
        one = _large(optuna.trial.FixedTrial(point))
        model = one.model()  # type: ignore[operator]
        step = wf.Step(model, loss=one.loss, optimizer=one.optimizer(model.parameters()))
        peaks.append(step.plan_for(one.data[0]).peak)  # type: ignore[index]
    return report.median(peaks)


def _limited() -> tuple[int, int, dict[str, int]]:
    limit = int(3 * _in_process("plan") / 0.75)  # a quarter of a small limit is the reserve
    _warm()
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for given in points(40):
        study.enqueue_trial(given)
    with Watch() as watch:
        print(wf.optimize(study, _large, 40, memory=limit, keep_weights="none", max_concurrent=4), file=sys.stderr)
    return limit, watch.most, dict(Counter(trial.state.name for trial in study.trials))


def flat(_rounds: int) -> list[Row]:
    """Resident memory over many architectures."""
    grown = _in_process("flat")
    what = "400 architectures, MiB from the 100th to the last"
    return [{"what": what, "grown MiB": grown, "goal": FLAT_MIB, "holds": grown <= FLAT_MIB}]


def _flat() -> float:
    resident: list[int] = []
    _warm()
    study = optuna.create_study(direction="maximize")
    for point in points(400):
        study.enqueue_trial(point)

    def look(_study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        resident.append(psutil.Process().memory_info().rss)

    wf.optimize(study, lambda trial: job(trial, 120), 400, keep_weights="none", callbacks=[look])
    return (max(resident[300:]) - max(resident[100:200])) / 2**20


def _warm(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    demo.digits()
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)  # imports


IN_PROCESSES: dict[str, Callable[..., Any]] = {
    "run": _run, "loops": _loops, "plan": _plan, "limited": _limited, "flat": _flat,
}  # fmt: skip
PARTS: dict[str, Callable[[int], list[Row]]] = {
    "sizes": sizes, "recipe": recipe, "lengths": lengths, "limited": limited, "flat": flat,
}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if arguments.do:
        name, *given = arguments.do
        print(json.dumps(IN_PROCESSES[name](*(int(one) if one.isdigit() else one for one in given))))
        return 0
    parts = {name: functools.partial(part, arguments.rounds) for name, part in PARTS.items()}
    return report.finish_parts("architectures", parser, arguments, parts)


if __name__ == "__main__":
    sys.exit(main())
