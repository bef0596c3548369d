"""What ``make`` installs works together: libraries that find each other import each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

BERT = """
import torch, waterflow as wf
from transformers import BertConfig, BertForMaskedLM, BertModel

config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
assert BertModel(config)(torch.zeros(1, 4, dtype=torch.int64)).last_hidden_state.shape == (1, 4, 16)
model = BertForMaskedLM(config).train()
step = wf.Step(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
text = torch.arange(32).reshape(4, 8)
losses = [float(step({"input_ids": text, "labels": text})) for _ in range(6)]
assert step.opaque_reason is None and losses[-1] < losses[0], (losses, step.opaque_reason)
"""

IMPORTS = {
    "bert": BERT,
    "torchvision": "from torchvision.models import resnet18; resnet18()",
    "timm": "import timm; timm.create_model('vit_tiny_patch16_224')",
    "torchaudio": "from torchaudio.models import Tacotron2; Tacotron2()",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_new_process_imports_and_trains(name: str) -> None:
    """In this process the zoo may have helped already."""
    done = subprocess.run([sys.executable, "-c", IMPORTS[name]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
