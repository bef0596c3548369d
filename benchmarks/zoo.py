"""The models that benchmarks measure (``FULL``: the product's and networks that no library brings), and small ones for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import DLRM, LSTMLanguageModel, UNet, cnn, mlp
from waterflow import zoo

ZooModel = zoo.ZooModel
BatchFn = Callable[[int, Generator | None], Any]


@functools.cache  # two models of one class have one capture
def _small_aux(aux: type[nn.Module]) -> type[nn.Module]:
    class SmallAux(aux):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv1(self.conv0(F.adaptive_avg_pool2d(x, 5)))
            return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))

    return SmallAux


def _small_inception() -> nn.Module:
    """Its auxiliary head, which needs 299 px otherwise, takes less."""
    made: Any = zoo.inception_v3(10)
    made.AuxLogits.__class__ = _small_aux(type(made.AuxLogits))
    return made


def _images(size: int, classes: int, channels: int = 3, dense: bool = False) -> BatchFn:
    """Square images with a class each, or with a class for every pixel."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        images = zoo.randn(n, channels, size, size, generator=generator)
        return images, zoo.randint(classes, n, *((size, size) if dense else ()), generator=generator)

    return batch


def _clicks(tables: int, rows: int, dense: int, hots: int) -> BatchFn:
    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        sparse = zoo.randint(rows, n, tables, hots, generator=generator)
        clicks = zoo.randint(2, n, generator=generator).float()
        return zoo.randn(n, dense, generator=generator), sparse, clicks

    return batch


def _next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _click_through(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    dense, sparse, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, sparse), clicks)


_slow_sgd = partial(zoo.sgd, lr=0.001)

# fmt: off
_small_nasnet = partial(zoo.nasnet, num_classes=10, stem_size=8, num_features=192)
_small_vit = partial(zoo.vit, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10)
_small_bert = partial(zoo.bert, vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=64)
_small_gpt2 = partial(zoo.gpt2, vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)
_small_mamba = partial(zoo.mamba, vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2)
_small_tacotron2 = partial(
    zoo.tacotron2, n_mels=16, n_symbol=32, symbol_embedding_dim=32, encoder_embedding_dim=32, decoder_rnn_dim=64,
    attention_rnn_dim=64, attention_hidden_dim=16, prenet_dim=32, postnet_embedding_dim=32)
_small_resnet = partial(zoo.resnet, (2, 1, 1, 1), 10)
_small_cnn = partial(cnn, ((1, 16), (2, 32)), 10, 0.25)
_small_lstm = partial(LSTMLanguageModel, vocab=64, hidden=32, layers=2, dropout=0.2)
_full_mlp = partial(mlp, (784, 1200, 1200, 10), 0.5)
_full_cnn = partial(cnn, ((2, 64), (2, 128), (3, 256), (3, 512)), 10, 0.3)
_full_lstm = partial(LSTMLanguageModel, vocab=10_000, hidden=1500, layers=2, dropout=0.65)
_full_dlrm = partial(DLRM, tables=26, rows=40_000, dense=13, bottom=(512, 256, 64), top=(512, 256))


def _table(*rows: tuple[Any, ...]) -> dict[str, ZooModel]:
    return {row[0]: ZooModel(*row) for row in rows}


SMALL: dict[str, ZooModel] = _table(
    ("mlp_dropout", partial(mlp, (64, 32, 32, 10), 0.5), _images(8, 10, 1), zoo.classify, zoo.adam, "1 x 8 x 8"),
    ("cnn_bn", _small_cnn, _images(16, 10), zoo.classify, _slow_sgd, "3 x 16 x 16"),
    ("resnet50", _small_resnet, zoo.images(64, 10), zoo.classify, _slow_sgd, "3 x 64 x 64, 5 blocks"),
    ("inception_v3", _small_inception, zoo.images(107, 10), zoo.classify, _slow_sgd, "3 x 107 x 107"),
    ("nasnet", _small_nasnet, zoo.images(64, 10), zoo.classify, _slow_sgd, "3 x 64 x 64, 1/21 of the width"),
    ("vit", _small_vit, zoo.images(32, 10), zoo.classify, zoo.adamw, "3 x 32 x 32, patches of 8 x 8"),
    ("bert", _small_bert, zoo.masked_tokens(128, 16, 3), zoo.masked_lm, zoo.adamw, "16 tokens, masked LM"),
    ("gpt2", _small_gpt2, zoo.tokens(128, 16), zoo.causal_lm, zoo.adamw, "16 tokens, causal LM"),
    ("lstm", partial(_small_lstm, False), zoo.tokens(64, 8), _next_word, zoo.adam, "8 tokens, causal LM"),
    ("lstm_cell", partial(_small_lstm, True), zoo.tokens(64, 8), _next_word, zoo.adam, "8 tokens, causal LM"),
    ("mamba", _small_mamba, zoo.tokens(128, 8), zoo.causal_lm, zoo.adamw, "8 tokens"),
    ("tacotron2", _small_tacotron2, zoo.speech(32, 12, 10, 16), zoo.teacher_forcing, zoo.adam, "12 tokens, 10 frames"),
)

FULL: dict[str, ZooModel] = zoo.FULL | _table(
    ("mlp_dropout", _full_mlp, _images(28, 10, 1), zoo.classify, zoo.adam, "1 x 28 x 28"),
    ("cnn_bn", _full_cnn, _images(32, 10), zoo.classify, zoo.sgd, "3 x 32 x 32"),
    ("unet", UNet, _images(256, 2, dense=True), zoo.classify, zoo.sgd, "3 x 256 x 256, a class per pixel"),
    ("lstm", partial(_full_lstm, False), zoo.tokens(10_000, 35), _next_word, zoo.adam, "35 tokens, causal LM"),
    ("lstm_cell", partial(_full_lstm, True), zoo.tokens(10_000, 35), _next_word, zoo.adam, "35 tokens, causal LM"),
    ("dlrm", _full_dlrm, _clicks(26, 40_000, 13, hots=4), _click_through, zoo.adam, "26 x 4 indices, 13 values"),
)
# fmt: on
