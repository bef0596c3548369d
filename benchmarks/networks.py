"""Networks that no library brings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear_relu(sizes: Sequence[int], dropout: float = 0.0) -> list[nn.Module]:
    """Linear layers between these widths, each with a ReLU, and dropout where there is a rate."""
    tail: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    return [module for i, o in pairwise(sizes) for module in (nn.Linear(i, o), nn.ReLU(), *tail)]


class Around(nn.Module):
    """A layer with a way around it (He et al. 2016)."""

    def __init__(self, *layer: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layer)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def deep_mlp(depth: int, width: int, dropout: float = 0.0) -> nn.Module:
    """So many layers of one width, each with a way around it: without, gradients of the first ones are too small to learn from."""
    return nn.Sequential(*(Around(*linear_relu((width, width), dropout)) for _ in range(depth)))


def mlp(sizes: Sequence[int], dropout: float) -> nn.Module:
    """A perceptron with these widths, for inputs of any shape."""
    return nn.Sequential(nn.Flatten(), *linear_relu(sizes[:-1], dropout), nn.Linear(*sizes[-2:])).train()


def conv_bn_relu(*channels: int) -> list[nn.Module]:
    """3 x 3 convolutions between these numbers of channels, each with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for i, o in pairwise(channels):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return layers


def cnn(stages: Sequence[tuple[int, int]], num_classes: int, dropout: float) -> nn.Module:
    """VGG-like network; each stage is (number of convolutions, channels) and ends in pooling and dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for count, width in stages:
        layers += [*conv_bn_relu(channels, *[width] * count), nn.MaxPool2d(2), nn.Dropout(dropout)]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers).train()


class UNet(nn.Module):
    """U-Net with padded Conv-BN-ReLU pairs and transposed convolutions on the way up."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), num_classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(*conv_bn_relu(i, o, o)) for i, o in pairwise((3, *widths)))
        rising = list(pairwise(reversed(widths)))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in rising)
        self.up = nn.ModuleList(nn.Sequential(*conv_bn_relu(2 * o, o, o)) for _, o in rising)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores of every pixel's classes."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([skip, widen(x)], dim=1))
        return self.head(x)


class LSTMLanguageModel(nn.Module):
    """Word-level LSTM language model with dropout; ``cells`` selects a Python loop over ``nn.LSTMCell``."""

    def __init__(self, cells: bool, vocab: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.dropout = nn.Dropout(dropout)
        if cells:
            self.rnn: nn.Module = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))
        else:
            self.rnn = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, vocab)

    def _loop(self, x: Tensor, cells: nn.ModuleList) -> Tensor:
        states: list[Any] = [None] * len(cells)
        outputs = []
        for value in x.unbind(1):
            for i, cell in enumerate(cells):
                states[i] = cell(self.dropout(value) if i else value, states[i])
                value = states[i][0]
            outputs.append(value)
        return torch.stack(outputs, dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Words to scores of the next ones."""
        x = self.dropout(self.embedding(tokens))
        x = self._loop(x, self.rnn) if isinstance(self.rnn, nn.ModuleList) else self.rnn(x)[0]
        return self.head(self.dropout(x))


class DLRM(nn.Module):
    """Recommendation model: embedding bags, a bottom MLP, pairwise dot products, a top MLP."""

    def __init__(self, tables: int, rows: int, dense: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        dim = bottom[-1]
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -(rows**-0.5), rows**-0.5)
        self.bottom = nn.Sequential(*linear_relu((dense, *bottom)))
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = nn.Sequential(*linear_relu((dim + pairs.size(1), *top)), nn.Linear(top[-1], 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Numbers, and indices into each table, to one score a row."""
        x = self.bottom(dense)
        rows = [bag(indices) for bag, indices in zip(self.bags, sparse.unbind(1), strict=True)]
        features = torch.stack([x, *rows], dim=1)
        dots = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots], dim=1)).squeeze(1)
