"""One thread inside operations, repeatable property tests, and the full mode."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from waterflow.executor.captured import captures

os.environ.setdefault("WATERFLOW_AUDIT", "all")  # also of the processes that tests start
torch.set_num_threads(1)
settings.register_profile(
    "short", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", settings.get_profile("short"), max_examples=2000)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run what is marked slow, with larger random counts")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: runs with --full"))


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this is the full mode."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def no_captures():
    """Nothing is captured yet, and what this test captures is forgotten."""
    captures.clear()
    yield captures
    captures.clear()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="waterflow")
