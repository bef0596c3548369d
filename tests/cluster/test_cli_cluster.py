"""``waterflow cluster``: from one command to a running cluster, and words for what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.cluster.conftest import LiveCluster
from waterflow.cli.main import app
from waterflow.cluster import launch
from waterflow.cluster.ray_share import RayShare
from waterflow.cluster.state import address_file
from waterflow.cluster.worker import WorkerSettings
from waterflow.errors import ClusterError

pytestmark = pytest.mark.needs_time("a cluster of processes, whose jobs last long enough to be looked at")

USER_CODE = """
import os, threading, time
import torch
from torch import nn
import waterflow as wf

lock = threading.Lock()

def model(width=4): return nn.Linear(4, width)
def data(steps=4, pause=0.0):
    numbers = torch.Generator().manual_seed(0)
    for _ in range(steps):
        time.sleep(pause)
        yield torch.randn(8, 4, generator=numbers), torch.zeros(8, dtype=torch.int64)
def locked(model): return float(lock.locked())
def job(): return wf.Job("made", model, data, lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.functional.cross_entropy)
def long(): return wf.Job("long", model, lambda: data(200, 0.1), lambda p: torch.optim.SGD(p, lr=0.1),
                          loss=nn.functional.cross_entropy)
def broken(): raise RuntimeError("no weights today")
"""
PIECES = "model: code.py:model, data: code.py:data, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}, seed: 0"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["cluster", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code.py").write_text(USER_CODE)
    (tmp_path / "jobs.yaml").write_text(f"jobs:\n- {{name: a, {PIECES}}}\n- {{name: b, {PIECES}}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def up(shared_cluster: LiveCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LiveCluster:
    monkeypatch.setenv("WATERFLOW_CLUSTER", str(shared_cluster.folder))
    return shared_cluster


@pytest.mark.slow
def test_from_up_to_down(folder: Path) -> None:
    """A job is handed in, the cluster ends in the middle of it, and goes on."""
    state = ["--state", folder / "state"]
    try:
        started = run("up", "--devices", "1", "--memory", "128MiB", "--lanes", "1", "--set", "window=3", *state)
        assert started.exit_code == 0, started.output
        assert "a cluster is up: 1 device(s), policy " in started.output
        assert "a cluster is up in " in run("up", *state).stderr
        assert run("submit", "code.py:long", "--id", "long", *state).stdout == "long\n"
        until = time.monotonic() + 30
        while json.loads(run("status", "--json", *state).stdout)["jobs"][0]["steps"] == 0:
            assert time.monotonic() < until
        down = run("down", *state)
        assert down.exit_code == 0 and "goes on with the jobs that have not ended" in down.output
        gone = run("status", *state)
        assert gone.exit_code == 1 and "no cluster is up in " in gone.stderr
        assert f"start one: waterflow cluster up --state {folder / 'state'}" in gone.stderr
        again = json.loads(run("up", "--set", "patience=7", "--json", *state).stdout)  # else with the settings that it had
        assert again["nodes"] == ["device-0"]
        told = json.loads(run("status", "--json", *state).stdout)
        assert told["parameters"]["window"] == 3 and told["parameters"]["patience"] == 7
        told = told["jobs"][0]
        assert told["id"] == "long" and told["attempts"] == 2 and told["steps"] > 0
        assert "suspended" in run("logs", "long", *state).stdout
        assert run("cancel", "long", *state).stdout == "long is cancelled\n"
    finally:
        run("down", *state)
        with contextlib.suppress(OSError, ValueError):
            os.kill(json.loads(address_file(folder / "state").read_text())["pid"], signal.SIGKILL)


def test_submit_and_results(up: LiveCluster) -> None:
    assert run("submit", "jobs.yaml", "--id", "both").stdout == "both: a, b\n"
    ended = run("submit", "jobs.yaml", "--wait")
    assert ended.exit_code == 0, ended.output
    assert all(word in ended.stdout for word in ("a-", "\na: completed, 4 steps", "\nb: completed, 4 steps"))
    told = json.loads(run("submit", "jobs.yaml", "--wait", "--apart", "--json").stdout)
    assert [result["name"] for result in told["jobs"][0]["results"]] == ["a", "b"] and len(told["ids"]) == 1
    (id,) = told["ids"]
    assert told["names"] == {id: ["a", "b"]}
    assert run("logs", id).stdout.rstrip().endswith("completed")
    assert json.loads(run("result", id, "--json").stdout)["results"][0]["steps"] == 4
    assert "had ended already: completed" in run("cancel", id).stdout
    shown = run("status").stdout
    assert "devices, policy " in shown and "small" in shown and id in shown
    assert run("submit", "code.py:job", "--id", "again", "--wait").exit_code == 0
    assert run("submit", "code.py:job", "--id", "again").stdout == "again\n"


def test_jobs_that_ended_long_ago_are_not_shown(up: LiveCluster) -> None:
    ids = [f"old-{number}" for number in range(7)]
    for id in ids:
        assert run("submit", "code.py:job", "--id", id).exit_code == 0
    for id in ids:
        assert run("result", id).exit_code == 0
    told = json.loads(run("status", "--json").stdout)
    assert sum(job["id"] in ids for job in told["jobs"]) == 5 == len(told["jobs"]) and told["jobs_not_shown"] >= 2
    shown = run("status").stdout
    assert f"and {told['jobs_not_shown']} that ended before: waterflow cluster status --all" in shown
    everything = run("status", "--all").stdout
    assert all(id in everything for id in ids) and "ended before" not in everything


@pytest.mark.parametrize(
    ("line", "options", "given"), [("", [], None), ("time_limit: 2h", [], 7200.0), ("time_limit: 2h", ["90s"], "90s")]
)
def test_a_time_limit_of_the_command_or_the_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, options: list[str], given: object
) -> None:
    from waterflow.cluster.client import Cluster

    asked: list[object] = []
    monkeypatch.setattr(Cluster, "submit", lambda self, jobs, **more: asked.append(more["time_limit"]) or "id")
    (folder / "limited.yaml").write_text(f"jobs: [{{name: a, {PIECES}}}]\n{line}\n")
    ended = run("submit", "limited.yaml", *(["--time-limit", *options] if options else []))
    assert ended.exit_code == 0 and asked == [given], ended.output
    trained = CliRunner().invoke(app, ["train", "limited.yaml"])
    assert trained.exit_code == (2 if line else 0)
    assert not line or "time_limit: a cluster keeps to it: waterflow cluster submit" in trained.stderr


def test_the_status_of_thousands_of_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of them, or a line for each; what jobs say is shown as they said it."""
    from waterflow.cluster.client import Cluster

    job = {
        "id": "", "tenant": "default", "state": "waiting", "priority": "guaranteed", "devices": 1, "places": [],
        "fraction": None, "steps": 0, "step_seconds": None, "waited": 1.0, "reason": "",
    }  # fmt: skip
    jobs = [job | {"id": f"job-{number}"} for number in range(5000)]
    jobs[7] |= {"state": "failed", "reason": "KeyError: [/bold] in\na file " + "x" * 200}

    def status(self: Cluster, ended: int | None, waiting: int | None) -> dict[str, object]:
        shown = jobs[: 8 + waiting] if waiting is not None else jobs
        hidden = len(jobs) - len(shown)
        return {"policy": "fifo", "nodes": [], "tenants": [], "jobs": shown, "jobs_not_shown": 0,
                "waiting_not_shown": hidden}  # fmt: skip

    monkeypatch.setattr(Cluster, "status", status)
    shown = run("status").stdout
    assert "job-57 " in shown and "job-58 " not in shown and "[/bold]" in shown
    assert "and 4,942 that wait behind them: waterflow cluster status --all" in shown
    began = time.process_time()
    lines = run("status", "--all").stdout.splitlines()
    assert time.process_time() - began < 2.0  # as a table it needs five seconds and more
    found = [line.split()[0] for line in lines if line.startswith("job-")]
    assert found == [job["id"] for job in jobs] and any(line.endswith("in a file " + "x" * 200) for line in lines)
    assert len(json.loads(run("status", "--json").stdout)["jobs"]) == 5000


def test_a_job_that_fails(up: LiveCluster) -> None:
    ended = run("submit", "code.py:broken", "--id", "broken", "--wait")
    assert ended.exit_code == 1
    assert "waterflow: job 'broken' failed: RuntimeError: no weights today" in ended.stderr
    assert "no weights today" in run("status").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jobs.yaml", "--tenant", "nobody"], "unknown tenant 'nobody'; there are ['default', 'small']"),
        (["jobs.yaml", "--devices", "3"], "devices must be 1, as a job runs on one device; got 3"),
        (["jobs.yaml", "--memory", "2GiB"], "needs 2,147,483,648 bytes on each device"),
        (["jobs.yaml", "--memory", "2 parsecs"], "cannot read '2 parsecs'"),
        (["jobs.yaml", "--priority", "high"], "priority 'high' is neither guaranteed nor opportunistic"),
        (["jobs.yaml", "--id", "a/b"], "a job's id is 1 to 100 letters"),
        (["nothing.yaml"], "there is no file nothing.yaml"),
        (["code.py:nothing"], "code.py has no function 'nothing'"),
        (["locked.yaml"], "evaluate cannot be sent to another process: cannot pickle '_thread.lock' object"),
        (["one.yaml", "--checkpoint", "damaged"], "damaged is no checkpoint"),
        (["one.yaml", "--checkpoint", "missing"], "there is no checkpoint missing"),
        (["jobs.yaml", "--checkpoint", "damaged"], "a checkpoint is of one job; got 2"),
        (["code.py:job", "--apart"], "--apart takes a config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_in_a_line(up: LiveCluster, folder: Path, arguments: list[str], said: str) -> None:
    (folder / "damaged").write_bytes(b"not a checkpoint at all" * 10)
    (folder / "one.yaml").write_text(f"jobs: [{{name: a, {PIECES}}}]")
    (folder / "locked.yaml").write_text(f"jobs: [{{name: a, evaluate: code.py:locked, {PIECES}}}]")
    ended = run("submit", *arguments)
    assert ended.exit_code == 2, ended.output
    (line,) = ended.stderr.splitlines()
    assert line.startswith("waterflow: ") and said in line


def test_a_job_is_changed(up: LiveCluster) -> None:
    assert run("submit", "code.py:long", "--id", "changed").exit_code == 0
    changed = run("set", "changed", "--quota", "50%", "--priority", "opportunistic")
    assert changed.stdout == "changed: opportunistic, quota 128.0 MiB\n", changed.output
    told = json.loads(run("set", "changed", "--priority", "guaranteed", "--json").stdout)
    assert (told["id"], told["priority"], told["quota"]) == ("changed", "guaranteed", 128 << 20)
    for arguments, said in (
        (["changed"], "job 'changed': nothing is to be changed; give a quota, a priority, or both"),
        (["changed", "--quota", "2GiB"], "exceeds the engine's limit of 268435456"),
        (["changed", "--quota", "2 parsecs"], "job 'changed': quota must be bytes"),
        (["changed", "--priority", "high"], "priority must be 'guaranteed' or 'opportunistic'; got 'high'"),
        (["nobody", "--quota", "1MiB"], "no job is called 'nobody'"),
    ):
        ended = run("set", *arguments)
        (line,) = ended.stderr.splitlines()
        assert ended.exit_code == 2 and line.startswith("waterflow: ") and said in line
    run("cancel", "changed")
    assert run("set", "changed", "--quota", "1MiB").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "best"], "no policy is called 'best'; there are "),
        (["--policy", "elastic_tiresias"], "changes the number of a job's devices, and a job of a live cluster runs on one"),
        (["--set", "window"], "--set 'window': write it as NAME=VALUE"),
        (["--tenant", "us"], "--tenant must be NAME=QUOTA, such as vision=2; got 'us'"),
        (["--devices", "2", "--nodes", "a,b"], "give one of --devices, --nodes and --ray"),
        (["--nodes", "a,a"], "each with a name of its own"),
        (["--ray-token", "token"], "--ray-token is of a Ray cluster: add --ray HOST:PORT"),
        (["--listen", "8470"], "--listen must be HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--memory", "2 parsecs"], "cannot read '2 parsecs'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_started_is_said_in_a_line(folder: Path, arguments: list[str], said: str) -> None:
    ended = run("up", "--state", folder / "state", *arguments)
    assert ended.exit_code in (1, 2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("waterflow: ") and said in line
    assert not address_file(folder / "state").exists()


@pytest.mark.slow
def test_a_cluster_that_lost_its_database_does_not_begin_without_it(folder: Path) -> None:
    (folder / "state" / "work" / "jobs" / "a").mkdir(parents=True)
    ended = run("up", "--state", folder / "state", "--devices", "1")
    assert ended.exit_code == 1 and "cluster.db is missing, and " in ended.stderr
    assert "Put back a copy of cluster.db; or, to begin without them, move " in ended.stderr


@pytest.fixture
def state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder in which ``up`` keeps its config, and starts nothing."""

    def start(state: Path, config: launch.ClusterConfig) -> dict[str, object]:
        config.check()
        state.mkdir(exist_ok=True)
        launch.config_file(state).write_text(json.dumps(asdict(config)))
        return {"nodes": [], "policy": config.policy, "pid": 0, "address": ""}

    monkeypatch.setattr(launch, "start", start)
    return folder / "state"


@pytest.mark.parametrize(
    ("policy", "given"), [("antman", "bussy=1"), ("antman", "busy=3"), ("las", "limits=[3, 2]"), ("antman", "limits=[3]")]
)
def test_a_wrong_parameter_gets_the_sentence_of_simulate(folder: Path, policy: str, given: str) -> None:
    trace = Path(__file__).parents[2] / "benchmarks" / "traces" / "tiresias_60.csv"
    told = CliRunner().invoke(app, ["simulate", str(trace), "--gpus", "16", "--policy", policy, "--set", given])
    ended = run("up", "--state", folder / "state", "--policy", policy, "--set", given)
    assert ended.exit_code == told.exit_code == 2 and ended.stderr == told.stderr != ""
    assert not (folder / "state").exists()


def test_parameters_stay_with_their_policy(state: Path) -> None:
    for arguments, found in (
        (["--set", "busy=0.5", "--set", "window=1e-3"], {"busy": 0.5, "window": 0.001}),
        ([], {"busy": 0.5, "window": 0.001}),
        (["--policy", "antman", "--set", "window=2", "--set", "one_node=true"], {"busy": 0.5, "window": 2, "one_node": True}),
        (["--policy", "las"], {}),
        (["--set", "by=time", "--set", "limits=[1e-5, 20]"], {"by": "time", "limits": [1e-5, 20]}),
    ):
        ended = run("up", "--state", state, *arguments)
        config = launch.load_config(state)
        assert ended.exit_code == 0 and config is not None and config.parameters == found, ended.output
    (command,) = [line for line in run("up", "--print-unit", "--state", state).stdout.splitlines() if "ExecStart=" in line]
    again = shlex.split(command.replace(str(state), str(state.parent / "other")))
    assert run("up", *again[6:]).exit_code == 0
    assert launch.load_config(state.parent / "other") == config


def test_up_goes_on_as_it_was_until_something_else_is_said(state: Path, folder: Path) -> None:
    for arguments in (["--ray", "127.0.0.1:1", "--ray-token", "token"], []):
        assert run("up", "--state", state, *arguments).exit_code == 0
        config = launch.load_config(state)
        assert config is not None and (config.ray, config.ray_token) == ("127.0.0.1:1", str(folder / "token"))
    assert run("up", "--state", state, "--devices", "2").exit_code == 0
    config = launch.load_config(state)
    assert config is not None and (config.ray, config.ray_token, len(config.nodes)) == (None, None, 2)


def test_watch_shows_a_live_table(up: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody looks at a terminal; Ctrl-C ends it."""
    from waterflow.cli import cluster
    from waterflow.cli.output import Terminal

    monkeypatch.setattr(Terminal, "live", True)
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cluster.time, "sleep", sleep)
    ended = run("status", "--watch")
    assert ended.exit_code == 130 and len(seen) == 3 and "devices, policy" in ended.stdout


@pytest.mark.slow
def test_in_the_foreground(folder: Path) -> None:
    """It stays until the cluster is taken down."""
    state = folder / "state"
    box: list[Result] = []
    thread = threading.Thread(
        target=lambda: box.append(
            run("up", "--foreground", "--devices", "1", "--memory", "64MiB", "--lanes", "1", "--state", state)
        )
    )
    thread.start()
    until = time.monotonic() + 60
    while not address_file(state).exists() and thread.is_alive():
        assert time.monotonic() < until
        time.sleep(0.05)
    from waterflow.cluster.client import Cluster

    Cluster(state).down()
    thread.join(30)
    assert not thread.is_alive() and box[0].exit_code == 0 and "a cluster is up: 1 device(s)" in box[0].stdout


@pytest.fixture(autouse=True)
def _no_trace_in_sys_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("code.py"):
            del sys.modules[name]


def test_a_unit_that_keeps_it_up(tmp_path: Path) -> None:
    """It names this Python and the folder as they are here, and starts what was asked for."""
    folder = tmp_path / "100% mine"
    options = ["--state", str(folder), "--nodes", "a,b", "--tenant", "us=2", "--tenant", "them=1", "--memory", "1GiB"]
    done = CliRunner().invoke(app, ["cluster", "up", "--print-unit", "--listen", "127.0.0.1:8470", *options])
    assert done.exit_code == 0 and not folder.exists()
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and line[0] != "#")
    assert lines["Restart"] == "on-failure" and lines["KillMode"] == "process"
    command = shlex.split(lines["ExecStart"].replace("%%", "%"))
    assert command[:6] == [sys.executable, "-m", "waterflow", "cluster", "up", "--foreground"]
    assert command[6:] == [
        "--state", str(folder), "--nodes", "a,b", "--tenant", "us=2", "--tenant", "them=1", "--memory", "1GiB",
        "--listen", "127.0.0.1:8470",
    ]  # fmt: skip
    again = CliRunner().invoke(app, [*command[3:5], "--print-unit", *command[6:]])
    assert again.stdout == done.stdout  # the options are those that up takes
    wrong = CliRunner().invoke(app, ["cluster", "up", "--print-unit", "--state", str(folder), "--policy", "none"])
    assert wrong.exit_code != 0 and "ExecStart" not in wrong.stdout


def test_up_says_what_the_devices_train_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said reaches the devices, and stays until something else is said."""
    made: list[launch.ClusterConfig] = []

    def start(folder: Path, config: launch.ClusterConfig) -> dict[str, object]:
        config.check()
        made.append(config)
        folder.mkdir(exist_ok=True)
        launch.config_file(folder).write_text(json.dumps(asdict(config)))
        return {"nodes": [], "policy": "fifo", "pid": 1, "address": ""}

    monkeypatch.setattr(launch, "start", start)
    for options in ([], ["--device", "cuda"], []):
        assert run("up", *options, "--state", tmp_path / "devices").exit_code == 0
    assert [config.device for config in made] == ["cpu", "cuda", "cuda"]
    assert " --device cuda" in run("up", "--print-unit", "--state", tmp_path / "devices").stdout
    wrong = run("up", "--device", "tpu", "--state", tmp_path / "devices")
    assert wrong.exit_code != 0 and "device must be one of cpu, cuda; got 'tpu'" in " ".join(wrong.stderr.split())
    (folder / "there.yaml").write_text(f"device: cuda\njobs: [{{name: a, {PIECES}}}]\n")
    wrong = run("submit", "there.yaml")
    assert wrong.exit_code == 2 and "device: a cluster has the devices that it was started with" in " ".join(wrong.stderr.split())


def test_devices_that_the_machine_does_not_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from waterflow.cluster import daemon

    made: list[WorkerSettings] = []
    monkeypatch.setattr(daemon, "LocalBackend", lambda *_, settings, **__: made.append(settings))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for count, there, said in ((1, 0, "cannot be used: this torch"), (3, 2, "3 devices of 2 GPU")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        config = launch.ClusterConfig(tuple(f"device-{n}" for n in range(count)), device="cuda")
        with pytest.raises(ClusterError, match=said):
            daemon.make_backend(config, tmp_path)
        daemon.make_backend(replace(config, device="cpu"), tmp_path)
    daemon.make_backend(replace(config, nodes=("a", "b")), tmp_path)
    assert [settings.device for settings in made] == ["cpu", "cpu", "cuda"]


def node(alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "Resources": resources}


def test_a_ray_cluster_reserves_what_is_trained_on() -> None:
    nodes = [node(), node(CPU=8.0, GPU=2.0), node(CPU=4.0), node(CPU=2.0, GPU=1.0, alive=False)]
    gpu = RayShare(WorkerSettings("cuda", lanes=2))
    assert gpu.room(nodes) == 2 and gpu.reserved() == {"num_gpus": 1, "num_cpus": 0}
    assert gpu.settings(2) == WorkerSettings("cuda", lanes=2)
    assert RayShare(WorkerSettings("cuda")).room(nodes[2:]) == 0

    lanes = RayShare(WorkerSettings(lanes=3, threads_per_lane=1, memory="1GiB"))
    assert lanes.room(nodes) == 3 and lanes.reserved() == {"num_gpus": 0, "num_cpus": 3}
    assert lanes.settings(3) == WorkerSettings(lanes=3, memory="1GiB")

    whole = RayShare(WorkerSettings())  # the smallest node has four
    assert whole.room(nodes) == 3 and whole.reserved() == {"num_gpus": 0, "num_cpus": 4}
    assert whole.settings(3).lanes == 4 and whole.settings(4).memory == whole.settings(2).memory / 2  # type: ignore[operator]
    assert whole.room([*nodes, node(CPU=2.0)]) == 3  # as it was when the first device began

    pinned = RayShare(WorkerSettings(), [(0, 1), (2, 3)])
    assert pinned.room(nodes) == 6 and pinned.reserved()["num_cpus"] == 2 and pinned.settings(6).lanes is None
    for share, said in ((RayShare(WorkerSettings("cuda")), "has no GPU"), (RayShare(WorkerSettings(lanes=9)), "has 9 CPU")):
        assert share.room(nodes[2:3]) == 0 and said in share.nothing()
