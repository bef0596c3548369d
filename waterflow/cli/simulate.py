"""``waterflow simulate``: replay workloads under the cluster's policies, in virtual time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import HEAVY_HEAD

from waterflow.cli.output import Terminal, table
from waterflow.cli.parameters import names_of, pairs, parameters_of, policy_of
from waterflow.cli.references import ConfigError, meant
from waterflow.cluster.interference import Interference, gavel_models, read_gavel_pairs
from waterflow.cluster.model_profiles import ANTMAN_MIX, KNOWN_MODELS, draw_models
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scaling import LINEAR, TableScaling
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import Overheads, Simulated, Simulator
from waterflow.cluster.submission import Node, Submission, Tenant
from waterflow.cluster.workload import Workload, read_workload

if TYPE_CHECKING:
    from waterflow.cluster.summary import Summary

OVERHEADS = tuple(field.name for field in dataclasses.fields(Overheads))


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.CSV", help="job_id, submit_s, duration_s, num_gpus, ...")],
    policy: Annotated[list[str], typer.Option(help=f"{', '.join(POLICIES)}. Several are compared.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices of the cluster.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    quota: Annotated[
        list[str] | None, typer.Option(metavar="TENANT=DEVICES", help="Guaranteed devices; for all tenants, or none.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A policy's parameter.")] = None,
    overhead: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SECONDS", help=f"{', '.join(OVERHEADS)}; 0 unless given.")
    ] = None,
    scaling: Annotated[
        Path | None, typer.Option(metavar="TABLE.CSV", help="Throughput by number of devices. [default: linear]")
    ] = None,
    scaling_seed: Annotated[int, typer.Option(help="Seed that assigns curves of the table to jobs.")] = 0,
    colocation: Annotated[
        Path | None, typer.Option(metavar="TABLE.CSV", help="Measured pairs on a device. [default: by utilization]")
    ] = None,
    model_seed: Annotated[int, typer.Option(help="Seed of the models drawn for jobs that name none.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Replay a cluster's workload in virtual time, with the scheduler and policies of a live cluster."""
    with Terminal(as_json, debug) as terminal:
        for name in policy:
            if name not in POLICIES:
                raise ConfigError(f"there is no policy {name!r}{meant(name, POLICIES)}")
        workload = read_workload(trace)
        for note in workload.notes:
            terminal.say(note)
        curves = TableScaling.read(scaling, scaling_seed) if scaling else LINEAR
        parameters = parameters_of(policy, set_)
        seconds = {name: _number(text, name, "--overhead") for name, text in pairs(overhead, "--overhead", OVERHEADS)}
        tenants = [Tenant(name, int(_number(text, name, "--quota"))) for name, text in pairs(quota, "--quota")]
        sharing = _Sharing(policy, colocation, model_seed)
        submissions = sharing.with_models(terminal, workload)
        # The last node may be smaller.
        sizes = [gpus_per_node] * (gpus // gpus_per_node) + [gpus % gpus_per_node] * (gpus % gpus_per_node > 0)
        nodes = [Node(f"node{i}", size, sharing.memory) for i, size in enumerate(sizes)]
        runs: dict[str, Simulated] = {}
        printed: dict[str, dict[str, Any]] = {}
        # A fresh policy and scheduler for each run, as both keep state. A policy that is named twice runs once.
        for name in dict.fromkeys(policy):
            chosen = _policy(name, parameters, curves)
            scheduler = Scheduler(nodes, chosen, tenants)
            runs[name] = Simulator(scheduler, Overheads(**seconds), curves, **sharing.of(chosen)).run(submissions)
            printed[name] = dict(chosen.parameters)
        from waterflow.cluster.summary import save_pictures, summarize  # needs NumPy, which other commands do without

        summaries = {name: summarize(run) for name, run in runs.items()}
        shared = {
            "devices": gpus,
            "devices per node": gpus_per_node,
            "quotas": {each.name: each.quota for each in tenants} or None,
            "overheads (s)": dataclasses.asdict(Overheads(**seconds)),
            "scaling": str(curves),
            **sharing.parameters,
        }
        _show(terminal, f"{workload.name}: {len(workload):,} jobs on {gpus} devices", summaries)
        for name, value in shared.items():
            terminal.say(f"{name}: {value}")
        for name, own in printed.items():
            if own:
                terminal.say(f"{name}: " + ", ".join(f"{key}={value}" for key, value in own.items()))
        files = {}
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            files["picture"] = str(out / "simulate.png")
            save_pictures(files["picture"], runs, f"{workload.name}: {len(workload):,} jobs on {gpus} devices")
            terminal.say(f"distributions: {files['picture']}")
        terminal.result(
            {
                "workload": workload.name,
                "notes": workload.notes,
                "parameters": shared,
                "policies": {name: {**found.to_dict(), "parameters": printed[name]} for name, found in summaries.items()},
                "files": files,
            }
        )


class _Sharing:
    """The model of devices that submissions share, if one of the policies shares devices."""

    def __init__(self, policies: Sequence[str], colocation: Path | None, seed: int) -> None:
        self._seed = seed
        self._model: Interference | None = None
        # Models are drawn only for policies that share: the others give the same figures without.
        if all(POLICIES[name].sharing == "none" for name in policies):
            return
        if colocation is not None and not colocation.is_file():
            raise ConfigError(f"there is no file {colocation}")
        pairs = read_gavel_pairs(colocation) if colocation else {}
        self._model = Interference(models=KNOWN_MODELS | gavel_models(pairs), pairs=pairs)

    @property
    def memory(self) -> int:
        """Bytes of each device; 0 if no policy uses them."""
        return self._model.device_memory if self._model else 0

    @property
    def parameters(self) -> dict[str, Any]:
        """The assumptions, as printed."""
        return {"sharing": self._model.parameters()} if self._model else {}

    def with_models(self, terminal: Terminal, workload: Workload) -> list[Submission]:
        """Return the submissions with the memory of their models; a submission without a model draws one."""
        if self._model is None:
            return workload.submissions
        nameless = sum(each.model is None for each in workload.submissions)
        if nameless:
            terminal.say(f"{nameless:,} of {len(workload):,} jobs name no model: drawn from AntMan's mix, seed {self._seed}")
        known = draw_models(workload.submissions, ANTMAN_MIX, self._seed)
        return [dataclasses.replace(each, memory=self._model.memory(each.model)) for each in known]

    def of(self, policy: Policy) -> dict[str, Any]:
        """Return the simulator's arguments for a policy."""
        model = self._model
        if model is None or policy.sharing == "none":
            return {}
        speeds = model.under_control if policy.sharing == "controlled" else model.packed
        return {"speeds": speeds, "utilization": lambda submission: model.utilization(submission.model)}


def _number(text: str, name: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{option} {name}={text}: a number of 0 or more is needed")
    return value


def _policy(name: str, parameters: dict[str, Any], scaling: Any) -> Policy:
    own = {key: value for key, value in parameters.items() if key in names_of(name)}
    if "scaling" in inspect.signature(POLICIES[name]).parameters:
        # Policies and simulator must assume the same curves.
        own["scaling"] = scaling
    return policy_of(name, own)


def _show(terminal: Terminal, title: str, summaries: dict[str, Summary]) -> None:
    columns = (
        "policy",
        "average s",
        "median s",
        "99 % s",
        "makespan s",
        "queueing s",
        "queueing 99 % s",
        "utilization",
        "unfair",
        "worst share",
        "preemptions",
    )
    made = table(title, columns, left=("policy",))
    made.box = HEAVY_HEAD
    for name, found in summaries.items():
        made.add_row(
            name,
            f"{found.average:,.2f}",
            *(f"{value:,.0f}" for value in (found.p50, found.p99, found.makespan)),
            f"{found.queueing:,.2f}",
            f"{found.queueing_p99:,.0f}",
            f"{found.utilization:.1%}",
            f"{found.unfair:.1%}",
            f"{found.worst_share:.2f} x",
            f"{found.preemptions:,}",
        )
    terminal.say(made)
    terminal.say(
        "Completion times from submission to end; queueing: the part of it without devices. Unfair: jobs that took longer "
        "than under an equal share of the cluster; worst share: how many times longer, 99th percentile."
    )
