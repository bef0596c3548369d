"""Largest batches that the Waterwave paper reports (Shi et al., IEEE Transactions on Computers 2023)."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Waterwave (IEEE TC 2023), tables 1 and 2 and section 5.5"


@dataclass(frozen=True)
class TwoCopies:
    """Batch alone, and of each of two copies under waterwave and waterwave-s, on one GPU (table 1)."""

    alone: int
    waterwave: int
    waterwave_s: int


V100_32GB = {
    "resnet50": TwoCopies(406, 370, 266), "resnet152": TwoCopies(186, 160, 118), "nasnet_mobile": TwoCopies(560, 544, 316),
    "inception_v3": TwoCopies(332, 310, 204), "bert": TwoCopies(138, 124, 88), "tacotron2": TwoCopies(198, 152, 96),
}  # fmt: skip
P100_16GB = {
    "resnet50": TwoCopies(190, 176, 120), "resnet152": TwoCopies(86, 78, 62), "nasnet_mobile": TwoCopies(280, 260, 192),
    "inception_v3": TwoCopies(160, 150, 106), "bert": TwoCopies(60, 48, 38), "tacotron2": TwoCopies(98, 72, 48),
}  # fmt: skip
# Pairs of different models on the V100 (table 2), and three and four ResNet-50 there (section 5.5).
V100_MIXED = {
    ("resnet50", "bert"): (358, 116), ("resnet50", "tacotron2"): (370, 150), ("bert", "tacotron2"): (120, 150),
}  # fmt: skip
V100_MORE_RESNET50 = {3: 336, 4: 310}
# Split size of its largest batch, in GB (section 5.4); ResNet-152 has the same at 2, 4, 6 and 8, and Tacotron2 is cut by number.
V100_BEST_SPLIT = {"resnet50": 6, "resnet152": 2, "nasnet_mobile": 12, "inception_v3": 6, "bert": 6}
