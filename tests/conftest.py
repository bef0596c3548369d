"""One thread inside operations, repeatable property tests, and the tiers."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import tiers
from waterflow.executor.program.capture_budget import Horizon
from waterflow.executor.program.capture_cache import captures

os.environ.setdefault("WATERFLOW_AUDIT", "all")  # also of the processes that tests start
torch.set_num_threads(1)
settings.register_profile("short", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", settings.get_profile("short"), max_examples=2000)
settings.load_profile("short")


CAMPAIGN_SECONDS = 1200  # for a test without a limit of its own: the longest draws from 50,000 seeds
_seconds: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run what is marked slow")
    parser.addoption("--full", action="store_true", help="also run what is marked campaign, with larger random counts")
    parser.addoption("--tiers", action="store_true", help="run nothing; list what needs time in the short tier, and why")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = tiers.left_out(config)
    late = [any(item.get_closest_marker(tier) for tier in out) for item in items]
    config.hook.pytest_deselected(items=[item for item, is_late in zip(items, late) if is_late])
    items[:] = [item for item, is_late in zip(items, late) if not is_late]
    if config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(CAMPAIGN_SECONDS))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("--tiers"):
        return None
    print(tiers.report(session.config, session.items))
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # not in the processes of pytest-xdist
        tiers.remember(session.config, _seconds)


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


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured at their first call, however short their jobs are. A module about short jobs replaces this fixture."""
    monkeypatch.setattr(Horizon, "lasts", lambda horizon, pays_after: True)
