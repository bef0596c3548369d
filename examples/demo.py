"""The demo: a study of hyperparameters of small networks that read handwritten digits, several trials at a time (``make demo``).

One study, written three ways: ``objective_eager`` is an ordinary Optuna objective, ``objective`` is the same with
a ``wf.Step`` for the body of its loop, and ``build`` returns a ``wf.Job`` instead of having a loop. All
three make the same networks from the same numbers and read the same batches in the same order.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf

EPOCHS = 20
SEED = 0  # of the split, and in every trial of weights, shuffling and dropout
# Of 1797 images. All the batch sizes divide it, so that every step of a trial has the same shape.
TRAINING_IMAGES = 1280
SIDE = 8
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """Images as [count, 1, 8, 8] floats of mean 0 and deviation 1, and their digits as [count] integers."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@functools.lru_cache(maxsize=1)
def digits() -> Digits:
    """scikit-learn's handwritten digits, split by a fixed seed. Raises ImportError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the demo reads scikit-learn's digits: pip install scikit-learn") from None
    source = load_digits()
    images = torch.from_numpy(source.images).to(torch.float32).reshape(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(source.target).to(torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    return Digits(images[train], labels[train], images[test], labels[test])


class Batches:
    """The loader of all three ways: shuffled anew each epoch from its own numbers, and cut from memory.

    A pass yields (images [batch, 1, 8, 8], labels [batch]).
    """

    def __init__(self, batch_size: int, seed: int = SEED) -> None:
        self.batch_size = batch_size
        self._data = digits()
        self._numbers = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self._data.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self._data.images), generator=self._numbers)
        for rows in order.split(self.batch_size):
            yield self._data.images.index_select(0, rows), self._data.labels.index_select(0, rows)


@dataclass(frozen=True)
class Choice:
    """What a trial is to try."""

    kind: str
    depth: int
    width: int
    dropout: float
    optimizer: str
    lr: float
    batch_size: int


def choose(trial: optuna.Trial) -> Choice:
    """Ask the trial for a point of the search space."""
    return Choice(
        kind=trial.suggest_categorical("kind", ["cnn", "mlp"]),
        depth=trial.suggest_int("depth", 1, 3),
        width=trial.suggest_categorical("width", [8, 16, 32]),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
        optimizer=trial.suggest_categorical("optimizer", ["SGD", "Adam", "AdamW"]),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
    )


def make_model(kind: str, depth: int, width: int, dropout: float = 0.0, seed: int = SEED) -> nn.Module:
    """A convolutional network (``cnn``: ``width`` channels with BatchNorm) or a perceptron (``mlp``).

    Its weights come from numbers of its own: trials are made at the same time, and the process has one generator.
    """
    layers: list[nn.Module] = []
    with torch.device("meta"):  # draws no numbers
        if kind == "cnn":
            channels, side = 1, SIDE
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
                channels, side = width, side // 2
            layers += [nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels * side * side, CLASSES)]
        elif kind == "mlp":
            layers.append(nn.Flatten())
            features = SIDE * SIDE
            for _ in range(depth):
                layers += [nn.Linear(features, 4 * width), nn.ReLU(), nn.Dropout(dropout)]
                features = 4 * width
            layers.append(nn.Linear(features, CLASSES))
        else:
            raise ValueError(f"kind must be 'cnn' or 'mlp'; got {kind!r}")
        model = nn.Sequential(*layers)
    model = model.to_empty(device="cpu")
    numbers = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=numbers)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # draws no numbers
            layer.reset_running_stats()
    return model


def make_optimizer(choice: Choice, parameters: Any) -> torch.optim.Optimizer:
    """The chosen optimizer in its fused form: the fastest there is, and the same for all three ways."""
    if choice.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=choice.lr, momentum=0.9, fused=True)
    made: type[Any] = getattr(torch.optim, choice.optimizer)
    return made(parameters, lr=choice.lr, fused=True)


def accuracy(model: nn.Module) -> float:
    """Share of the test images that ``model`` reads rightly."""
    data, was_training = digits(), model.training
    model.eval()
    with torch.no_grad():
        right = (model(data.test_images).argmax(dim=1) == data.test_labels).float().mean()
    model.train(was_training)
    return float(right)


def objective_eager(trial: optuna.Trial) -> float:
    """An ordinary objective: PyTorch's training loop, and a report to the pruner after each epoch."""
    choice = choose(trial)
    model = make_model(choice.kind, choice.depth, choice.width, choice.dropout)
    optimizer = make_optimizer(choice, model.parameters())
    batches = Batches(choice.batch_size)
    torch.manual_seed(SEED)
    value = 0.0
    for epoch in range(EPOCHS):
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        value = accuracy(model)
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def objective(trial: optuna.Trial) -> float:
    """The same objective for ``wf.optimize``: one line makes a step, and the loop calls it."""
    choice = choose(trial)
    model = make_model(choice.kind, choice.depth, choice.width, choice.dropout)
    optimizer = make_optimizer(choice, model.parameters())
    batches = Batches(choice.batch_size)
    numbers = torch.Generator().manual_seed(SEED)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=numbers, name=name_of(trial, choice))
    value = 0.0
    for epoch in range(EPOCHS):
        for batch in batches:
            step(batch)
        value = accuracy(model)
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def build(trial: optuna.Trial) -> wf.Job:
    """The same trial as a job: ``wf.optimize`` trains, evaluates and prunes it."""
    choice = choose(trial)
    return wf.Job(
        name=name_of(trial, choice),
        model=lambda: make_model(choice.kind, choice.depth, choice.width, choice.dropout),
        data=lambda: Batches(choice.batch_size),
        read_ahead=True,  # batches come from a table, and each lies in memory of its own
        loss=F.cross_entropy,
        optimizer=lambda parameters: make_optimizer(choice, parameters),
        evaluate=accuracy,
        epochs=EPOCHS,
        seed=SEED,
    )


def name_of(trial: optuna.Trial, choice: Choice) -> str:
    """What a trial is called in pictures and messages."""
    return f"trial {trial.number}, {choice.kind}"


def steps_of(trial: optuna.trial.FrozenTrial) -> int:
    """Training steps that a finished trial took."""
    return len(trial.intermediate_values) * TRAINING_IMAGES // int(trial.params["batch_size"])


def create_study(storage: Any = None, seed: int = 0, study_name: str | None = None) -> optuna.Study:
    """The study: a seeded TPE sampler that knows what is under way, and a median pruner."""
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, constant_liar=True)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1)
    return optuna.create_study(storage=storage, study_name=study_name, sampler=sampler, pruner=pruner, direction="maximize")


def one_by_one(study: optuna.Study, seed: int) -> tuple[float, int]:
    """The trials of ``study`` again, in the same order, as anybody trains them: seconds and steps."""
    again = create_study(seed=seed)
    for trial in study.trials:
        again.enqueue_trial(trial.params)
    begin = time.perf_counter()
    again.optimize(objective_eager, len(study.trials), show_progress_bar=True)
    return time.perf_counter() - begin, sum(steps_of(trial) for trial in again.trials)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the sampler: which hyperparameters are tried")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for memory.png and trace.json")
    parser.add_argument("--no-compare", action="store_true", help="leave out the same trials by study.optimize")
    asked = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    asked.out.mkdir(parents=True, exist_ok=True)

    def save(timeline: wf.Timeline) -> None:
        timeline.save_png(asked.out / "memory.png")
        timeline.save_trace(asked.out / "trace.json")

    load = os.getloadavg()[0]
    digits()  # read before the clock runs
    study = create_study(seed=asked.seed)
    print(f"{asked.trials} trials of networks that read handwritten digits, several at a time ...")
    done = wf.optimize(study, objective, asked.trials, show_progress_bar=True, timeline=save)
    print(done)
    print(f"best: trial {study.best_trial.number} reads {study.best_value:.1%} of the test images, {study.best_params}")
    if not asked.no_compare:
        print("the same trials one by one, without waterflow ...")
        seconds, steps = one_by_one(study, asked.seed)
        print(f"wf.optimize: {done.steps:,} steps in {done.seconds:.1f} s; {len(done.lane_busy)} lanes of one thread each")
        print(f"study.optimize: {steps:,} steps in {seconds:.1f} s; {torch.get_num_threads()} threads, fused optimizers")
        busy = f", but the machine was busy (a load of {load:.1f}; a build just before counts): compare again when it is quiet"
        print(f"{seconds / done.seconds:.2f} times as fast{busy if load > 0.2 * (os.cpu_count() or 1) else ''}")
        print("the pruner decides by what it has seen, so that steps may differ")
    print(f"memory over time: {asked.out / 'memory.png'}; trace: {asked.out / 'trace.json'} (https://ui.perfetto.dev)")


if __name__ == "__main__":
    main()
