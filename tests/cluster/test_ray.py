"""What is of Ray alone: whole nodes, tokens, actors that outlive their backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from waterflow.cluster.backend import BackendError
from waterflow.cluster.ray import RayBackend

OUTLIVE = """
import sys, time
from pathlib import Path
import torch
from tests.cluster.jobs import equal, jobs
import waterflow as wf
from waterflow.cluster import Checkpointed, Ended, LoopbackCluster, NodeLost, NodeJoined, RayBackend, WorkerSettings
from waterflow.cluster import load_results, pack

torch.set_num_threads(1)
settings = WorkerSettings(memory="256MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)

def until(backend, *kinds, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in backend.poll(0.1):
            if isinstance(event, kinds):
                return event
    raise SystemExit(f"no {kinds}")

with LoopbackCluster([1, 1]) as made:
    open_ = lambda: RayBackend(made.address, sys.argv[1], devices=2, settings=settings, outlive=60, token=made.token)
    first = open_()
    payload = pack(jobs(batches=300, epochs=1, seconds=0.02))
    first.start("a", payload, [("device-0", 0)])
    until(first, Checkpointed)
    process = first.process("device-0")
    first.detach()
    with open_() as second:
        assert second.process("device-0") == process and second.running() == ["a"]
        made.kill(made.number_of(process))  # the whole node
        lost = until(second, NodeLost, seconds=3)
        assert lost.node == "device-0"
        second.start("a", payload, [("device-1", 0)], checkpoint=second.checkpoints("a"))
        while (ended := until(second, Ended)).how == "lost":
            pass
        assert ended.how == "completed", ended
        equal(load_results(ended.results), wf.train(jobs(batches=300, epochs=1), lanes=1))
        made.add()
        assert until(second, NodeJoined, seconds=60).epoch > lost.epoch
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
from waterflow.cluster import BackendError, LoopbackCluster, RayBackend

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
    done = subprocess.run(
        [sys.executable, "-c", WRONG_TOKEN, str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    assert done.stdout.endswith("refused\n"), done.stdout + done.stderr
