"""What is of Ray alone: whole nodes, tokens, actors that outlive their backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.cluster.test_cli_cluster import USER_CODE
from waterflow.cluster.ray import RayBackend
from waterflow.errors import BackendError

OUTLIVE = """
import sys
import torch
from benchmarks.loopback import LoopbackCluster
from tests.cluster.jobs import equal, jobs
from tests.cluster.watched import Watched
import waterflow as wf
from waterflow.cluster import RayBackend, WorkerSettings, pack

torch.set_num_threads(1)
settings = WorkerSettings(memory="256MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)

with LoopbackCluster([1, 1]) as made:
    open_ = lambda: RayBackend(made.address, sys.argv[1], devices=2, settings=settings, outlive=60, token=made.token)
    first = open_()
    payload = pack(jobs(batches=300, epochs=1, seconds=0.02))
    there = Watched(first)
    there.start("a", payload, "device-0")
    there.until("a", lambda part: part.saved is not None)
    process = first.process("device-0")
    first.detach()
    with open_() as second:
        runs, there = there.runs, Watched(second)
        there.runs = runs
        steps = there.until("a", lambda part: part.phase == "training").steps
        assert second.process("device-0") == process and steps > 0
        epoch = there.epoch("device-0")
        made.kill(made.number_of(process))  # the whole node
        there.lost("device-0", epoch, seconds=3)
        there.start("a", payload, "device-1")
        assert there.end("a", seconds=30).how == "completed"
        equal(there.results("a"), wf.train(jobs(batches=300, epochs=1), lanes=1))
        made.add()
        there.alive(seconds=60)
        assert there.epoch("device-0") > epoch
print("good")
"""


@pytest.mark.slow
def test_actors_outlive_a_backend_and_a_node_can_be_lost(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVE, str(tmp_path)], capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("good\n"), done.stdout + done.stderr


def test_beyond_this_machine_only_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BackendError, match="a token is needed"):
        RayBackend("10.1.2.3:6379", tmp_path)
    with pytest.raises(BackendError, match="there is no token"):
        RayBackend("127.0.0.1:6379", tmp_path, token=tmp_path / "none")


WRONG_TOKEN = """
import sys
from benchmarks.loopback import LoopbackCluster
from waterflow import BackendError
from waterflow.cluster import RayBackend

with open(sys.argv[1] + "/token", "w") as file:
    file.write("b" * 64)
with LoopbackCluster([1]) as made:
    try:
        RayBackend(made.address, sys.argv[1] + "/folder", token=sys.argv[1] + "/token")
    except BackendError as error:
        assert "token is another one" in str(error), error
        print("refused")
"""


@pytest.mark.slow
def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRONG_TOKEN, str(tmp_path)], capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("refused\n"), done.stdout + done.stderr


WHOLE_WAY = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.loopback import LoopbackCluster

folder = Path(sys.argv[1])

def run(*arguments, code=0):
    command = [sys.executable, "-m", "waterflow", "cluster", *map(str, arguments), "--state", str(folder / "state")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done.stdout + done.stderr

def status():
    told = json.loads(run("status", "--json"))
    return told["nodes"], {job["id"]: job for job in told["jobs"]}

with LoopbackCluster([2]) as ray:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        up = json.loads(run(
            "up", "--ray", ray.address, "--ray-token", ray.token, "--memory", "128MiB", "--lanes", "1",
            "--checkpoint-seconds", "0.2", "--json",
        ))
        assert up["nodes"] == ["device-0", "device-1"], up
        assert run("submit", "code.py:longer", "--id", "long") == "long\\n"
        assert "completed" in run("submit", "code.py:job", "--id", "short", "--wait")
        until = time.monotonic() + 30
        while not status()[1]["long"]["steps"]:
            assert time.monotonic() < until
        processes = {node["epoch"] for node in status()[0]}
        os.kill(up["pid"], signal.SIGKILL)
        again = json.loads(run("up", "--json"))  # with the settings that it had
        assert again["pid"] != up["pid"] and again["nodes"] == up["nodes"]
        nodes, jobs = status()
        assert {node["epoch"] for node in nodes} == processes, "the devices went on"
        assert (jobs["long"]["state"], jobs["long"]["attempts"], jobs["short"]["steps"]) == ("running", 1, 4), jobs
        assert '"steps": 4' in run("result", "short", "--json")
        assert "starts at device-" in run("logs", "short")
        assert run("cancel", "long") == "long is cancelled\\n"
        assert "cancelled" in run("result", "long", code=1)
        run("down")
        assert "no cluster is up" in run("status", code=1)
    finally:
        for path in (folder / "state").glob("endpoint.json"):
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
print("good")
"""


LONGER = """
def longer(): return wf.Job("longer", model, lambda: data(3000, 0.1), lambda p: torch.optim.SGD(p, lr=0.1),
                            loss=nn.functional.cross_entropy)
"""


@pytest.mark.slow
def test_the_whole_way_through_the_service(tmp_path: Path) -> None:
    """``up --ray`` on a cluster with a token: jobs, the scheduler's death, and down."""
    (tmp_path / "code.py").write_text(USER_CODE + LONGER)
    done = subprocess.run([sys.executable, "-c", WHOLE_WAY, str(tmp_path)], capture_output=True, text=True, timeout=170)
    assert done.stdout.endswith("good\n"), done.stdout + done.stderr
