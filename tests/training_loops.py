"""Training loops as people write them, each as ``loop(make, trial)`` for ``program_runs.compare``."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

Loop = Callable[[Any, int], dict[str, Any]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """Remember one."""
    LOOPS[function.__name__] = function
    return function


def mlp(out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, out))


def batches(count: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)


@loop
def gan_with_turns(make: Any, trial: int) -> dict[str, Any]:
    generator, critic = nn.Linear(4, 6), mlp(1)
    first, second = adamw(generator), adamw(critic)
    loss = F.binary_cross_entropy_with_logits

    def critic_step(model: nn.Module, batch: Any) -> Any:
        real, noise = batch
        fake = generator(noise).detach()
        return loss(model(real), torch.ones(8, 1)) + loss(model(fake), torch.zeros(8, 1))

    train_critic = make(critic, optimizer=second, step=critic_step)
    train_generator = make(generator, optimizer=first, step=lambda model, z: loss(critic(model(z)), torch.ones(8, 1)))
    losses = []
    for number, (x, _) in enumerate(batches()):
        second.zero_grad()  # of what the generator's backward pass has left there
        losses.append(train_critic((x, torch.randn(8, 4))))
        if number % 2:
            losses.append(train_generator(torch.randn(8, 4)))
    return {"losses": losses, "parts": [generator, critic, first, second]}


@loop
def wasserstein_with_penalty(make: Any, trial: int) -> dict[str, Any]:
    critic = mlp(1)
    optimizer = adamw(critic)

    def step(model: nn.Module, batch: Any) -> Any:
        real, fake = batch
        share = torch.rand(8, 1)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        slope = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty, {"penalty": penalty.detach()}

    train = make(critic, optimizer=optimizer, step=step)
    return {"losses": [train((x, torch.randn(8, 6))) for x, _ in batches()], "parts": [critic, optimizer]}


@loop
def dqn(make: Any, trial: int) -> dict[str, Any]:
    online = mlp(2)
    target = copy.deepcopy(online)
    optimizer, replay, epsilon = adamw(online), deque(maxlen=20), 1.0

    def step(model: nn.Module, batch: Any) -> Any:
        state, action, reward, after = batch
        with torch.no_grad():
            best = reward + 0.9 * target(after).max(1).values
        return F.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], best)

    train = make(online, optimizer=optimizer, step=step)
    losses, state = [], torch.randn(6)
    for number in range(30):
        with torch.no_grad():
            action = random.randrange(2) if random.random() < epsilon else int(online(state[None]).argmax())
        after = torch.randn(6)
        replay.append((state, action, float(after.sum()), after))
        state, epsilon = after, max(0.1, epsilon * 0.9)
        if len(replay) >= 8 and number % 3 == 0:
            chosen = random.sample(list(replay), 8)
            states, actions, rewards, afters = zip(*chosen)
            losses.append(train((torch.stack(states), torch.tensor(actions), torch.tensor(rewards), torch.stack(afters))))
        if number % 7 == 0:
            target.load_state_dict(online.state_dict())
    return {"losses": losses, "parts": [online, target, optimizer], "epsilon": epsilon}


@loop
def ppo(make: Any, trial: int) -> dict[str, Any]:
    actor = mlp(3)
    optimizer, clip = adamw(actor), {"range": 0.2, "entropy": 0.01}

    def step(model: nn.Module, batch: Any) -> Any:
        state, action, old, advantage = batch
        scores = model(state).log_softmax(1)
        ratio = (scores.gather(1, action[:, None])[:, 0] - old).exp()
        clipped = ratio.clamp(1 - clip["range"], 1 + clip["range"])
        entropy = -(scores.exp() * scores).sum(1).mean()
        return -torch.minimum(ratio * advantage, clipped * advantage).mean() - clip["entropy"] * entropy

    train = make(actor, optimizer=optimizer, step=step)
    losses = []
    for x, _ in batches(4):
        with torch.no_grad():
            scores = actor(x).log_softmax(1)
            action = torch.multinomial(scores.exp(), 1)[:, 0]
            old = scores.gather(1, action[:, None])[:, 0]
        advantage = torch.randn(8)
        for _ in range(2):
            losses.append(train((x, action, old, advantage)))
        clip["range"] *= 0.9
        clip["entropy"] *= 0.5
    return {"losses": losses, "parts": [actor, optimizer]}


@loop
def inner_loop_of_maml(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        x, y = batch
        weights = dict(m.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(torch.func.functional_call(m, weights, (x[:4],)), y[:4])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        return F.cross_entropy(torch.func.functional_call(m, weights, (x[4:],)), y[4:])

    train = make(model, optimizer=optimizer, step=step)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer]}


@loop
def mean_teacher(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer, state = adamw(model), {"step": 0}

    def step(m: nn.Module, batch: Any) -> Any:
        x, y = batch
        weight = min(1.0, state["step"] / 4)
        return F.cross_entropy(m(x), y) + weight * F.mse_loss(m(x).softmax(1), teacher(x).softmax(1))

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for batch in batches():
        losses.append(train(batch))
        state["step"] += 1
        with torch.no_grad():
            for its, mine in zip(teacher.parameters(), model.parameters()):
                its.mul_(0.9).add_(mine, alpha=0.1)
    return {"losses": losses, "parts": [model, teacher, optimizer]}


class ModelEma:
    """As in timm: a copy whose tensors follow."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for its, mine in zip(self.module.state_dict().values(), model.state_dict().values()):
            its.copy_(self.decay * its + (1 - self.decay) * mine)


@loop
def model_ema_in_the_step(make: Any, trial: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, ema = adamw(model), ModelEma(model, 0.9)

    def step(m: nn.Module, batch: Any) -> Any:
        ema.update(m)
        return F.cross_entropy(m(batch[0]), batch[1])

    train = make(model, optimizer=optimizer, step=step)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, ema.module, optimizer]}


@loop
def mixup(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        x, y = batch
        share, order = np.random.beta(0.4, 0.4), torch.randperm(x.shape[0])
        out = m(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    train = make(model, optimizer=optimizer, step=step)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer]}


@loop
def cutmix_sometimes(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = adamw(model)
    rng = random.Random(3)

    def step(m: nn.Module, batch: Any) -> Any:
        x, y = batch
        if rng.random() < 0.5:
            cut = rng.randrange(1, 5)
            x = torch.cat([x[:, :cut], x.flip(0)[:, cut:]], 1)
        return F.cross_entropy(m(x), y)

    train = make(model, optimizer=optimizer, step=step)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer], "rng": rng.random()}


class Curriculum(nn.Module):
    """Reads the epoch that the loop sets; smooths labels by a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.epoch, self.rates = mlp(), 0, [0.0, 0.05, 0.1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * min(1.0, (1 + self.epoch) / 3))

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, label_smoothing=self.rates[min(self.epoch, 2)])


@loop
def curriculum_by_epoch(make: Any, trial: int) -> dict[str, Any]:
    model = Curriculum()
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: m.loss(m(b[0]), b[1]))
    losses = []
    for epoch in range(4):
        model.epoch = epoch
        losses += [train(batch) for batch in batches(2)]
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def distillation(make: Any, trial: int) -> dict[str, Any]:
    student, teachers = mlp(), [mlp().eval(), mlp().eval()]
    optimizer, temperature = adamw(student), iter([1.0, 2.0, 4.0] * 9)
    picked = itertools.cycle(teachers)
    current: dict[str, Any] = {}

    def step(m: nn.Module, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            soft = (current["teacher"](x) / current["t"]).softmax(1)
        return F.cross_entropy(m(x), y) + F.kl_div((m(x) / current["t"]).log_softmax(1), soft, reduction="batchmean")

    train = make(student, optimizer=optimizer, step=step)
    losses = []
    for batch in batches():
        current.update(teacher=next(picked), t=next(temperature))
        losses.append(train(batch))
    return {"losses": losses, "parts": [student, optimizer, *teachers]}


@loop
def stochastic_weight_averaging(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches(8)):
        losses.append(train(batch))
        if number > 2:
            average.update_parameters(model)
            schedule.step()
    return {"losses": losses, "parts": [model, average, optimizer], "lr": schedule.get_last_lr()}


@loop
def lookahead(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model)
    slow = [p.detach().clone() for p in model.parameters()]
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches(8)):
        losses.append(train(batch))
        if number % 3 == 2:
            for p, old in zip(model.parameters(), slow):
                old.lerp_(p.detach(), 0.5)
                p.data = old.clone()
    return {"losses": losses, "parts": [model, optimizer], "slow": slow}


@dataclass
class TrainerState:
    """As a trainer keeps it."""

    global_step: int = 0
    history: list[float] = field(default_factory=list)
    best: float = math.inf
    patience: int = 0
    stop: bool = False


@loop
def trainer_with_state(make: Any, trial: int) -> dict[str, Any]:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.state = mlp(), TrainerState()
            self.optimizer = adamw(self.model)
            self.step = make(self.model, optimizer=self.optimizer, step=self.compute_loss)

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            if self.state.global_step >= 3:
                loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            return loss

        def train(self) -> None:
            for batch in itertools.chain(batches(), batches()):
                loss = float(self.step(batch))
                self.state.history.append(loss)
                self.state.global_step += 1
                if loss < self.state.best - 0.01:
                    self.state.best, self.state.patience = loss, 0
                else:
                    self.state.patience += 1
                    self.state.stop = self.state.patience > 4
                if self.state.stop:
                    break

    trainer = Trainer()
    trainer.train()
    return {"parts": [trainer.model, trainer.optimizer], "state": trainer.state}


@loop
def step_counts_itself(make: Any, trial: int) -> dict[str, Any]:
    class Trainer:
        global_step = 0

        def compute(self, model: nn.Module, batch: Any) -> Any:
            self.global_step += 1
            return F.cross_entropy(model(batch[0]), batch[1]) / math.sqrt(self.global_step)

    model, trainer = mlp(), Trainer()
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=trainer.compute)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer], "count": trainer.global_step}


class Accuracy:
    """As in torchmetrics: sums tensors over steps."""

    def __init__(self) -> None:
        self.right, self.seen, self.values = torch.tensor(0), torch.tensor(0), []

    def update(self, out: torch.Tensor, y: torch.Tensor) -> None:
        self.right += (out.argmax(1) == y).sum()
        self.seen += y.numel()

    def compute(self) -> float:
        return float(self.right / self.seen)


@loop
def metric_in_the_step(make: Any, trial: int) -> dict[str, Any]:
    model, metric = mlp(), Accuracy()
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        out = m(batch[0])
        metric.update(out.detach(), batch[1])
        return F.cross_entropy(out, batch[1])

    train = make(model, optimizer=optimizer, step=step)
    losses = [train(batch) for batch in batches()]
    return {
        "losses": losses,
        "parts": [model, optimizer],
        "accuracy": metric.compute(),
        "right": metric.right,
        "seen": metric.seen,
    }


class Scheduled(nn.Module):
    """Dropout and stochastic depth that the loop schedules; layers that are sometimes left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3))
        self.drop, self.keep = nn.Dropout(0.0), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            if self.training and random.random() > self.keep:
                continue
            h = h + F.relu(block(self.drop(h)))
        return self.last(h)


@loop
def dropout_schedule_and_stochastic_depth(make: Any, trial: int) -> dict[str, Any]:
    model = Scheduled()
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches(8)):
        model.drop.p, model.keep = 0.05 * number, 1.0 - 0.1 * (number // 2)
        losses.append(train(batch))
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def teacher_forcing(make: Any, trial: int) -> dict[str, Any]:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out, self.ratio = nn.GRUCell(3, 6), nn.Linear(6, 3), 1.0

        def forward(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            given, made = torch.zeros(8, 3), []
            for _t in range(3):
                h = self.cell(given, h)
                made.append(self.out(h))
                forced = random.random() < self.ratio
                given = F.one_hot(targets, 3).float() if forced else made[-1].softmax(1).detach()
            return torch.stack(made)

    model = Decoder()
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(m(batch[0], batch[1]).mean(0), batch[1])

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for batch in batches():
        losses.append(train(batch))
        model.ratio = max(0.0, model.ratio - 0.2)
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def learning_rate_in_the_loss(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)

    def step(m: nn.Module, batch: Any) -> Any:
        decay = sum((p**2).sum() for p in m.parameters())
        return F.cross_entropy(m(batch[0]), batch[1]) + optimizer.param_groups[0]["lr"] * 0.1 * decay

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for batch in batches(8):
        losses.append(train(batch))
        schedule.step()
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def class_weights_that_follow(make: Any, trial: int) -> dict[str, Any]:
    model, counts = mlp(), np.ones(3)
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        weight = torch.tensor(counts.sum() / (3 * counts), dtype=torch.float32)
        return F.cross_entropy(m(batch[0]), batch[1], weight=weight)

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for x, y in batches():
        counts += np.bincount(y.numpy(), minlength=3)
        losses.append(train((x, y)))
    return {"losses": losses, "parts": [model, optimizer], "counts": counts}


@functools.lru_cache(maxsize=8)
def causal(size: int) -> torch.Tensor:
    return torch.full((size, size), -math.inf).triu(1)


class Positions(nn.Module):
    """A table of positions that grows with the longest input, and a cached mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out, self.table = nn.Linear(6, 6), nn.Linear(6, 3), torch.zeros(0, 6)
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        if self.table.shape[0] < size:
            self.table = torch.arange(size)[:, None] / (1 + torch.arange(6.0))
        if size not in self.masks:
            self.masks[size] = torch.ones(size, size).tril()
        h = self.q(x + self.table[:size].sin())
        return self.out((h @ h.t() * self.masks[size] + causal(size)).softmax(1) @ h)


@loop
def cached_masks_and_positions(make: Any, trial: int) -> dict[str, Any]:
    causal.cache_clear()
    model = Positions()
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = [train((x[:size], y[:size])) for size, (x, y) in zip((4, 8, 4, 6, 8, 4), batches())]
    return {"losses": losses, "parts": [model, optimizer], "masks": model.masks, "table": model.table, "mask": causal(8)}


@loop
def lazy_layers_and_late_buffers(make: Any, trial: int) -> dict[str, Any]:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.mean(0))
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.net(x - self.mean)

    model = Late()
    model.net(torch.zeros(1, 6))
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer]}


@loop
def weights_tied_in_the_middle(make: Any, trial: int) -> dict[str, Any]:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "out": nn.Linear(6, 3)})
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m["out"](m["b"](m["a"](b[0]).tanh())), b[1]))
    losses = []
    for number, batch in enumerate(batches()):
        if number == 3:
            model["b"].weight = model["a"].weight
        losses.append(train(batch))
    return {"losses": losses, "parts": [model]}


@loop
def layers_unfrozen_one_by_one(make: Any, trial: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=0.01, fused=True)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches(8)):
        if number in (2, 5):
            layer = model[2 if number == 2 else 0].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.001 * number})
        losses.append(train(batch))
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def logs_of_losses_and_norms(make: Any, trial: int) -> dict[str, Any]:
    model, log = mlp(), {"loss": [], "norm": deque(maxlen=3)}
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(m(batch[0]), batch[1])
        log["loss"].append(loss.detach())
        log["norm"].append(m[0].weight.detach().norm())
        return loss

    train = make(model, optimizer=optimizer, step=step)
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer], "log": log}


@loop
def losses_weighted_by_their_history(make: Any, trial: int) -> dict[str, Any]:
    model, recent = mlp(), {"a": deque([1.0], maxlen=3), "b": deque([1.0], maxlen=3)}
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        out = m(batch[0])
        parts = {"a": F.cross_entropy(out, batch[1]), "b": out.pow(2).mean()}
        weights = {name: 1 / (sum(values) / len(values)) for name, values in recent.items()}
        return sum(weights[name] * part for name, part in parts.items()), {k: v.detach() for k, v in parts.items()}

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for batch in batches():
        losses.append(train(batch))
        for name, value in losses[-1][1].items():
            recent[name].append(float(value))
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def contrastive_queue(make: Any, trial: int) -> dict[str, Any]:
    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.at = mlp(4), 0
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for its, mine in zip(self.slow.parameters(), self.net.parameters()):
                    its.lerp_(mine, 0.1)
                keys = F.normalize(self.slow(x), dim=1)
            ours = F.normalize(self.net(x), dim=1)
            scores = torch.cat([(ours * keys).sum(1, keepdim=True), ours @ self.queue.clone().t()], 1)
            self.queue[self.at : self.at + 8] = keys
            self.at = (self.at + 8) % 16
            return F.cross_entropy(scores / 0.1, torch.zeros(8, dtype=torch.long))

    model = Moco()
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=0.01, fused=True)
    train = make(model, optimizer=optimizer, step=lambda m, b: m(b[0]))
    return {"losses": [train(batch) for batch in batches()], "parts": [model, optimizer], "at": model.at}


@loop
def hidden_state_carried_over(make: Any, trial: int) -> dict[str, Any]:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out, self.state = nn.GRU(6, 6), nn.Linear(6, 3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made, state = self.rnn(x[None], self.state)
            self.state = state.detach()
            return self.out(made[0])

    model = Language()
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches()):
        if number == 4:
            model.state = None
        losses.append(train(batch))
    return {"losses": losses, "parts": [model, optimizer], "state": model.state}


@loop
def bad_batches_are_skipped(make: Any, trial: int) -> dict[str, Any]:
    model, skipped = mlp(), []
    optimizer = adamw(model)

    def step(m: nn.Module, batch: Any) -> Any:
        if batch[0].shape[0] < 4:
            raise ValueError("too small")
        return F.cross_entropy(m(batch[0]), batch[1])

    train = make(model, optimizer=optimizer, step=step)
    losses = []
    for number, (x, y) in enumerate(batches()):
        try:
            losses.append(train((x[:2], y[:2]) if number in (0, 3) else (x, y)))
        except ValueError as error:
            skipped.append((number, str(error)))
    return {"losses": losses, "parts": [model, optimizer], "skipped": skipped}


@loop
def pruned_by_masks(make: Any, trial: int) -> dict[str, Any]:
    model = mlp()
    optimizer = adamw(model)
    prune.l1_unstructured(model[0], "weight", amount=0.2)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses = []
    for number, batch in enumerate(batches()):
        if number == 3:
            prune.l1_unstructured(model[0], "weight", amount=0.3)
        losses.append(train(batch))
    return {"losses": losses, "parts": [model, optimizer]}


@loop
def weights_looked_at_beside_weight_norm(make: Any, trial: int) -> dict[str, Any]:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 3)))
    optimizer = adamw(model)
    train = make(model, optimizer=optimizer, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    losses, norms = [], []
    for batch in batches():
        losses.append(train(batch))
        norms += [model[0].weight.norm().detach(), model[2].weight.norm().detach()]
    return {"losses": losses, "parts": [model, optimizer], "norms": norms}
