"""Profiles of the models that simulated jobs train: utilization and memory of a device, with the source of each figure.

Workloads seldom name models. A job without one draws one from a mix by a seeded rule (``draw_models``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from waterflow.cluster.submission import Submission

GIB = 1 << 30


@dataclass(frozen=True)
class ModelProfile:
    """One model alone on a device.

    ``utilization`` is the share of time in which the device works for it. ``demand`` is the share of a device that it takes
    when packed: n copies run at min(1, 1 / (n x demand)); None means ``utilization / packing_efficiency``. ``memory`` is in
    bytes. ``paging`` is s in the speed 1 / (1 + s x share of its memory that lies in host memory).
    """

    name: str
    utilization: float
    memory: int
    source: str
    demand: float | None = None
    paging: float = 1.0


def _profiles(*profiles: ModelProfile) -> dict[str, ModelProfile]:
    return {profile.name: profile for profile in profiles}


# AntMan, table 3. Memory and utilization from the paper where it has them; the rest are assumptions, marked so.
ANTMAN_MODELS = _profiles(
    ModelProfile("ResNet-50", 0.94, 30 * GIB, "Gandiva table 1; AntMan table 1, figure 10", 1 / 0.87, 15.0),
    ModelProfile("VGG16", 0.90, 17 * GIB, "assumed as other image models; AntMan figures 10, 11b", paging=0.22),
    ModelProfile("SuperResolution", 0.141, 8 * GIB, "Gandiva table 1; AntMan figure 10; memory assumed", 1 / 3.6, 0.37),
    ModelProfile("Bert", 0.90, 16 * GIB, "assumed as other large dense models"),
    ModelProfile("ESPnet", 0.30, 3_865_470_566, "AntMan figures 4 and 12"),
    ModelProfile("GraphSAGE", 0.25, 3_758_096_384, "assumed: sampling on the CPU (AntMan section 1)"),
    ModelProfile("GCN", 0.20, 3_758_096_384, "AntMan table 1; utilization assumed"),
    ModelProfile("DIN", 0.25, 4 * GIB, "assumed: features on the CPU (AntMan section 1)"),
    ModelProfile("Wide & Deep", 0.25, 4 * GIB, "assumed: features on the CPU (AntMan section 1)"),
)
# AntMan, table 3: categories of 20 % each; models of a category evenly, which the paper leaves open.
ANTMAN_MIX: dict[str, float] = {
    "ResNet-50": 0.2 / 3,
    "VGG16": 0.2 / 3,
    "SuperResolution": 0.2 / 3,
    "Bert": 0.2,
    "ESPnet": 0.2,
    "GraphSAGE": 0.1,
    "GCN": 0.1,
    "DIN": 0.1,
    "Wide & Deep": 0.1,
}

# The Muri traces: utilization is compute_ms / iter_ms of the traces, on one device and on 8; memory is assumed.
_MURI = "public Muri traces, compute_ms / iter_ms"
MURI_MODELS = _profiles(
    ModelProfile("a2c", 0.025, 2 * GIB, _MURI),
    ModelProfile("dqn", 0.016, 2 * GIB, _MURI),
    ModelProfile("bert", 0.87, 12 * GIB, _MURI),
    ModelProfile("gpt2", 0.959, 16 * GIB, _MURI),
    ModelProfile("resnet18", 0.116, 4 * GIB, _MURI),
    ModelProfile("shufflenet_v2_x1_0", 0.06, 4 * GIB, _MURI),
    ModelProfile("vgg16", 0.35, 8 * GIB, _MURI),
    ModelProfile("vgg19", 0.389, 8 * GIB, _MURI),
)

# A model of which nothing is known: half busy, the average that Gandiva (section 6.3) takes from a large cluster.
UNKNOWN = ModelProfile("unknown", 0.5, 4 * GIB, "Gandiva 6.3: average utilization of about 50 %")

KNOWN_MODELS = ANTMAN_MODELS | MURI_MODELS


def draw_model(mix: Mapping[str, float], job: str, seed: int) -> str:
    """Draw one model of ``mix`` (name: weight). Equal job and seed draw the same model, whatever other jobs there are."""
    if not mix or any(weight < 0 for weight in mix.values()) or sum(mix.values()) <= 0:
        raise ValueError(f"a mix of models needs weights of at least 0 with a positive sum, not {dict(mix)}")
    return random.Random(f"{seed}:{job}").choices(list(mix), list(mix.values()))[0]


def draw_models(submissions: Iterable[Submission], mix: Mapping[str, float], seed: int) -> list[Submission]:
    """Return the submissions with a model from ``mix`` for each that has none."""
    return [job if job.model is not None else replace(job, model=draw_model(mix, job.id, seed)) for job in submissions]
