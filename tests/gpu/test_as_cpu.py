"""On the stand-in a job has the bits of the CPU, whose kernels do its work: alone, on lanes, in device graphs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

pytestmark = pytest.mark.skipif("STANDIN_SCHEDULE" not in os.environ, reason="a GPU's kernels round otherwise")


def layers(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.GELU(), nn.Linear(128, 10))
    if kind == "convolutions":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
        )
    return nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(256, 4, 64, 0.0, batch_first=True), nn.Flatten(), nn.Linear(768, 10)
    )


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "convolutions", "attention"])
def test_bits_of_the_cpu(kind: str, graphs: bool) -> None:
    numbers = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 3, 16, 16, generator=numbers), torch.randint(0, 10, (8,), generator=numbers)) for _ in range(10)]

    def train(device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = layers(kind).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        given = [(x.to(device), y.to(device)) for x, y in batches]
        if device == "cpu":
            losses = []
            for x, y in given:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        else:
            with wf.Engine("cuda", memory="1GiB", lanes=2, device_graphs=graphs) as engine:
                step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
                losses = [step(batch) for batch in given]
                assert step.opaque_reason is None and engine.native.placed[0] > 0
                assert (engine.stats().graphs["launched"] > 0) is graphs
                engine.native.check()
        return [float(loss) for loss in losses], {k: v.cpu() for k, v in model.state_dict().items()}

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (losses, state), (expected_losses, expected) = train("cuda"), train("cpu")
    assert losses == expected_losses
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
