"""Settings of Ray: what it reads of the environment, and how soon it notices losses."""

from __future__ import annotations

import os
from pathlib import Path

# A node whose processes are gone is known to be after period * threshold, at most.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
    "timeout_ms_task_wait_for_death_info": 100,  # a call that an actor's end broke off says so that much later
    "worker_niceness": 0,
}


class RayEnvironment:
    """What Ray reads of the environment of this process, and hands on to the processes that it starts."""

    def __init__(self, token: Path | None, loopback: bool) -> None:
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
        if loopback:
            settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if token is not None:
            settings["RAY_AUTH_TOKEN_PATH"] = str(token)
        self._before = {name: os.environ.get(name) for name in [*settings, "RAY_AUTH_TOKEN"]}
        os.environ.update(settings)
        if token is not None:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come before the file

    def put_back(self) -> None:
        """As it was before."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
