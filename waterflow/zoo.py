"""Models of well-known libraries, by the names that ``waterflow plan --model`` takes (``FULL``), and their parts.

Every entry is a :class:`ZooModel` with random weights. Third-party libraries are imported only inside the builders. No step has
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

BatchFn = Callable[[int, Generator | None], Any]
StepFn = Callable[[nn.Module, Any], Tensor]
_LEFT_OUT = (4, 5, 10, 11, 16, 17)  # the last two normal cells of each stack of six; the mobile model has four


@dataclass(frozen=True)
class ZooModel:
    """A model with everything that a training step needs.

    ``batch(n, generator)`` draws n samples on the generator's device; with None, on the default device. ``step(model, batch)``
    returns a scalar loss. ``input`` describes one sample.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: BatchFn
    step: StepFn
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    input: str


def _allow_torchvision_import() -> None:
    # torchvision's C extension does not load under a CPU build of torch, but its import registers fake kernels for
    # operators of that extension: declaring those operators suffices. The extension is tried first, because loading it
    # after the declaration would define them twice.
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
    # An installed torchaudio that does not import makes transformers fail: let it count as absent.
    transformers_utils = require("transformers.utils.import_utils")
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        sys.modules["torchaudio"] = None  # type: ignore[assignment]
        transformers_utils.is_torchaudio_available.cache_clear()
        transformers_utils.is_torchaudio_available()
        del sys.modules["torchaudio"]


def _find(library: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(library)
    if spec is None:
        raise ImportError(f"this model needs {library}, which is not installed: pip install {library}", name=library)
    return spec


def require(module: str) -> Any:
    """Return a module of an optional library. Raises ImportError, with the remedy, if the library is missing."""
    _find(module.partition(".")[0])
    _allow_torchvision_import()
    return importlib.import_module(module)


def resnet(blocks: Sequence[int], num_classes: int = 1000) -> nn.Module:
    """Return a ResNet of bottleneck blocks; ``blocks`` is their number in each stage."""
    module = require("torchvision.models.resnet")
    return module.ResNet(module.Bottleneck, list(blocks), num_classes=num_classes).train()


def inception_v3(num_classes: int = 1000) -> nn.Module:
    """Return Inception v3 with auxiliary logits."""
    inception: Any = require("torchvision.models.inception")
    blocks = [inception.BasicConv2d, *(getattr(inception, f"Inception{x}") for x in "ABCDE"), inception.InceptionAux]
    return inception.Inception3(num_classes, inception_blocks=blocks, init_weights=True).train()


def nasnet(**kwargs: Any) -> nn.Module:
    """Return a NASNet-A, by default the large variant."""
    return require("timm.models.nasnet").NASNetALarge(drop_rate=0.5, **kwargs).train()


class _Passed(nn.Module):
    """Stands in for a cell. Two in a row pass on the outputs of the cells before them, in order."""

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return before


def _nasnet_mobile() -> nn.Module:
    """Return NASNet-A (4 @ 1056), the mobile variant (Zoph et al. 2018: 5.3 million parameters).

    It is timm's NASNet-A large with the mobile variant's widths and four normal cells per stack instead of six.
    """
    made = nasnet(stem_size=32, num_features=1056)
    for number in _LEFT_OUT:
        setattr(made, f"cell_{number}", _Passed())
    return made


def vit(**kwargs: Any) -> nn.Module:
    """Return a ViT, by default ViT-B/16 at 224 px, with dropout after the embedding and after projections."""
    transformer = require("timm.models.vision_transformer").VisionTransformer
    return transformer(pos_drop_rate=0.1, proj_drop_rate=0.1, **kwargs).train()


def _hugging_face(model: str, config: str, **kwargs: Any) -> nn.Module:
    _hide_broken_torchaudio()
    # No cache of keys and values: training does not read it, and it holds memory.
    transformers = require("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(use_cache=False, **kwargs)).train()


bert = partial(_hugging_face, "BertForMaskedLM", "BertConfig")
gpt2 = partial(_hugging_face, "GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0)
mamba = partial(_hugging_face, "MambaForCausalLM", "MambaConfig")


@functools.cache
def _of_full_length() -> type[nn.Module]:
    # torchaudio may not import, so its source file is executed on its own. Packing and the attention mask depend on the
    # values of text lengths; this copy has neither: all texts are at full length, and the step passes a padding mask in
    # place of the lengths.
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


def tacotron2(**kwargs: Any) -> nn.Module:
    """Return Tacotron2 for texts of full length."""
    return _of_full_length()(**kwargs).train()


def randn(*shape: int, generator: Generator | None) -> Tensor:
    """Return normal numbers of this shape, on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator and generator.device)


def randint(high: int, *shape: int, generator: Generator | None) -> Tensor:
    """Return whole numbers below ``high`` of this shape, on the generator's device."""
    return torch.randint(high, shape, generator=generator, device=generator and generator.device)


def images(size: int, classes: int) -> BatchFn:
    """Return a function that draws square images of ``size`` pixels, with a class each."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        return randn(n, 3, size, size, generator=generator), randint(classes, n, generator=generator)

    return batch


def tokens(vocab: int, length: int) -> BatchFn:
    """Return a function that draws rows of ``length`` tokens."""
    return lambda n, generator: randint(vocab, n, length, generator=generator)


def masked_tokens(vocab: int, length: int, mask: int) -> BatchFn:
    """Return a function that draws tokens with 15 % of each row masked, and labels that are -100 elsewhere."""

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        tokens = randint(vocab, n, length, generator=generator)
        masked = randn(n, length, generator=generator).argsort(dim=1) < round(0.15 * length)
        return tokens.masked_fill(masked, mask), tokens.masked_fill(~masked, -100)

    return batch


def speech(symbols: int, tokens: int, frames: int, mels: int) -> BatchFn:
    """Return a function that draws full-length texts, an empty padding mask, target mel frames, and stop targets.

    The stop target is 1 at the last frame.
    """

    def batch(n: int, generator: Generator | None) -> tuple[Tensor, ...]:
        text = randint(symbols, n, tokens, generator=generator)
        mel = randn(n, mels, frames, generator=generator)
        gate = F.pad(mel.new_zeros(n, frames - 1), (0, 1), value=1.0)
        return text, torch.zeros_like(text, dtype=torch.bool), mel, gate

    return batch


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy, plus 0.4 of that of the auxiliary logits if the model has them."""
    inputs, classes = batch
    output = model(inputs)
    if isinstance(output, Tensor):
        return F.cross_entropy(output, classes)
    return F.cross_entropy(output.logits, classes) + 0.4 * F.cross_entropy(output.aux_logits, classes)


def causal_lm(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of each next token."""
    return F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def masked_lm(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the model's own loss for the masked tokens."""
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


def teacher_forcing(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the squared error of the frames before and after the postnet, plus the stop tokens' cross-entropy."""
    text, padding_mask, mel, gate = batch
    before, after, stop, _ = model(text, padding_mask, mel, None)
    return F.mse_loss(before, mel) + F.mse_loss(after, mel) + F.binary_cross_entropy_with_logits(stop, gate)


sgd = partial(SGD, lr=0.01, momentum=0.9)
adam = partial(Adam, lr=1e-3)
adamw = partial(AdamW, lr=1e-4, weight_decay=0.01)

# fmt: off
FULL: dict[str, ZooModel] = {row[0]: ZooModel(*row) for row in (
    ("resnet50", partial(resnet, (3, 4, 6, 3)), images(224, 1000), classify, sgd, "3 x 224 x 224"),
    ("resnet152", partial(resnet, (3, 8, 36, 3)), images(224, 1000), classify, sgd, "3 x 224 x 224"),
    ("inception_v3", inception_v3, images(299, 1000), classify, sgd, "3 x 299 x 299"),
    ("nasnet", nasnet, images(331, 1000), classify, sgd, "3 x 331 x 331"),
    ("nasnet_mobile", _nasnet_mobile, images(224, 1000), classify, sgd, "3 x 224 x 224"),
    ("vit", vit, images(224, 1000), classify, adamw, "3 x 224 x 224, patches of 16 x 16"),
    ("bert", bert, masked_tokens(30522, 128, 103), masked_lm, adamw, "128 tokens, masked LM"),
    ("gpt2", gpt2, tokens(50257, 512), causal_lm, adamw, "512 tokens, causal LM"),
    ("mamba", partial(mamba, num_hidden_layers=24), tokens(50280, 64), causal_lm, adamw, "64 tokens"),
    ("tacotron2", tacotron2, speech(148, 100, 200, 80), teacher_forcing, adam, "100 tokens, 200 frames"),
)}
# fmt: on
