"""The systemd unit of a cluster: text that names this Python and the state folder as they are where it is printed."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from waterflow.cluster.launch import ClusterConfig

_TEXT = """\
# systemd unit of the waterflow cluster in {folder}
# waterflow cluster up --print-unit > ~/.config/systemd/user/waterflow.service
# systemctl --user enable --now waterflow; loginctl enable-linger: also while nobody is logged in
[Unit]
Description=waterflow cluster
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
Restart=on-failure
RestartSec=5
# Devices and their jobs outlive the scheduler, and the next one takes them over; waterflow cluster down ends them.
KillMode=process
TimeoutStopSec=60

[Install]
WantedBy=default.target
"""


def unit(folder: Path, config: ClusterConfig) -> str:
    """The unit that keeps a cluster of this config up in a state folder."""
    command = [
        sys.executable,
        "-m",
        "waterflow",
        "cluster",
        "up",
        "--foreground",
        "--state",
        str(folder),
        *_options(config),
    ]
    return _TEXT.format(folder=_on_one_line(str(folder)), command=" ".join(map(_quoted, command)))


def _options(config: ClusterConfig) -> list[str]:
    """What of the config is not as ``up`` without options has it."""
    found: list[str] = []
    plain = ClusterConfig()
    for field in fields(config):
        value, option = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if value == getattr(plain, field.name) or field.name == "port" or (field.name == "nodes" and config.ray):
            continue
        if field.name == "tenants":
            found += [part for name, quota in value for part in ("--tenant", f"{name}={quota}")]
        elif field.name == "beyond_loopback":
            found.append("--listen-beyond-loopback")
        elif field.name != "host":
            found += [option, ",".join(value) if field.name == "nodes" else str(value)]
    if (config.host, config.port) != (plain.host, plain.port):
        found += ["--listen", f"{config.host}:{config.port}"]
    return found


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ")


def _quoted(word: str) -> str:
    """As systemd reads it: specifiers begin with %, variables with $."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{escaped}"' if any(c in word for c in " \t\n\"'\\;") or not word else escaped
