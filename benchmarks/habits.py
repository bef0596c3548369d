"""Loops of people's habits that no capture serves, against the same without waterflow: never slower, and memory stays flat.

Batches of ever new kinds (mixup's number, file names, graphs) in one loop each, by windows of steps that plain ones and
``wf.Step``'s take in turn; studies whose steps run eagerly through ``wf.optimize`` and through ``study.optimize``; and how often
a study of eager trials says so.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import waterflow as wf
from benchmarks import report

STEPS, WARM, WINDOW = 2_000, 500, 125
TRIALS, TRIAL_STEPS = 6, 600
FLAT_MIB = 4.0


def mlp() -> nn.Module:
    """A small perceptron on rows of 64 numbers."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


class GraphNetwork(nn.Module):
    """Two rounds of messages over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """(nodes, 16) and (2, edges) to (nodes, 4)."""
        for layer in (self.first, self.second):
            x = F.relu(layer(x))
            x = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return self.head(x)


def rows() -> Iterator[tuple[Tensor, Tensor]]:
    """Ever the same 28 batches of 64 rows."""
    x, y = torch.randn(1792, 64), torch.randint(10, (1792,))
    return itertools.cycle(list(zip(x.split(64), y.split(64))))


def mixed() -> Iterator[Any]:
    """Batches with mixup's number, a new one for each."""
    for x, y in rows():
        share, order = float(torch.rand(())), torch.randperm(64)
        yield share * x + (1 - share) * x[order], y, y[order], share


def named() -> Iterator[Any]:
    """Batches with the names of their files."""
    for number, (x, y) in enumerate(rows()):
        yield {"x": x, "y": y, "name": [f"{number:06}-{row}.png" for row in range(4)]}


def graphs() -> Iterator[Any]:
    """Graphs of ever other sizes."""
    while True:
        nodes, edges = int(torch.randint(200, 1200, ())), int(torch.randint(1000, 5000, ()))
        yield torch.randn(nodes, 16), torch.randint(nodes, (2, edges)), torch.randint(4, (nodes,))


def mixup_loss(model: nn.Module, batch: Any) -> Tensor:
    """Of two labels for each row."""
    output = model(batch[0])
    return batch[3] * F.cross_entropy(output, batch[1]) + (1 - batch[3]) * F.cross_entropy(output, batch[2])


def named_loss(model: nn.Module, batch: Any) -> Tensor:
    """Without a look at the names."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def graph_loss(model: nn.Module, batch: Any) -> Tensor:
    """Of each node's label."""
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


@dataclass
class Loop:
    """One kind of batches; ``goal``: steps a second against plain ones, at least."""

    what: str
    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    goal: float


LOOPS = [
    Loop("mixup's number in the batch", mlp, mixed, mixup_loss, 0.9),
    Loop("file names in the batch", mlp, named, named_loss, 1.5),
    Loop("ever new graphs", GraphNetwork, graphs, graph_loss, 0.85),
]


def one_step(loop: Loop, through: bool) -> tuple[Callable[[Any], Any], wf.Step | None]:
    """A function that takes a batch, and the Step behind it, if any."""
    torch.manual_seed(0)
    model = loop.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if through:
        step = wf.Step(model, step=loop.loss, optimizer=optimizer)
        return step, step

    def plain(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loop.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return plain, None


def measure_loop(loop: Loop) -> dict[str, Any]:
    """Windows of the two ways in turn, over batches that each makes for itself; counted behind the first steps."""
    ways = {"plain": one_step(loop, False), "waterflow": one_step(loop, True)}
    batches = {way: loop.batches() for way in ways}
    process = psutil.Process()

    def window(way: str) -> float:
        given = list(itertools.islice(batches[way], WINDOW))
        return report.seconds(lambda: [float(ways[way][0](batch)) for batch in given])

    runs = {way: partial(window, way) for way in ways}
    report.interleaved(runs, WARM // WINDOW)
    memory = process.memory_info().rss
    times = report.interleaved(runs, (STEPS - WARM) // WINDOW)
    grown = (process.memory_info().rss - memory) / 2**20
    step = ways["waterflow"][1]
    assert step is not None
    ratios = [plain / through for plain, through in zip(times["plain"], times["waterflow"])]
    ratio = report.median(ratios)
    return {
        "loop": loop.what, "eager steps": step.eager_steps, "of": step.steps, "ratio": ratio, "spread": report.spread(ratios),
        "at least": loop.goal, "MiB grown": grown, "holds": ratio >= loop.goal and grown < FLAT_MIB,
    }  # fmt: skip


def logged(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is written to a log at every step."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    logging.getLogger("habits").debug("loss %.4f", loss.item())
    return loss


def branching(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is another one where it is large."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss if loss < 3.0 else 3.0 + 0.1 * (loss - 3.0)


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    """A classifier's."""
    return F.cross_entropy(model(batch[0]), batch[1])


ADAMW, RMSPROP = partial(torch.optim.AdamW, fused=True), torch.optim.RMSprop
STUDIES: list[tuple[str, Callable[..., Tensor], Callable[..., torch.optim.Optimizer]]] = [
    ("logging in the step", logged, ADAMW),
    ("control flow that depends on data", branching, ADAMW),
    ("RMSprop", plain_loss, RMSPROP),
]


def objective(loss: Callable[..., Tensor], optimizer: Callable[..., Any], through: bool, steps: int) -> Any:
    """A trial that is one loop over batches in memory."""

    def train(trial: optuna.Trial) -> float:
        torch.manual_seed(trial.number)
        model = mlp()
        own = optimizer(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
        step = wf.Step(model, step=loss, optimizer=own) if through else None
        last = torch.zeros(())
        for batch in itertools.islice(rows(), steps):
            if step is not None:
                last = step(batch)
            else:
                own.zero_grad()
                last = loss(model, batch)
                last.backward()
                own.step()
        return float(last)

    return train


def run_study(loss: Any, optimizer: Any, through: bool, trials: int = TRIALS, steps: int = TRIAL_STEPS) -> float:
    """Seconds of one study."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    train = objective(loss, optimizer, through, steps)
    if through:
        return report.seconds(lambda: wf.optimize(study, train, n_trials=trials))
    return report.seconds(lambda: study.optimize(train, n_trials=trials))


def measure_study(what: str, loss: Any, optimizer: Any, pairs: int) -> dict[str, Any]:
    """Pairs of one study each way; the first of each way warms up."""
    ways = {way: partial(run_study, loss, optimizer, way == "waterflow") for way in ("plain", "waterflow")}
    for way in ways.values():
        way()
    times = report.interleaved(ways, pairs)
    ratios = [plain / through for plain, through in zip(times["plain"], times["waterflow"])]
    ratio = report.median(ratios)
    return {
        "loop": f"study: {what}", "ratio": ratio, "spread": report.spread(ratios), "at least": 0.95, "holds": ratio >= 0.95,
        "plain, s": report.median(times["plain"]),
    }  # fmt: skip


class Counted(logging.Handler):
    """Counts the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.said.append(record.getMessage())


def count_warnings(trials: int = 200) -> dict[str, Any]:
    """What a study of trials that all run eagerly says."""
    logger, counted = logging.getLogger("waterflow"), Counted()
    logger.addHandler(counted)
    try:
        run_study(plain_loss, RMSPROP, True, trials, 3)
    finally:
        logger.removeHandler(counted)
    return {
        "loop": f"warnings in {trials} eager trials",
        "ratio": float(len(counted.said)),
        "at least": 1,
        "holds": len(counted.said) == 1,
    }


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose names have one of these words")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *((loop.what, partial(measure_loop, loop)) for loop in LOOPS),
        *((f"study: {what}", partial(measure_study, what, loss, optimizer, arguments.repeats)) for what, loss, optimizer in STUDIES),
        ("warnings", count_warnings),
    ]  # fmt: skip
    measured = [row() for name, row in rows if not arguments.only or any(word in name for word in arguments.only)]
    return report.finish("habits", arguments, measured, "ratio: steps a second against the same without waterflow")


if __name__ == "__main__":
    sys.exit(main())
