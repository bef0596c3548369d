"""The models that ``waterflow plan --model`` knows by name (``FULL``), and the same small enough for tests (``SMALL``).

Every entry is a :class:`ZooModel` with random weights: how to build the model, draw a batch, compute the loss
and make its customary optimizer. Third-party libraries are imported inside the builders only. No step has
data-dependent control flow, so each can be traced with ``make_fx`` under ``FakeTensorMode``.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from waterflow.zoo_networks import DLRM, LSTMLanguageModel, UNet, cnn, mlp, nasnet_mobile

BatchFn = Callable[[int, Generator | None], Any]
StepFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class ZooModel:
    """A model together with all that a training step of it needs.

    ``batch`` draws from ``generator`` and puts the batch on its device (without a generator, on the default
    device). ``step`` maps a model and a batch to a scalar loss.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: BatchFn
    step: StepFn
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    input: str


def _allow_torchvision_import() -> None:
    """Make ``import torchvision`` work when its C extension does not load (as under a CPU torch).

    The import registers fake kernels for operators of that extension, so it suffices to declare them.
    The extension is tried first, because loading it after the declaration would define them twice.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or hasattr(torch.ops.torchvision, "nms"):
        return
    extension = importlib.machinery.PathFinder.find_spec("_C", spec.submodule_search_locations)
    if extension is not None and extension.origin is not None:
        with suppress(ImportError, OSError):
            torch.ops.load_library(extension.origin)
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def _hide_broken_torchaudio() -> None:
    """Let transformers take torchaudio as absent when it is installed but does not import."""
    transformers_utils = _require("transformers.utils.import_utils")
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        sys.modules["torchaudio"] = None  # type: ignore[assignment]
        transformers_utils.is_torchaudio_available.cache_clear()
        transformers_utils.is_torchaudio_available()
        del sys.modules["torchaudio"]


def _find(library: str) -> importlib.machinery.ModuleSpec:
    """Find an optional library, or say that it is missing."""
    spec = importlib.util.find_spec(library)
    if spec is None:
        raise ImportError(f"this model needs {library}, which is not installed: pip install {library}", name=library)
    return spec


def _require(module: str) -> Any:
    """Import a module of an optional library."""
    _find(module.partition(".")[0])
    _allow_torchvision_import()
    return importlib.import_module(module)


def _resnet(blocks: Sequence[int], num_classes: int = 1000) -> nn.Module:
    resnet = _require("torchvision.models.resnet")
    return resnet.ResNet(resnet.Bottleneck, list(blocks), num_classes=num_classes).train()


@functools.cache  # two models of one class have one capture
def _small_aux(inception: Any) -> type[nn.Module]:
    class SmallAux(inception.InceptionAux):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv1(self.conv0(F.adaptive_avg_pool2d(x, 5)))
            return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))

    return SmallAux


def _inception_v3(num_classes: int = 1000, small_aux: bool = False) -> nn.Module:
    """Inception v3 with auxiliary logits; ``small_aux`` adapts that head, which else needs 299 px."""
    inception: Any = _require("torchvision.models.inception")
    blocks = [inception.BasicConv2d, *(getattr(inception, f"Inception{x}") for x in "ABCDE")]
    blocks.append(_small_aux(inception) if small_aux else inception.InceptionAux)
    return inception.Inception3(num_classes, inception_blocks=blocks, init_weights=True).train()


def _nasnet(**kwargs: Any) -> nn.Module:
    return _require("timm.models.nasnet").NASNetALarge(drop_rate=0.5, **kwargs).train()


def _nasnet_mobile() -> nn.Module:
    return nasnet_mobile(_require("timm.models.nasnet").NASNetALarge, drop_rate=0.5).train()


def _vit(**kwargs: Any) -> nn.Module:
    """ViT, by default ViT-B/16 at 224 px, with dropout after the embedding and after projections."""
    transformer = _require("timm.models.vision_transformer").VisionTransformer
    return transformer(pos_drop_rate=0.1, proj_drop_rate=0.1, **kwargs).train()


def _hugging_face(model: str, config: str, **kwargs: Any) -> nn.Module:
    _hide_broken_torchaudio()
    transformers = _require("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(use_cache=False, **kwargs)).train()


_bert = partial(_hugging_face, "BertForMaskedLM", "BertConfig")
_gpt2 = partial(_hugging_face, "GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0)
_mamba = partial(_hugging_face, "MambaForCausalLM", "MambaConfig")


@functools.cache
def _of_full_length() -> type[nn.Module]:
    """Tacotron2 from torchaudio's source file, executed on its own because torchaudio may not import.

    The encoder's packing and the attention mask depend on the values of the text lengths, so this copy has
    neither: it takes all texts at full length, and a padding mask in the place of the lengths.
    """
    path = Path(str(_find("torchaudio").origin)).parent / "models" / "tacotron2.py"
    module: Any = ModuleType("waterflow._tacotron2")
    importlib.machinery.SourceFileLoader(module.__name__, str(path)).exec_module(module)

    class FullLengthEncoder(module._Encoder):
        def forward(self, x: Tensor, input_lengths: Tensor) -> Tensor:
            for conv in self.convolutions:
                x = F.dropout(F.relu(conv(x)), 0.5, self.training)
            return self.lstm(x.transpose(1, 2))[0]

    module._Encoder = FullLengthEncoder
    module._get_mask_from_lengths = lambda padding_mask: padding_mask
    return module.Tacotron2


def _tacotron2(**kwargs: Any) -> nn.Module:
    return _of_full_length()(**kwargs).train()


def _randn(*shape: int, generator: Generator | None) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator and generator.device)


def _randint(high: int, *shape: int, generator: Generator | None) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator and generator.device)


def _images(size: int, classes: int, channels: int = 3, dense: bool = False) -> BatchFn:
    """Square images with a class each, or with a class for every pixel."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        images = _randn(n, channels, size, size, generator=generator)
        return images, _randint(classes, n, *((size, size) if dense else ()), generator=generator)

    return batch


def _tokens(vocab: int, length: int) -> BatchFn:
    return lambda n, generator: _randint(vocab, n, length, generator=generator)


def _masked_tokens(vocab: int, length: int, mask: int) -> BatchFn:
    """Tokens with 15 % of each row masked, and labels that are -100 elsewhere."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        tokens = _randint(vocab, n, length, generator=generator)
        masked = _randn(n, length, generator=generator).argsort(dim=1) < round(0.15 * length)
        return tokens.masked_fill(masked, mask), tokens.masked_fill(~masked, -100)

    return batch


def _speech(symbols: int, tokens: int, frames: int, mels: int) -> BatchFn:
    """Full-length texts with an empty padding mask, target mel frames, and stop targets (the last frame)."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, ...]:
        text = _randint(symbols, n, tokens, generator=generator)
        mel = _randn(n, mels, frames, generator=generator)
        gate = F.pad(mel.new_zeros(n, frames - 1), (0, 1), value=1.0)
        return text, torch.zeros_like(text, dtype=torch.bool), mel, gate

    return batch


def _clicks(tables: int, rows: int, dense: int, hots: int) -> BatchFn:
    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        sparse = _randint(rows, n, tables, hots, generator=generator)
        clicks = _randint(2, n, generator=generator).float()
        return _randn(n, dense, generator=generator), sparse, clicks

    return batch


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, plus 0.4 of that of the auxiliary logits where the model has them."""
    inputs, classes = batch
    output = model(inputs)
    if isinstance(output, Tensor):
        return F.cross_entropy(output, classes)
    return F.cross_entropy(output.logits, classes) + 0.4 * F.cross_entropy(output.aux_logits, classes)


def _causal_lm(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _masked_lm(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


def _teacher_forcing(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    text, padding_mask, mel, gate = batch
    before, after, stop, _ = model(text, padding_mask, mel, None)
    return F.mse_loss(before, mel) + F.mse_loss(after, mel) + F.binary_cross_entropy_with_logits(stop, gate)


def _click_through(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    dense, sparse, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, sparse), clicks)


_sgd = partial(SGD, lr=0.01, momentum=0.9)
_slow_sgd = partial(_sgd, lr=0.001)
_adam = partial(Adam, lr=1e-3)
_adamw = partial(AdamW, lr=1e-4, weight_decay=0.01)

# fmt: off
_small_nasnet = partial(_nasnet, num_classes=10, stem_size=8, num_features=192)
_small_vit = partial(_vit, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10)
_small_bert = partial(_bert, vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=64)
_small_gpt2 = partial(_gpt2, vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)
_small_mamba = partial(_mamba, vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2)
_small_tacotron2 = partial(
    _tacotron2, n_mels=16, n_symbol=32, symbol_embedding_dim=32, encoder_embedding_dim=32, decoder_rnn_dim=64,
    attention_rnn_dim=64, attention_hidden_dim=16, prenet_dim=32, postnet_embedding_dim=32)
_small_inception = partial(_inception_v3, 10, small_aux=True)
_small_resnet = partial(_resnet, (2, 1, 1, 1), 10)
_small_cnn = partial(cnn, ((1, 16), (2, 32)), 10, 0.25)
_small_lstm = partial(LSTMLanguageModel, vocab=64, hidden=32, layers=2, dropout=0.2)
_full_mlp = partial(mlp, (784, 1200, 1200, 10), 0.5)
_full_cnn = partial(cnn, ((2, 64), (2, 128), (3, 256), (3, 512)), 10, 0.3)
_full_lstm = partial(LSTMLanguageModel, vocab=10_000, hidden=1500, layers=2, dropout=0.65)
_full_dlrm = partial(DLRM, tables=26, rows=40_000, dense=13, bottom=(512, 256, 64), top=(512, 256))


def _zoo(*rows: tuple[str, Callable[[], nn.Module], BatchFn, StepFn, Any, str]) -> dict[str, ZooModel]:
    return {row[0]: ZooModel(*row) for row in rows}


SMALL: dict[str, ZooModel] = _zoo(
    ("mlp_dropout", partial(mlp, (64, 32, 32, 10), 0.5), _images(8, 10, 1), _classify, _adam, "1 x 8 x 8"),
    ("cnn_bn", _small_cnn, _images(16, 10), _classify, _slow_sgd, "3 x 16 x 16"),
    ("resnet50", _small_resnet, _images(64, 10), _classify, _slow_sgd, "3 x 64 x 64, 5 blocks"),
    ("inception_v3", _small_inception, _images(107, 10), _classify, _slow_sgd, "3 x 107 x 107"),
    ("nasnet", _small_nasnet, _images(64, 10), _classify, _slow_sgd, "3 x 64 x 64, 1/21 of the width"),
    ("vit", _small_vit, _images(32, 10), _classify, _adamw, "3 x 32 x 32, patches of 8 x 8"),
    ("bert", _small_bert, _masked_tokens(128, 16, 3), _masked_lm, _adamw, "16 tokens, masked LM"),
    ("gpt2", _small_gpt2, _tokens(128, 16), _causal_lm, _adamw, "16 tokens, causal LM"),
    ("lstm", partial(_small_lstm, False), _tokens(64, 8), _causal_lm, _adam, "8 tokens, causal LM"),
    ("lstm_cell", partial(_small_lstm, True), _tokens(64, 8), _causal_lm, _adam, "8 tokens, causal LM"),
    ("mamba", _small_mamba, _tokens(128, 8), _causal_lm, _adamw, "8 tokens"),
    ("tacotron2", _small_tacotron2, _speech(32, 12, 10, 16), _teacher_forcing, _adam, "12 tokens, 10 frames"),
)

FULL: dict[str, ZooModel] = _zoo(
    ("mlp_dropout", _full_mlp, _images(28, 10, 1), _classify, _adam, "1 x 28 x 28"),
    ("cnn_bn", _full_cnn, _images(32, 10), _classify, _sgd, "3 x 32 x 32"),
    ("resnet50", partial(_resnet, (3, 4, 6, 3)), _images(224, 1000), _classify, _sgd, "3 x 224 x 224"),
    ("resnet152", partial(_resnet, (3, 8, 36, 3)), _images(224, 1000), _classify, _sgd, "3 x 224 x 224"),
    ("inception_v3", _inception_v3, _images(299, 1000), _classify, _sgd, "3 x 299 x 299"),
    ("nasnet", _nasnet, _images(331, 1000), _classify, _sgd, "3 x 331 x 331"),
    ("nasnet_mobile", _nasnet_mobile, _images(224, 1000), _classify, _sgd, "3 x 224 x 224"),
    ("unet", UNet, _images(256, 2, dense=True), _classify, _sgd, "3 x 256 x 256, a class per pixel"),
    ("vit", _vit, _images(224, 1000), _classify, _adamw, "3 x 224 x 224, patches of 16 x 16"),
    ("bert", _bert, _masked_tokens(30522, 128, 103), _masked_lm, _adamw, "128 tokens, masked LM"),
    ("gpt2", _gpt2, _tokens(50257, 512), _causal_lm, _adamw, "512 tokens, causal LM"),
    ("lstm", partial(_full_lstm, False), _tokens(10_000, 35), _causal_lm, _adam, "35 tokens, causal LM"),
    ("lstm_cell", partial(_full_lstm, True), _tokens(10_000, 35), _causal_lm, _adam, "35 tokens, causal LM"),
    ("mamba", partial(_mamba, num_hidden_layers=24), _tokens(50280, 64), _causal_lm, _adamw, "64 tokens"),
    ("tacotron2", _tacotron2, _speech(148, 100, 200, 80), _teacher_forcing, _adam, "100 tokens, 200 frames"),
    ("dlrm", _full_dlrm, _clicks(26, 40_000, 13, hots=4), _click_through, _adam, "26 x 4 indices, 13 values"),
)
# fmt: on
