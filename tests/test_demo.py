"""The demo's study is one study, whichever way it is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import optuna
import pytest
import torch

import waterflow as wf
from examples import demo

PARAMS = [
    {"kind": "cnn", "depth": 2, "width": 16, "dropout": 0.3, "optimizer": "SGD", "lr": 0.05, "batch_size": 64},
    {"kind": "mlp", "depth": 1, "width": 16, "dropout": 0.3, "optimizer": "AdamW", "lr": 0.003, "batch_size": 64},
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "EPOCHS", 2)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def study() -> optuna.Study:
    made = demo.create_study()
    for params in PARAMS:
        made.enqueue_trial(params)
    return made


def values(made: optuna.Study) -> list[list[float]]:
    return [list(trial.intermediate_values.values()) for trial in made.trials]


def test_split_is_fixed_and_normalized():
    data = demo.digits()
    assert data.images.shape == (1280, 1, 8, 8) and data.test_images.shape == (517, 1, 8, 8)
    assert data.images.dtype == torch.float32 and data.labels.dtype == torch.int64
    assert abs(float(data.images.mean())) < 1e-4 and abs(float(data.images.std()) - 1) < 1e-4
    assert set(data.test_labels.tolist()) == set(range(10))


def test_batches_hold_each_image_once_and_repeat_with_their_seed():
    one, other = demo.Batches(64), demo.Batches(64)
    first, second = list(one), list(one)
    assert len(first) == len(one) == 20
    assert torch.equal(torch.cat([x for x, _ in first]).sum(0), demo.digits().images[demo_order(first)].sum(0))
    assert not torch.equal(first[0][0], second[0][0])  # shuffled anew
    again = list(other)
    assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))


def demo_order(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The positions of the batches' images in the training split: a permutation, or this raises."""
    where = {image.numpy().tobytes(): number for number, image in enumerate(demo.digits().images)}
    order = [where[image.numpy().tobytes()] for images, _ in batches for image in images]
    assert sorted(order) == list(range(len(order)))
    return torch.tensor(order)


def test_models_repeat_and_draw_nothing_from_the_process():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    models = [demo.make_model(kind, depth, 16, 0.1) for kind in ("cnn", "mlp") for depth in (1, 2, 3)]
    assert torch.equal(torch.rand(3), expected)
    for model in models:
        assert model(demo.digits().images[:2]).shape == (2, 10)
        assert not any(p.is_meta for p in model.parameters())
    again = demo.make_model("cnn", 1, 16, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), again.parameters()))
    with pytest.raises(ValueError, match="'cnn' or 'mlp'; got 'rnn'"):
        demo.make_model("rnn", 1, 16)


def test_three_ways_are_one_study():
    stepped, built, eager = study(), study(), study()
    wf.optimize(stepped, demo.objective, len(PARAMS), max_concurrent=2)
    wf.optimize(built, demo.build, len(PARAMS), max_concurrent=2)
    eager.optimize(demo.objective_eager, len(PARAMS))
    assert values(stepped) == values(built)
    # A learning rate in a tensor rounds differently from one in a number.
    for mine, reference in zip(values(stepped), values(eager)):
        assert mine == pytest.approx(reference, abs=0.02)
    assert stepped.best_value > 0.8
    assert [demo.steps_of(trial) for trial in stepped.trials] == [40, 40]


def test_seed_decides_what_is_tried():
    asked = [demo.choose(demo.create_study(seed=seed).ask()) for seed in (3, 3, 4)]
    assert asked[0] == asked[1] != asked[2]


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch):
    demo.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        demo.digits()


@pytest.mark.needs_time("the README promises the demo")
def test_the_demo_compares_and_saves_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    demo.main(["--trials", "3", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "best: trial" in said and "times as fast" in said and str(tmp_path / "memory.png") in said
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_demo_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    demo.main(["--trials", "2", "--seed", "7", "--no-compare", "--out", str(tmp_path)])
    assert "times as fast" not in capsys.readouterr().out
