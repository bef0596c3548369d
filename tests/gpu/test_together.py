"""Jobs side by side at a limit at which their steps must meet, as each alone and as torch's own loop, with nothing reserved
beyond the limit."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.gpu_parts import cnn, mlp

STANDIN = "STANDIN_SCHEDULE" in os.environ
STEPS = 6 if STANDIN else 40
Batch = tuple[torch.Tensor, torch.Tensor]


class Language(nn.Module):
    """GPT-2 with two layers, and its dropout, that names the next of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, :32].mul(8).long().remainder(64)
        return self.model(input_ids=tokens, use_cache=False).logits[:, -1, :10]


class Sentences(nn.Module):
    """BERT with two layers, that names the class of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
        config = BertConfig(vocab_size=64, max_position_embeddings=32, intermediate_size=128, **sizes)
        self.model = BertForSequenceClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x[:, :32].mul(8).long().remainder(64)).logits


def residual() -> nn.Module:
    from torchvision.models import resnet18

    return nn.Sequential(nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 3, 1), resnet18(num_classes=10))


def patches() -> nn.Module:
    from torchvision.models import VisionTransformer

    vision = VisionTransformer(16, 4, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, dropout=0.1, num_classes=10)
    return nn.Sequential(nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 3, 1), vision)


MODELS: dict[str, Callable[[], nn.Module]] = {"dropout": mlp, "convolutions": cnn, "language": Language}
LARGE: dict[str, Callable[[], nn.Module]] = {"residual": residual, "patches": patches, "sentences": Sentences}
Result = tuple[list[float], dict[str, torch.Tensor]]
RESERVE = 24 << 20
PAGE = 2 << 20


def job(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[Batch], torch.Generator]:
    torch.manual_seed(seed)
    model = (MODELS | LARGE)[name]().cuda()
    numbers = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(64, 256, generator=numbers), torch.randint(0, 10, (64,), generator=numbers)) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, [(x.cuda(), y.cuda()) for x, y in batches], torch.Generator("cuda").manual_seed(100 + seed)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in model.state_dict().items()}


def torchs_own(name: str, seed: int) -> Result:
    """The same steps by a loop of torch's, whose random numbers are the process's, seeded."""
    model, optimizer, batches, numbers = job(name, seed)
    before, losses = torch.cuda.get_rng_state(), []
    torch.cuda.set_rng_state(numbers.get_state())
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.cuda.set_rng_state(before)
    return losses, state_of(model)


@dataclass
class Trained:
    """Losses and state of jobs, by seed, with what their steps need in bytes: what stays, and what is theirs alone."""

    results: dict[int, Any] = field(default_factory=dict)
    stays: int = 0
    height: int = 0


def train(names: dict[int, str], lanes: int, memory: int, graphs: bool) -> Trained:
    """Steps of several jobs, by seed, each on a thread of its own."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    made = Trained()
    with wf.Engine("cuda", memory=memory, lanes=lanes, reserve=RESERVE, device_graphs=graphs) as engine:
        jobs = {seed: job(name, seed) for seed, name in names.items()}
        users = torch.cuda.memory_reserved()  # until their steps claim it
        torch.cuda.reset_peak_memory_stats()

        def work(seed: int, name: str) -> None:
            try:
                model, optimizer, batches, generator = jobs[seed]
                step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator, name=name)
                losses = [float(step(batch).detach()) for batch in batches]
                assert step.opaque_reason is None
                made.stays += step.plan.persistent + step.plan.batch
                made.height = max(made.height, step.plan.height)
                made.results[seed] = losses, state_of(model)
            except BaseException as error:
                made.results[seed] = error

        threads = [threading.Thread(target=work, args=one) for one in names.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in made.results.values():
            if isinstance(result, BaseException):
                raise result
        engine.native.check()
        assert engine.native.placed[0] > 0
        assert (engine.stats().graphs["launched"] > 0) is graphs
        # A tensor of the user's that needs a new page has it whole: one for each thread.
        assert torch.cuda.max_memory_reserved() - users <= engine.limit + len(names) * PAGE
    return made


def pages_at_once() -> int:
    """How often the lanes were not in order where they have a page of the stand-in, each at an address of its own."""
    return int(ctypes.CDLL(None).fake_pages_at_once()) if STANDIN else 0


def same(one: Result, other: Result) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@functools.cache
def alone_on_a_lane(name: str, seed: int) -> Trained:
    return train({seed: name}, 1, 1 << 30, False)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *LARGE])
def test_bits_of_torchs_own_loop(name: str, graphs: bool) -> None:
    mine = train({0: name}, 1, 1 << 30, True) if graphs else alone_on_a_lane(name, 0)
    assert same(mine.results[0], torchs_own(name, 0))


# How many jobs, and the model of every other one.
FORMS = [(count, name) for count in (2, 4, 8) for name in MODELS if count < 8 or not STANDIN or name == "dropout"]
FORMS += [(2, name) for name in LARGE]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("count, name", FORMS)
def test_bits_as_alone_where_lanes_meet(count: int, name: str, graphs: bool) -> None:
    before = pages_at_once()
    meet(count, name, graphs)
    assert pages_at_once() == before


def meet(count: int, name: str, graphs: bool) -> None:
    others = [other for other in (MODELS if name in MODELS else LARGE) if other != name]
    names = {seed: name if seed % 2 == 0 else others[seed // 2 % len(others)] for seed in range(count)}
    alone = {seed: alone_on_a_lane(which, seed) for seed, which in names.items()}
    # Room for the highest step, and for a quarter of another: steps must meet in their arena.
    height = max(one.height for one in alone.values())
    limit = sum(one.stays for one in alone.values()) + height + max(height // 4, 4 << 20) + RESERVE
    together = train(names, count, limit, graphs)
    for seed, which in names.items():
        assert same(together.results[seed], alone[seed].results[seed]), f"{which} with seed {seed}"
