"""Kinds of training loops, as people have them: jobs one after the other in plain PyTorch, and the same through waterflow.

Plain loops have the optimizer in the form that it has by default, and as many intra-op threads as make them faster: torch's
default, or one. Times hold all that a run takes. The README's table "Does it help you?" is made of this.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf
from benchmarks import report
from benchmarks.habits import GraphNetwork

SECONDS_A_ROW = 0.0005  # what the slow data set takes for each

LossOf = Callable[[nn.Module, Any], Tensor]  # of a model and a batch, a scalar
StepOf = Callable[[nn.Module, Optimizer, LossOf], Callable[[Any], Any]]


def plain_step(model: nn.Module, optimizer: Optimizer, loss: LossOf) -> Callable[[Any], Any]:
    """An ordinary step."""

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return step


def our_step(model: nn.Module, optimizer: Optimizer, loss: LossOf) -> wf.Step:
    """The same through waterflow."""
    return wf.Step(model, step=loss, optimizer=optimizer)


@dataclass(frozen=True)
class Loop:
    """Some jobs of one kind through ``wf.train``. ``model`` makes job number n's."""

    what: str
    jobs: int
    model: Callable[[int], nn.Module]
    data: Callable[[], Iterable[Any]]  # one epoch
    optimizer: Callable[..., Optimizer]
    loss: LossOf
    shared: bool = False  # one loader for all jobs
    padded: Callable[[], Iterable[Any]] | None = None  # what waterflow gets in the place of ``data``

    def plain(self) -> None:
        """One ordinary loop after the other."""
        for number in range(self.jobs):
            model = self.made(number)
            optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
            step = plain_step(model, optimizer, self.loss)
            for batch in self.data():
                step(batch)

    def together(self) -> wf.Results:
        """All of them through one call."""
        data = self.padded or self.data
        shared = wf.SharedData(data(), seed=0) if self.shared else None
        return wf.train(
            [
                wf.Job(
                    name=f"{self.what} {number}", model=self.made(number), data=shared or data(), step=self.loss, train_mode="as_is",
                    optimizer=lambda parameters: self.optimizer([p for p in parameters if p.requires_grad]),
                )
                for number in range(self.jobs)
            ]
        )  # fmt: skip

    def made(self, number: int) -> nn.Module:
        """Job ``number``'s model, the same each time."""
        torch.manual_seed(number)
        return self.model(number)


@dataclass(frozen=True)
class OwnLoop:
    """Jobs whose loops do more than steps, as trials of a study: ``train`` runs number n's with steps of the kind that it gets."""

    what: str
    jobs: int
    train: Callable[[int, StepOf], Any]
    at_once: int | None = None

    def plain(self) -> None:
        """One ordinary loop after the other."""
        for number in range(self.jobs):
            self.train(number, plain_step)

    def together(self) -> Any:
        """All of them in one study."""

        def objective(trial: optuna.Trial) -> float:
            self.train(trial.number, our_step)
            return 0.0

        return wf.optimize(optuna.create_study(), objective, n_trials=self.jobs, max_concurrent=self.at_once or "auto")


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Of a classifier."""
    return F.cross_entropy(model(batch[0]), batch[1])


def logged(model: nn.Module, batch: Any) -> Tensor:
    """The same, with the loss read within the step."""
    loss = cross_entropy(model, batch)
    if loss.item() > 1e6:
        print("the loss explodes")
    return loss


def mlp(_: int) -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def cnn(_: int) -> nn.Module:
    """A small convolutional network on 16 x 16 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Encoder(nn.Module):
    """A small transformer that classifies sequences of any length."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, 10)."""
        return self.head(self.blocks(x).mean(1))


def encoder(_: int) -> nn.Module:
    """One of them."""
    return Encoder()


class Padded(Encoder):
    """The same for padded sequences, with the mean of what is no padding."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """(batch, length, width), and (batch, length) that is true where there is none, to (batch, 10)."""
        there = (~padding).unsqueeze(2)
        return self.head((self.blocks(x, src_key_padding_mask=padding) * there).sum(1) / there.sum(1))


def padded(_: int) -> nn.Module:
    """One of them."""
    return Padded()


def of_padded(model: nn.Module, batch: Any) -> Tensor:
    """Loss of a classifier of padded sequences."""
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def sentences(count: int, multiple: int) -> Callable[[], list[Any]]:
    """Batches of sequences of up to 64 positions, padded to the longest of the batch, or to the next multiple of a number."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        most = int(torch.randint(8, 65, (), generator=generator))  # alike ones lie in one batch
        lengths = torch.randint(most // 2, most + 1, (8, 1), generator=generator)
        longest = -(-int(lengths.max()) // multiple) * multiple
        batches.append((torch.randn(8, longest, 64), torch.arange(longest) >= lengths, torch.randint(10, (8,))))
    return lambda: batches


def another(_: int) -> nn.Module:
    """A perceptron with widths and a depth that hardly any call before has had."""
    widths = [64, *(_ARCHITECTURES.randrange(32, 129) for _ in range(_ARCHITECTURES.randrange(2, 5)))]
    layers = [part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


_ARCHITECTURES = random.Random(0)


def graph_network(_: int) -> nn.Module:
    """Messages along edges, and classes of nodes."""
    return GraphNetwork()


def of_nodes(model: nn.Module, batch: Any) -> Tensor:
    """Loss of a graph network."""
    x, edges, classes = batch
    return F.cross_entropy(model(x, edges), classes)


def graphs(count: int, nodes: int, edges: int, spread: int = 0) -> Callable[[], list[Any]]:
    """``count`` steps on one graph, or with a spread each on another one, of a size of its own."""
    generator = torch.Generator().manual_seed(0)

    def graph() -> Any:
        more = int(torch.randint(spread + 1, (), generator=generator))
        n, e = nodes + more, edges + 4 * more
        return torch.randn(n, 16), torch.randint(n, (2, e), generator=generator), torch.randint(4, (n,), generator=generator)

    made = [graph() for _ in range(count)] if spread else [graph()] * count
    return lambda: made


def padded_graphs(made: Callable[[], list[Any]], nodes: int, edges: int) -> Callable[[], list[Any]]:
    """The same graphs, each with nodes and edges added that have no class: those edges lead from and to the last node."""

    def pad(x: Tensor, ends: Tensor, classes: Tensor) -> Any:
        return (
            F.pad(x, (0, 0, 0, nodes - len(x))), F.pad(ends, (0, edges - ends.shape[1]), value=nodes - 1),
            F.pad(classes, (0, nodes - len(classes)), value=-100),
        )  # fmt: skip

    whole = [pad(*graph) for graph in made()]
    return lambda: whole


def q_learning(number: int, step_of: StepOf) -> None:
    """DQN on a pole that is to be balanced: a step of the world and a training step on replayed ones, 600 times."""
    torch.manual_seed(number)
    online = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = copy.deepcopy(online).requires_grad_(False)
    chance = random.Random(number)
    replay: deque[tuple[Tensor, int, float, Tensor, bool]] = deque(maxlen=10_000)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        state, action, reward, after, done = batch
        wanted = reward + 0.99 * target(after).max(1).values * ~done
        return F.smooth_l1_loss(model(state).gather(1, action.unsqueeze(1)).squeeze(1), wanted)

    step = step_of(online, AdamW(online.parameters(), lr=1e-3), loss)
    state = torch.zeros(4)
    for moment in range(600):
        with torch.no_grad():
            action = chance.randrange(2) if chance.random() < 0.1 else int(online(state).argmax())
        after, done = pole(state, action)
        replay.append((state, action, 1.0, after, done))
        state = torch.zeros(4) if done else after
        if moment >= 64:
            states, actions, rewards, afters, dones = zip(*chance.sample(replay, 64))
            step((torch.stack(states), torch.tensor(actions), torch.tensor(rewards), torch.stack(afters), torch.tensor(dones)))
        if moment % 100 == 0:
            target.load_state_dict(online.state_dict())


def pole(state: Tensor, action: int) -> tuple[Tensor, bool]:
    """Place, speed, angle and turn of a pole on a cart 20 ms later, and whether it fell; linear near the top."""
    x, v, angle, turn = state.tolist()
    push = 10.0 if action else -10.0
    after = x + 0.02 * v, v + 0.02 * (push - 0.7 * angle), angle + 0.02 * turn, turn + 0.02 * (15.8 * angle - 1.46 * push)
    return torch.tensor(after), abs(after[0]) > 2.4 or abs(after[2]) > 0.2


def of_a_trainer(number: int, step_of: StepOf) -> None:
    """A small BERT in transformers' Trainer, whose step is replaced by ours."""
    from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

    class Replaced(Trainer):
        step: Any = None

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if self.step is None:
                self.step = step_of(model, self.optimizer.optimizer, lambda model, batch: model(**batch).loss)
            return self.step(dict(self._prepare_inputs(inputs)))

    torch.manual_seed(number)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        problem_type="single_label_classification",
    )  # fmt: skip
    rows = [{"input_ids": tokens, "labels": tokens[0] % 2} for tokens in torch.randint(200, (1600, 16))]
    settings = {"per_device_train_batch_size": 16, "num_train_epochs": 1, "max_grad_norm": 0.0, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        kind = Trainer if step_of is plain_step else Replaced
        trainer = kind(BertForSequenceClassification(config), TrainingArguments(folder, **settings, **quiet), train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class LoRA(nn.Module):
    """A frozen linear layer, shared by all who adapt it, with a low-rank sum beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """As the layer."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """A classifier whose frozen layers are ``shared``."""

    def __init__(self, shared: nn.ModuleList) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoRA(layer) for layer in shared)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 256) to (batch, 10)."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


def adapters() -> Callable[[int], nn.Module]:
    """Classifiers over one base of eight layers."""
    base = nn.ModuleList(nn.Linear(256, 256) for _ in range(8)).requires_grad_(False)
    return lambda _: Adapted(base)


class SlowRows(Dataset):
    """Rows that take a while: waiting, as for a disk, or computing in Python."""

    def __init__(self, count: int, computes: bool) -> None:
        self.rows = torch.randn(count, 64)
        self.computes = computes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.computes:
            until = time.thread_time() + SECONDS_A_ROW
            while time.thread_time() < until:
                pass
        else:
            time.sleep(SECONDS_A_ROW)
        return self.rows[index], index % 10


class Batches:
    """``count`` steps over a few batches that lie in memory; a shape for each."""

    def __init__(self, count: int, shapes: list[tuple[int, ...]]) -> None:
        self.batches = [(torch.randn(shape), torch.randint(10, shape[:1])) for shape in shapes]
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))


def memory(count: int, *shape: int) -> Callable[[], Batches]:
    """Four batches of one shape."""
    batches = Batches(count, [shape] * 4)
    return lambda: batches


def lengths(count: int, how_many: int) -> Callable[[], Batches]:
    """Sequences of so many lengths in turn."""
    batches = Batches(count, [(8, 8 + 2 * length, 64) for length in range(how_many)])
    return lambda: batches


def new_shapes(count: int) -> Batches:
    """Batches of sizes that no call before has had."""
    return Batches(count, [(8 + next(_SIZES), 64) for _ in range(count)])


_SIZES = itertools.count()


def slow(computes: bool = False) -> DataLoader:
    """A loader of 512 slow rows."""
    return DataLoader(SlowRows(512, computes), 32, shuffle=True)


def tensors() -> DataLoader:
    """A loader of 3,200 rows that lie in memory."""
    return DataLoader(TensorDataset(torch.randn(3200, 64), torch.randint(10, (3200,))), 32, shuffle=True)


def loops() -> list[Loop | OwnLoop]:
    """All kinds, in the order of the table."""
    adamw, row = partial(AdamW, lr=1e-3), (32, 64)
    molecules = graphs(100, 100, 400, spread=60)
    return [
        Loop("8 small MLPs", 8, mlp, memory(300, *row), adamw, cross_entropy),
        Loop("4 small CNNs", 4, cnn, memory(100, 32, 1, 16, 16), adamw, cross_entropy),
        Loop("4 MLPs, loader of tensors", 4, mlp, tensors, adamw, cross_entropy),
        Loop("4 MLPs, loader computes", 4, mlp, partial(slow, computes=True), adamw, cross_entropy),
        Loop("4 MLPs, slow loader", 4, mlp, slow, adamw, cross_entropy),
        Loop("4 MLPs, slow loader, shared", 4, mlp, slow, adamw, cross_entropy, shared=True),
        Loop("8 MLPs, Adagrad", 8, mlp, memory(300, *row), partial(Adagrad, lr=1e-2), cross_entropy),
        Loop("8 MLPs, .item() in the step", 8, mlp, memory(300, *row), adamw, logged),
        Loop("4 transformers, 8 lengths", 4, encoder, lengths(100, 8), adamw, cross_entropy),
        Loop("4 transformers, 64 lengths", 4, encoder, lengths(100, 64), adamw, cross_entropy),
        Loop("4 MLPs, Adagrad, slow loader", 4, mlp, slow, partial(Adagrad, lr=1e-2), cross_entropy),
        Loop("1 MLP, ever new shapes", 1, mlp, partial(new_shapes, 50), adamw, cross_entropy),
        Loop("1 small MLP", 1, mlp, memory(1000, *row), adamw, cross_entropy),
        Loop("4 LoRA adapters, one base", 4, adapters(), memory(100, 32, 256), adamw, cross_entropy),
        Loop("4 transformers, padded", 4, padded, sentences(100, 1), adamw, of_padded, padded=sentences(100, 16)),
        OwnLoop("4 DQNs", 4, q_learning),
        Loop("8 architectures, 50 steps", 8, another, memory(50, *row), adamw, cross_entropy),
        Loop("8 architectures, 500 steps", 8, another, memory(500, *row), adamw, cross_entropy),
        Loop("4 graph networks, one graph", 4, graph_network, graphs(100, 1000, 4000), adamw, of_nodes),
        Loop("4 graph networks, padded", 4, graph_network, molecules, adamw, of_nodes, padded=padded_graphs(molecules, 161, 641)),
        OwnLoop("1 BERT in a Trainer", 1, of_a_trainer, at_once=1),
    ]


def measure(loop: Loop | OwnLoop, repeats: int) -> dict[str, Any]:
    """One row. The first call of each way warms up and is not counted."""
    threads = torch.get_num_threads()

    def plain(count: int) -> float:
        torch.set_num_threads(count)
        try:
            return report.seconds(loop.plain)
        finally:
            torch.set_num_threads(threads)

    ways = {f"{count} threads": partial(plain, count) for count in {1, threads}}
    stats = loop.together().stats
    assert stats is not None
    for way in ways.values():
        way()
    times = report.interleaved({**ways, "together": lambda: report.seconds(loop.together)}, repeats)
    best = min(ways, key=lambda way: report.median(times[way]))
    ratios = [p / t for p, t in zip(times[best], times["together"])]
    return {
        "loop": loop.what, "eager steps": round(stats.eager_steps / stats.steps, 2), "plain with": best,
        "plain, s": report.median(times[best]), "waterflow, s": report.median(times["together"]),
        "ratio": report.median(ratios), "spread": report.spread(ratios),
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=[], help="loops whose names have one of these words")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    wanted = [loop for loop in loops() if not arguments.only or any(word in loop.what for word in arguments.only)]
    rows = [measure(loop, arguments.repeats) for loop in wanted]
    return report.finish("loops", arguments, rows, "ratio: plain loops' time over waterflow's; over 1 is faster")


if __name__ == "__main__":
    sys.exit(main())
