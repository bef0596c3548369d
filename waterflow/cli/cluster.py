"""``waterflow cluster``: start a cluster, submit jobs, watch them, and end it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from waterflow.cli.output import Terminal, table
from waterflow.cli.parameters import parameters_of, policy_of
from waterflow.cli.references import ConfigError, find_function
from waterflow.cluster.launch import ClusterConfig
from waterflow.cluster.policies import POLICIES
from waterflow.errors import CheckpointError, ClusterError, InvalidJobError, SubmissionError
from waterflow.units import format_bytes

if TYPE_CHECKING:
    from waterflow.cluster.client import Cluster
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
    """Return the text of a systemd unit that keeps a cluster with this config and state folder running."""
    command = [sys.executable, "-m", "waterflow", "cluster", "up", "--foreground", "--state", str(folder), *_options(config)]
    return _TEXT.format(folder=_on_one_line(str(folder)), command=" ".join(map(_quoted, command)))


def _options(config: ClusterConfig) -> list[str]:
    # Only what differs from the defaults: the unit stays readable, and later defaults apply. The port is part of
    # --listen; nodes of a Ray cluster are found, not named.
    found: list[str] = []
    plain = ClusterConfig()
    for field in fields(config):
        value, option = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if value == getattr(plain, field.name) or field.name == "port" or (field.name == "nodes" and config.ray):
            continue
        if field.name == "tenants":
            found += [part for name, quota in value for part in ("--tenant", f"{name}={quota}")]
        elif field.name == "parameters":
            found += [part for name, given in value.items() for part in ("--set", f"{name}={json.dumps(given)}")]
        elif field.name == "beyond_loopback":
            found.append("--listen-beyond-loopback")
        elif field.name != "host":
            found += [option, ",".join(value) if field.name == "nodes" else str(value)]
    if (config.host, config.port) != (plain.host, plain.port):
        found += ["--listen", f"{config.host}:{config.port}"]
    return found


def _on_one_line(text: str) -> str:
    # A line break in a folder's name would end the unit's comment and begin a directive.
    return text.replace("\n", " ")


def _quoted(word: str) -> str:
    # systemd's own quoting, not a shell's: % begins a specifier, $ a variable.
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{escaped}"' if any(c in word for c in " \t\n\"'\\;") or not word else escaped


_WATCH_SECONDS = 1.0
_LAST_ENDED = 5  # ended jobs that status shows
_FIRST_WAITING = 50  # waiting jobs that status shows
_MOST_IN_TABLE = 200  # jobs; rich takes seconds to lay out thousands: more are plain lines
_DOWN_SECONDS = 60.0

cluster = typer.Typer(name="cluster", help="Share devices among jobs, with priorities and quotas.", no_args_is_help=True)
State = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The cluster's state folder. [default: $WATERFLOW_CLUSTER, or the usual one]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as submit printed it.")]


@cluster.command()
def up(
    devices: Annotated[int | None, typer.Option(min=1, help="Number of devices; a process for each.")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the devices, instead of a number.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Use the GPUs of a running Ray cluster.")] = None,
    ray_token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The Ray cluster's token. [default: as $RAY_AUTH_TOKEN_PATH says]")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy: antman, fifo, las and others.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the policy. Repeatable.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="NAME=QUOTA", help="A tenant and its quota of devices. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Kind of device. [default: cpu]")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each device, such as 2GiB.")] = None,
    lanes: Annotated[int | None, typer.Option(min=1, help="Steps that run at the same time on each device.")] = None,
    checkpoint_seconds: Annotated[float | None, typer.Option(min=0.1, help="Seconds between checkpoints.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the cluster's endpoint.")] = None,
    beyond_loopback: Annotated[
        bool, typer.Option("--listen-beyond-loopback", help="Allow --listen an address that other machines can reach.")
    ] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay in this process, until Ctrl-C.")] = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Start nothing; print a systemd unit that keeps the cluster up.")
    ] = False,
    state: State = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start a cluster on this machine, or restart the one in the state folder."""
    with Terminal(as_json, debug) as terminal, _wrong_use():
        from waterflow.cluster import launch
        from waterflow.cluster.state import state_folder

        folder = state_folder(state)
        # Each option that is not given stays None, so that a restart keeps the stored setting.
        host, port = _address(listen)
        names = tuple(filter(None, nodes.split(","))) if nodes is not None else None
        if sum(given is not None for given in (names, devices, ray)) > 1:
            raise ConfigError("give one of --devices, --nodes and --ray")
        if devices is not None:
            names = tuple(f"device-{number}" for number in range(devices))
        wanted: dict[str, Any] = {
            "nodes": names,
            "policy": policy,
            "tenants": _tenants(tenant),
            "device": device,
            "memory": memory,
            "lanes": lanes,
            "host": host,
            "port": port,
            "checkpoint_seconds": checkpoint_seconds,
            "ray": ray,
            "beyond_loopback": beyond_loopback if listen is not None else beyond_loopback or None,
            "ray_token": None if ray_token is None else str(ray_token.resolve()),
        }
        # A restart without options is the cluster as it was: new options change the stored config.
        before = launch.load_config(folder)
        if ray_token is not None and ray is None and (before is None or before.ray is None):
            raise ConfigError("--ray-token is of a Ray cluster: add --ray HOST:PORT")
        changes = {key: value for key, value in wanted.items() if value is not None}
        if names is not None:
            changes |= {"ray": None, "ray_token": None}  # back from a Ray cluster to devices of this machine
        stored = before or launch.ClusterConfig()
        changes["parameters"] = _parameters(stored, policy or stored.policy, set_)
        config: ClusterConfig = replace(stored, **changes)  # type: ignore[arg-type]

        if print_unit:
            config.check()
            typer.echo(unit(folder, config), nl=False)
            return

        def ready(told: dict[str, Any]) -> None:
            terminal.say(
                f"a cluster is up: {len(told['nodes'])} device(s), policy {told['policy']}, process {told['pid']}, "
                f"{told['address']}"
            )
            terminal.say("[dim]submit jobs: waterflow cluster submit FILE.yaml; end it: waterflow cluster down[/dim]")

        # For systemd and containers, which watch this very process.
        if foreground:
            from waterflow.cluster.daemon import serve

            serve(folder, config, ready)
        else:
            told = launch.start(folder, config)
            ready(told)
            terminal.result(told)


@cluster.command()
def submit(
    what: Annotated[
        str, typer.Argument(metavar="FILE.YAML|MODULE:FUNCTION", help="A train config, or a function that makes jobs.")
    ],
    id: Annotated[str | None, typer.Option(help="An id for the job: submitted twice, it runs once.")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant whose quota it counts against.")] = "default",
    priority: Annotated[str, typer.Option(help="Priority: guaranteed or opportunistic.")] = "guaranteed",
    devices: Annotated[int, typer.Option(min=1, help="Devices that it needs; one, as a job runs on one.")] = 1,
    auto: Annotated[bool, typer.Option(help="Let a guaranteed job that waits long run as opportunistic.")] = True,
    memory: Annotated[str | None, typer.Option(help="Memory that it needs, such as 2GiB.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name in tables of interference.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Resume from this checkpoint file.")] = None,
    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Limit of its total running time, such as 90s, 30min or 2h.")
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Submit jobs that do not fit on one device together separately.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, and show the results.")] = False,
    state: State = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Submit the jobs of a config, which train together, or a function that makes them."""
    with Terminal(as_json, debug) as terminal, _wrong_use():
        there = _cluster(state)
        jobs: Any
        limit: float | str | None = time_limit
        if what.endswith((".yaml", ".yml")):
            # Imports torch, which takes seconds; other commands do without.
            from waterflow.cli.config import load_train

            config = load_train(Path(what))
            if config.device is not None:
                raise ConfigError(
                    f"{what}: device: a cluster has the devices that it was started with (waterflow cluster up --device "
                    f"{config.device.partition(':')[0]}); remove the key"
                )
            jobs, limit = list(config.jobs), time_limit or config.time_limit
        else:
            # MODULE:FUNCTION may be in the current folder, as with python -m.
            sys.path.insert(0, "")
            jobs = find_function(what, Path(), "submit")
        asked: dict[str, Any] = {
            "tenant": tenant,
            "priority": cast(Any, priority),
            "devices": devices,
            "auto": auto,
            "model": model,
            "time_limit": limit,
        }
        if apart:
            if not isinstance(jobs, list) or id is not None or memory is not None or checkpoint is not None:
                raise ConfigError("--apart takes a config, without --id, --memory and --checkpoint")
            handed_in = [(list(found.jobs), asked | {"memory": found.memory}) for found in there.sets_of(jobs)]
        else:
            handed_in = [(jobs, asked | {"id": id, "memory": memory or 0, "checkpoint": checkpoint})]
        names = {}
        for submitted, how in handed_in:
            made = there.submit(submitted, **how)
            names[made] = [job.name for job in submitted] if isinstance(submitted, list) else []
            # The id of a job begins with its name; that of several with the first one's.
            terminal.say(Text(f"{made}: {', '.join(names[made])}" if len(names[made]) > 1 else made))
        ids = list(names)
        # Without --wait the ids are all: the job may run for days.
        if not wait:
            return terminal.result({"ids": ids, "names": names})
        told = []
        for made in ids:
            there.wait(made)
            results, end = there.results(made), there.status(made)
            terminal.say(Text("\n".join(map(str, results))))
            if end["state"] != "completed":
                terminal.fail(f"job {made!r} {_how(end)}")
            told.append(end | {"results": [result.to_dict() for result in results]})
        terminal.result({"ids": ids, "names": names, "jobs": told})


@cluster.command()
def status(
    everything: Annotated[bool, typer.Option("--all", help="Show all waiting and all ended jobs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh each second, until Ctrl-C.")] = False,
    state: State = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show devices, tenants, and the jobs that wait, run, or ended last."""
    with Terminal(as_json, debug) as terminal:
        there = _cluster(state)
        ended = None if everything else _LAST_ENDED
        # Programs get every waiting job; people a screenful.
        waiting = None if everything or as_json else _FIRST_WAITING
        told = there.status(ended=ended, waiting=waiting)
        if as_json:
            return terminal.result(told)
        # A pipe gets one table: redrawing needs a terminal.
        if not watch or not terminal.live:
            for shown in _tables(told):
                terminal.say(shown)
            return None
        with Live(Group(*_tables(told)), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(_WATCH_SECONDS)
                live.update(Group(*_tables(there.status(ended=ended, waiting=waiting))), refresh=True)


@cluster.command()
def logs(
    id: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")] = False,
    state: State = None,
    debug: Debug = False,
) -> None:
    """Show the events of a job."""
    with Terminal(False, debug), _wrong_use():
        for line in _cluster(state).logs(id, follow):
            typer.echo(line)


@cluster.command()
def result(id: Id, state: State = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Wait for the end of a job, and show its results."""
    with Terminal(as_json, debug) as terminal, _wrong_use():
        there = _cluster(state)
        there.wait(id)
        end, results = there.status(id), there.results(id)
        terminal.say(Text("\n".join(map(str, results))))
        if end["state"] != "completed":
            terminal.fail(f"job {id!r} {_how(end)}")
        terminal.result(end | {"results": [made.to_dict() for made in results]})


@cluster.command()
def cancel(id: Id, state: State = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Cancel a job."""
    with Terminal(as_json, debug) as terminal, _wrong_use():
        there = _cluster(state)
        cancelled = there.cancel(id)
        terminal.say(f"{id} is cancelled" if cancelled else f"{id} had ended already: {_how(there.status(id))}")
        terminal.result({"id": id, "cancelled": cancelled})


@cluster.command("set")
def set_(
    id: Id,
    quota: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each of its jobs, such as 2GiB or 50%.")] = None,
    priority: Annotated[str | None, typer.Option(help="Priority: guaranteed or opportunistic.")] = None,
    state: State = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Change the quota or the priority of a job that waits or runs."""
    with Terminal(as_json, debug) as terminal, _wrong_use():
        told = _cluster(state).set(id, quota, cast(Any, priority))
        terminal.say(f"{id}: {told['priority']}" + (f", quota {format_bytes(told['quota'])}" if told["quota"] else ""))
        terminal.result(told)


@cluster.command()
def down(state: State = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """End a cluster. Running jobs are saved, and resume when it is up again."""
    with Terminal(as_json, debug) as terminal:
        from waterflow.cluster.launch import wait_for_end

        # The endpoint answers before the process has ended: wait, so that a following up finds the folder free.
        pid = _cluster(state).down()
        if not wait_for_end(pid, _DOWN_SECONDS):
            raise ClusterError(f"the cluster's process {pid} has not ended after {_DOWN_SECONDS:.0f} s")
        terminal.say("the cluster is down; waterflow cluster up goes on with the jobs that have not ended")
        terminal.result({"pid": pid})


# -- parts


@contextlib.contextmanager
def _wrong_use() -> Iterator[None]:
    try:
        yield
    # Errors of the request are the user's, exit code 2; what fails later is a failure, exit code 1.
    except (SubmissionError, InvalidJobError, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _cluster(state: Path | None) -> Cluster:
    from waterflow.cluster.client import Cluster

    return Cluster(state)


def _parameters(stored: ClusterConfig, policy: str, given: list[str] | None) -> dict[str, Any]:
    if policy not in POLICIES:  # ``ClusterConfig.check`` says so
        return {}
    # Another policy has other parameters.
    kept = stored.parameters if policy == stored.policy else {}
    parameters = {**kept, **parameters_of([policy], given)}
    policy_of(policy, parameters)  # for its errors
    return parameters


def _tenants(given: list[str] | None) -> tuple[tuple[str, int], ...] | None:
    if given is None:
        return None
    made = []
    for text in given:
        name, _, quota = text.partition("=")
        if not name or not quota.isdigit():
            raise ConfigError(f"--tenant must be NAME=QUOTA, such as vision=2; got {text!r}")
        made.append((name, int(quota)))
    return tuple(made)


def _address(listen: str | None) -> tuple[str | None, int | None]:
    if listen is None:
        return None, None
    # From the right, as an IPv6 address has colons of its own.
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen must be HOST:PORT, such as 127.0.0.1:8470; got {listen!r}")
    return host, int(port)


def _how(job: dict[str, Any]) -> str:
    return f"{job['state']}{': ' + job['reason'] if job['reason'] else ''}"


_COLOURS = {"completed": "green", "failed": "red", "running": "bold", "cancelled": "yellow", "waiting": "dim"}
_NUMBERS = ("done", "steps", "step", "waited")


def _tables(told: dict[str, Any]) -> list[Table | Text]:
    columns: tuple[str, ...] = ("device", "state", "jobs", "busy", "held", "memory")
    nodes = table(f"devices, policy {told['policy']}", columns, left=columns[:3])
    for node in told["nodes"]:
        nodes.add_row(
            node["name"],
            "up" if node["alive"] else "[red]lost[/]",
            ", ".join(node["jobs"]),
            f"{node['utilization']:.0%}",
            format_bytes(node["held"]),
            format_bytes(node["memory"]),
        )
    made: list[Table | Text] = [nodes]
    if trouble := told.get("trouble"):  # missing if an older version started the cluster
        made.append(Text(f"goes wrong, and is tried again: {trouble}", style="red"))
    if told["tenants"]:
        tenants = table("tenants", ("tenant", "quota", "used"), left=("tenant",))
        for tenant in told["tenants"]:
            tenants.add_row(tenant["name"], str(tenant["quota"]), str(tenant["used"]))
        made.append(tenants)
    columns = ("job", "tenant", "state", "priority", "where", "done", "steps", "step", "waited", "why")
    more = [
        f"and {told[count]:,} that {what}: waterflow cluster status --all"
        for count, what in (("waiting_not_shown", "wait behind them"), ("jobs_not_shown", "ended before"))
        if told[count]
    ]
    rows = [_row(job) for job in told["jobs"]]
    if len(rows) > _MOST_IN_TABLE:
        return [*made, _lines([list(columns), *rows]), *map(Text, more)]
    jobs = table("jobs", columns, left=set(columns).difference(_NUMBERS), wraps=("why",))
    jobs.caption, jobs.caption_justify = "\n".join(more) or None, "left"
    for row in rows:
        # Users choose these texts: square brackets in them must not become markup.
        id, tenant, state, *rest = map(escape, row)
        jobs.add_row(id, tenant, f"[{_COLOURS.get(state, 'white')}]{state}[/]", *rest)
    return [*made, jobs]


def _row(job: dict[str, Any]) -> list[str]:
    step, rate = job["step_seconds"], job.get("rate")
    beside = "" if rate is None or rate > 0.995 else f", {rate:.0%} of alone"
    return [
        job["id"],
        job["tenant"],
        job["state"],
        job["priority"],
        ", ".join(f"{node}:{device}" for node, device in job["places"]) or str(job["devices"]),
        "" if job["fraction"] is None else f"{job['fraction']:.0%}",
        f"{job['steps']:,}",
        "" if step is None else f"{step * 1e3:.1f} ms{beside}",
        f"{job['waited']:.1f} s",
        job["reason"],
    ]


def _lines(rows: list[list[str]]) -> Text:
    # One line for each job, however wide the terminal is: such lists go through grep.
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    numbers = [name in _NUMBERS for name in rows[0]]
    lines = (
        " ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in zip(row, widths, numbers))
        for row in rows
    )
    return Text("\n".join(line.rstrip() for line in lines), no_wrap=True, overflow="ignore")
