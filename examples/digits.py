"""Handwritten digits: the pieces that train.yaml and study.yaml refer to, and an objective."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import waterflow as wf

_source = load_digits()
_images = torch.tensor(_source.images, dtype=torch.float32).unsqueeze(1) / 16
_labels = torch.tensor(_source.target)
TRAIN, TEST = slice(0, 1280), slice(1280, None)


def loader(batch_size=32):
    """The training images, shuffled."""
    return wf.DataLoader(TensorDataset(_images[TRAIN], _labels[TRAIN]), batch_size, shuffle=True)


def cnn(width=16, dropout=0.0):
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * width, 10),
    )  # fmt: skip


def mlp(width=64):
    """A small perceptron."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy(model):
    """Called after each epoch, in evaluation mode and without gradients."""
    device = next(model.parameters()).device
    return (model(_images[TEST].to(device)).argmax(dim=1) == _labels[TEST].to(device)).float().mean()


def make_job(width, lr=1e-3):
    """A job for train.yaml, which says for how many epochs."""
    return wf.Job(
        name="cnn",
        model=lambda: cnn(width),
        data=loader,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        evaluate=accuracy,
        seed=0,
    )


def objective(trial):
    """An ordinary objective with a Step in its loop, for study.yaml."""
    model = cnn(trial.suggest_categorical("width", [8, 16, 32])).to(wf.device())  # the device that is trained on
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
    batches = loader(trial.suggest_categorical("batch_size", [16, 32, 64]))
    for epoch in range(3):
        for batch in batches:
            step(batch)
        model.eval()
        with torch.no_grad():
            value = accuracy(model).item()
        model.train()
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value
