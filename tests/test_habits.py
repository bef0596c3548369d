"""Programs as people write them for their own data: a step of waterflow leaves the bits of the loop that they know.

``tests/training_loops.py`` has more, whose loops do more than to call a step.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributions import Beta
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer, lr_scheduler

import waterflow as wf
from tests.support import Compute, During, compare, images, same_bits
from waterflow.executor.program.capture_cache import CaptureCache
from waterflow.partition.capture.substitution import as_in_eager

LOOKS = "step reads the values"
CHANGES = "a step changes"


@dataclass
class Habit:
    """A program: a model, batches, and what a step computes of them; ``eager`` is what its reason for running eagerly says."""

    model: Callable[[], nn.Module]
    batches: list[Any]
    step: Compute
    optimizer: Callable[[Any], Optimizer] = lambda parameters: AdamW(parameters, lr=1e-2)
    eager: str | None = None
    during: During | None = None
    options: dict[str, Any] = field(default_factory=dict)


HABITS: dict[str, Callable[[], Habit]] = {}


def habit(function: Callable[[], Habit]) -> Callable[[], Habit]:
    HABITS[function.__name__] = function
    return function


def check(made: CaptureCache, one: Habit) -> None:
    """Train both ways: the same bits, captured or eager as foreseen, and not captured again and again."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = one.model()
        return model, one.optimizer(p for p in model.parameters() if p.requires_grad)

    compare(make, one.batches, step=one.step, during=one.during, opaque=one.eager, **one.options)
    assert made.captures <= 8 and (one.eager or made.captures)


def dense(inputs: int = 6, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# -- data of many kinds


@habit
def tabular() -> Habit:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(-1), batch[1].float())

    return Habit(lambda: nn.Sequential(nn.BatchNorm1d(6), dense(outputs=1)), images(6, classes=2), step)


def sentences(count: int = 12) -> list[Any]:
    """Rows of words, filled up by zeros to the longest of their batch, with a mask and classes."""
    numbers, batches = torch.Generator().manual_seed(1), []
    for number in range(count):
        rows = [torch.randint(1, 20, (3 + (number + row) % 4,), generator=numbers) for row in range(3)]
        words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batches.append((words, (words != 0).float(), torch.randint(2, (3,), generator=numbers)))
    return batches


class Sentiment(nn.Module):
    """Classifies sentences by a bidirectional LSTM, or by a transformer encoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.words, self.out = kind, nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)
        self.body = (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
            if kind == "transformer" else nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        )  # fmt: skip

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shown = self.words(words)
        if self.kind == "packed":
            lengths = mask.sum(1).long().cpu()
            packed = nn.utils.rnn.pack_padded_sequence(shown, lengths, batch_first=True, enforce_sorted=False)
            last = self.body(packed)[1][0]
            return self.out(torch.cat([last[0], last[1]], 1))
        seen = self.body(shown, src_key_padding_mask=words.eq(0)) if self.kind == "transformer" else self.body(shown)[0]
        return self.out((seen * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


def read(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


@habit
def text_by_an_lstm() -> Habit:
    return Habit(lambda: Sentiment("padded"), sentences(), read)


@habit
def text_by_a_transformer() -> Habit:
    return Habit(lambda: Sentiment("transformer"), sentences(), read)


@habit
def text_that_is_packed() -> Habit:
    return Habit(lambda: Sentiment("packed"), sentences(4), read, eager="torch's pack_padded_sequence")


class Graphs(nn.Module):
    """Sums what a node's neighbours say, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        def gathered(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])

        return self.last(gathered(self.first(gathered(nodes)).relu()))


def graphs(sizes: list[int]) -> list[Any]:
    numbers = torch.Generator().manual_seed(2)

    def numbered(size: int, *shape: int) -> torch.Tensor:
        return torch.randint(size, shape, generator=numbers)

    return [(torch.randn(n, 6, generator=numbers), numbered(n, 2, 3 * n), numbered(4, n), numbered(2, n) > 0) for n in sizes]


@habit
def nodes_by_a_mask() -> Habit:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0], batch[1])[batch[3]], batch[2][batch[3]])

    return Habit(Graphs, graphs([9] * 4), step, eager="x[mask]")


@habit
def nodes_by_their_numbers() -> Habit:
    one = graphs([9])[0]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0], batch[1])[batch[3]], batch[2][batch[3]])

    return Habit(Graphs, [(*one[:3], one[3].nonzero().squeeze(1))] * 6, step)


@habit
def graphs_of_all_sizes() -> Habit:
    return Habit(Graphs, graphs([*range(5, 17)]), lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]))


class Forecast(nn.Module):
    """The next value of a series, by a layer of torch's or cell by cell."""

    def __init__(self, by_cells: bool) -> None:
        super().__init__()
        self.body: nn.Module = nn.LSTMCell(1, 6) if by_cells else nn.LSTM(1, 6, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.body, nn.LSTM):
            return self.out(self.body(x)[0][:, -1])
        hidden = (torch.zeros(len(x), 6), torch.zeros(len(x), 6))
        for time in range(x.shape[1]):
            hidden = self.body(x[:, time], hidden)
        return self.out(hidden[0])


def forecast(by_cells: bool) -> Habit:
    windows = torch.sin(torch.arange(40.0)).unfold(0, 9, 1).contiguous()
    batches = [(rows[:, :8].unsqueeze(-1), rows[:, 8:]) for rows in windows.split(8)]
    return Habit(lambda: Forecast(by_cells), batches, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@habit
def series_by_an_lstm() -> Habit:
    return forecast(by_cells=False)


@habit
def series_cell_by_cell() -> Habit:
    return forecast(by_cells=True)


# -- losses that draw


class Autoencoder(nn.Module):
    """Codes of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.coder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)


@habit
def autoencoder_written_out() -> Habit:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        mean, log_variance = model.coder(batch[0]).chunk(2, 1)
        made = model.decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance))
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, batch[0], reduction="sum") / len(mean) + kl

    return Habit(Autoencoder, images(6), step)


@habit
def diffusion() -> Habit:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        time, noise = torch.randint(0, 100, (len(x),)), torch.randn_like(x)
        share = kept[time].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time.unsqueeze(1) / 100], 1)), noise)

    return Habit(lambda: dense(7, 6), images(6), step)


def mixed(model: nn.Module, batch: Any, share: Any) -> Any:
    x, y = batch
    order = torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


@habit
def mixup_by_numpy() -> Habit:
    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        numbers.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return lambda number: None

    numbers = np.random.default_rng(0)
    return Habit(dense, images(4), lambda model, batch: mixed(model, batch, numbers.beta(0.4, 0.4)),
                 eager="into which a capture cannot look", during=during)  # fmt: skip


@habit
def mixup_by_torch() -> Habit:
    shares = Beta(torch.tensor(0.4), torch.tensor(0.4))
    return Habit(dense, images(6), lambda model, batch: mixed(model, batch, shares.sample()))


@habit
def mixup_before_the_step() -> Habit:
    numbers = random.Random(0)
    batches = [(x, y, y.flip(0), numbers.random()) for x, y in images(12)]

    def step(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return batch[3] * F.cross_entropy(out, batch[1]) + (1 - batch[3]) * F.cross_entropy(out, batch[2])

    return Habit(dense, batches, step)


# -- updates


def scheduled(make: Callable[[Optimizer], lr_scheduler.LRScheduler]) -> During:
    """Steps a scheduler behind each step."""

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        schedule = make(optimizer)
        return lambda number: schedule.step() if number else None

    return during


@habit
def gradients_of_four_batches() -> Habit:
    return Habit(dense, images(8), classify, options={"accumulate": 4})


@habit
def one_cycle() -> Habit:
    return Habit(dense, images(6), classify, during=scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)))


@habit
def layers_that_thaw() -> Habit:
    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        return lambda number: model[0].requires_grad_(number > 2) and None

    return Habit(dense, images(6), classify, during=during)


@habit
def label_smoothing_that_falls() -> Habit:
    state = {"smoothing": 0.2}

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        return lambda number: state.update(smoothing=0.2 - 0.05 * (number // 2))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=state["smoothing"])

    return Habit(dense, images(6), step, during=during)


class ScheduleFree(Optimizer):
    """Takes gradients between where it is and the mean of where it was."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(at=p.clone(), mean=p.clone())
                state["at"].sub_(p.grad, alpha=group["lr"])
                state["mean"].lerp_(state["at"], 1 / group["steps"])
                p.copy_(state["at"].lerp(state["mean"], 0.9))


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str | None]] = {
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), None),
    "rmsprop": (torch.optim.RMSprop, "RMSprop is not captured"),
    "adagrad": (torch.optim.Adagrad, "Adagrad is not captured"),
    "nadam": (torch.optim.NAdam, "NAdam is not captured"),
    "foreach": (lambda p: Adam(p, foreach=True), "asks for the foreach form"),
    "schedule_free": (ScheduleFree, "ScheduleFree is not captured"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(no_captures: CaptureCache, name: str) -> None:
    make, eager = OPTIMIZERS[name]
    check(no_captures, Habit(dense, images(4), classify, make, eager))


# -- what steps do beside


@habit
def accuracy_as_a_metric() -> Habit:
    def step(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), {"accuracy": (out.argmax(1) == batch[1]).float().mean()}

    return Habit(dense, images(4), step)


@habit
def loss_looked_at_within() -> Habit:
    seen = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = classify(model, batch)
        seen.append(loss.item())
        return loss

    return Habit(dense, images(4), step, eager=LOOKS)


@habit
def log_of_some_steps() -> Habit:
    steps, log = [0], []

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        steps[0] = 0
        return lambda number: None

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = classify(model, batch)
        steps[0] += 1
        if steps[0] % 5 == 0:
            log.append(float(loss.detach()))
        return loss

    return Habit(dense, images(6), step, eager=CHANGES, during=during)


@habit
def way_that_depends_on_what_a_layer_says() -> Habit:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.more, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            return self.out(self.more(h) if h.mean() > 0.2 else h)

    return Habit(Early, images(4), classify, eager=LOOKS)


@habit
def module_that_counts() -> Habit:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = dense(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net(x) * (1.0 if self.calls < 3 else 0.5)

    return Habit(Counting, images(4), classify, eager=CHANGES)


@habit
def module_with_a_log() -> Habit:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.logged = dense(), {}

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.logged["loss"] = loss.detach()
            return loss

    return Habit(Logging, images(4), lambda model, batch: model.training_step(batch, 0), eager=CHANGES)


@habit
def method_of_a_trainer() -> Habit:
    class Trainer:
        criterion = nn.CrossEntropyLoss()

        def compute(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return self.criterion(model(batch[0]), batch[1])

    return Habit(dense, images(4), Trainer().compute)


@pytest.mark.parametrize("name", HABITS)
def test_habit(no_captures: CaptureCache, name: str) -> None:
    check(no_captures, HABITS[name]())


# -- models of transformers


def words(count: int = 4, rows: int = 3, length: int = 7) -> list[dict[str, torch.Tensor]]:
    """Tokens with masks, of which every second has padding, and classes."""
    numbers, batches = torch.Generator().manual_seed(3), []
    for number in range(count):
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, length - 2 * (number % 2) :] = 0
        ids = torch.randint(1, 50, (rows, length), generator=numbers)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (rows,), generator=numbers)})
    return batches


def of_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).train()


def of_gpt2(**checkpointing: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


def of_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def next_word(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["input_ids"]).loss


def cast_within(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return own_loss(model, batch)


LANGUAGE: dict[str, Callable[[], Habit]] = {
    "bert": lambda: Habit(of_bert, words(), own_loss),
    "bert_clipped_and_scheduled": lambda: Habit(
        of_bert, words(), own_loss, options={"clip_grad_norm": 0.1},
        during=scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda number: min(1.0, number / 3))),
    ),
    "bert_autocast": lambda: Habit(of_bert, words(), own_loss, options={"autocast": torch.bfloat16}),
    "bert_cast_within": lambda: Habit(of_bert, words(), cast_within),
    "gpt2": lambda: Habit(of_gpt2, words(), next_word),
    "gpt2_checkpointed": lambda: Habit(lambda: of_gpt2(use_reentrant=False), words(), next_word),
    "gpt2_checkpointed_by_a_second_pass": lambda: Habit(
        lambda: of_gpt2(use_reentrant=True), words(), next_word, eager="use_reentrant=True"
    ),
    "llama": lambda: Habit(of_llama, words(), next_word),
}  # fmt: skip


@pytest.mark.needs_time("transformers is imported")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_model(no_captures: CaptureCache, name: str) -> None:
    pytest.importorskip("transformers")
    check(no_captures, LANGUAGE[name]())


@pytest.mark.needs_time("transformers is imported")
def test_a_trace_of_another_job_is_no_change(no_captures: CaptureCache) -> None:
    """While one is under way, all threads see the functions that it has put in the place of transformers' own."""
    pytest.importorskip("transformers")
    model, batch = of_llama(), words(1)[0]
    step = wf.Step(model, step=next_word, optimizer=AdamW(model.parameters()))
    step(batch)
    with as_in_eager(pytest.fail):  # type: ignore[arg-type]
        step(batch)
    assert no_captures.captures == 1 and step.opaque_reason is None


# -- adapters over one frozen base


def adapted(base: nn.Module, rank: int) -> nn.Module:
    """Modules of its own, with the base's tensors in them, and an adapter."""
    from peft import LoraConfig, get_peft_model

    shared = copy.deepcopy(base, {id(one): one for one in (*base.parameters(), *base.buffers())})
    settings = LoraConfig(r=rank, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return get_peft_model(shared, settings).train()


@pytest.mark.needs_time("transformers and peft are imported")
def test_an_adapter(no_captures: CaptureCache) -> None:
    pytest.importorskip("peft")
    base = of_gpt2().requires_grad_(False)
    check(no_captures, Habit(lambda: adapted(base, 2), words(), next_word))


@pytest.mark.needs_time("transformers and peft are imported")
def test_four_adapters_over_one_base(no_captures: CaptureCache) -> None:
    pytest.importorskip("peft")
    base = of_gpt2().requires_grad_(False)
    jobs = [
        wf.Job(
            name=f"adapter-{number}", model=lambda rank=2 + 2 * (number % 2): adapted(base, rank), data=words(),
            step=next_word, optimizer=lambda parameters, lr=1e-2 / (1 + number): AdamW(parameters, lr=lr), epochs=2, seed=number,
        )
        for number in range(4)
    ]  # fmt: skip
    together = wf.train(jobs)
    # Of two ranks, each again once kernels have told their layouts; one may be captured after the other's have.
    assert (captures := no_captures.captures) in (3, 4) and not any(result.opaque_reason for result in together)
    held = {one.data_ptr() for one in base.parameters()}
    for job, result in zip(jobs, together):
        (alone,) = wf.train([job])
        assert result.losses == alone.losses
        for name, tensor in result.state_dict.items():
            assert same_bits(tensor, alone.state_dict[name])
            assert (tensor.data_ptr() in held) is ("lora_" not in name), name
    assert no_captures.captures == captures


def test_a_base_that_another_job_trains() -> None:
    """Its modules hold stand-ins while that job's step is traced."""

    def adapt() -> nn.Module:
        found = FakeTensorMode().from_tensor(torch.ones(2))
        return nn.Linear(2, int(found.sum()))

    one = wf.Job(name="adapter", model=adapt, data=images(1), loss=F.cross_entropy, optimizer=AdamW, epochs=1)
    with pytest.raises(wf.InvalidJobError, match="modules that another job trains"):
        wf.train([one])
