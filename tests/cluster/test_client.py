"""Through the client's door: jobs in, results out, refusals with their reasons, and processes killed in the middle."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import waterflow as wf
from tests.cluster.conftest import LiveCluster
from tests.cluster.live_jobs import failing, job, same_bits, undisturbed
from tests.executor.test_quotas import batches, between, job as quota_job
from waterflow.cluster.endpoint import EndpointError, check_address, make_token, read_token
from waterflow.cluster.state import address_file, token_file
from waterflow.errors import ClusterError, InvalidJobError, JobCancelled, SubmissionError

pytestmark = pytest.mark.needs_time("a cluster of processes, whose jobs last long enough to be looked at")

PATIENCE = 60.0


@pytest.fixture
def client(shared_cluster: LiveCluster) -> wf.Cluster:
    return shared_cluster.client


def wait_until(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)
    return found


def test_jobs_in_and_results_out(client: wf.Cluster) -> None:
    id = client.submit([job("a"), job("b", seed=1)])
    results = client.result(id, timeout=PATIENCE)
    assert [result.name for result in results] == ["a", "b"]
    same_bits(results[0], undisturbed(job("a")))
    same_bits(results[1], undisturbed(job("b", seed=1)))
    told = client.status(id)
    assert told["state"] == "completed" and told["attempts"] == 1
    day, moment, words = list(client.logs(id))[-1].split(" ", 2)
    assert words == "completed" and time.time() - time.mktime(time.strptime(day + moment, "%Y-%m-%d%H:%M:%S")) < PATIENCE
    with pytest.raises(SubmissionError, match="no job is called 'nothing'"):
        client.status("nothing")


def test_a_function_makes_jobs_where_they_run(client: wf.Cluster) -> None:
    seed = 5
    id = client.submit(lambda: job(f"process {os.getpid()}", seed=seed))
    (result,) = client.result(id, timeout=PATIENCE)
    assert result.name.startswith("process ") and result.name != f"process {os.getpid()}"


def test_handed_in_twice_it_runs_once(client: wf.Cluster) -> None:
    made = job("twice")
    ids = [client.submit(made, id="twice") for _ in range(3)]
    assert ids == ["twice"] * 3 and len(client.result("twice", timeout=PATIENCE)) == 1
    assert client.submit(made, id="twice") == "twice" and client.status("twice")["attempts"] == 1
    with pytest.raises(InvalidJobError, match="job 'twice' is known already, and differs in its payload"):
        client.submit(job("other"), id="twice")


@pytest.mark.slow
def test_many_at_a_time(client: wf.Cluster) -> None:
    """Threads of one client, all at once."""
    made: list[str] = []
    threads = [threading.Thread(target=lambda n=n: made.append(client.submit(job(f"job {n}")))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(set(made)) == 8
    for id in made:
        assert client.result(id, timeout=PATIENCE)[0].status == "completed"


@pytest.mark.slow
def test_short_opportunistic_jobs_do_not_wait_for_an_idle_device(client: wf.Cluster) -> None:
    """Two devices; each takes the next one when it has ended the last. With ten seconds for each it would be minutes."""
    began = time.monotonic()
    ids = [client.submit(job(f"short {n}", steps=2), priority="opportunistic") for n in range(40)]
    while ids:
        ended = client.wait(ids, timeout=PATIENCE)
        assert ended and {client.status(id)["state"] for id in ended} == {"completed"}
        ids = [id for id in ids if id not in ended]
    assert time.monotonic() - began < 40.0


def test_a_job_that_fails_says_why(client: wf.Cluster) -> None:
    id = client.submit(failing)
    with pytest.raises(ClusterError, match="failed: RuntimeError: no data today"):
        client.result(id, timeout=PATIENCE)
    bad = job("bad")
    bad.loss = lambda output, target: output.no_such_attribute
    with pytest.raises(AttributeError, match="no_such_attribute"):
        client.result(client.submit(bad), timeout=PATIENCE)


def gated(folder: Path, gates: tuple[int, ...]) -> wf.Job:
    """A job with activations that stands still before some of its batches, each until a file of that number is there."""

    def data() -> Iterator[Any]:
        for number, batch in enumerate(batches("mlp", 24)):
            while number in gates and not (folder / str(number)).exists():
                time.sleep(0.02)
            yield batch

    return quota_job(data=data, epochs=1)


@pytest.mark.slow
def test_quota_and_priority_of_a_job_that_runs(client: wf.Cluster, tmp_path: Path) -> None:
    """Lowered to a reduced form of its step, raised again, and made guaranteed, with the bits that it has alone."""
    made = gated(tmp_path, (6, 12, 18))
    id, low = client.submit(made, priority="opportunistic"), between("mlp", 0.2)

    def memory_at(gate: int) -> int:
        wait_until(lambda: client.status(id)["steps"] >= gate - 2)
        return int(client.status(id)["memory"])

    whole = memory_at(6)
    assert whole > low
    told = client.set(id, quota=low)
    assert (told["quota"], told["priority"]) == (low, "opportunistic")
    (tmp_path / "6").touch()
    wait_until(lambda: memory_at(12) <= low)
    told = client.set(id, quota="50%", priority="guaranteed")
    assert (told["quota"], told["priority"]) == (128 << 20, "guaranteed")
    (tmp_path / "12").touch()
    wait_until(lambda: memory_at(18) == whole)
    assert client.set(id, priority="opportunistic")["priority"] == "opportunistic"
    (tmp_path / "18").touch()
    same_bits(client.result(id, timeout=PATIENCE)[0], undisturbed(made))
    assert client.status(id)["attempts"] == 1
    with pytest.raises(SubmissionError, match="has ended, or is about to"):
        client.set(id, quota=low)


def test_cancel(client: wf.Cluster) -> None:
    id = client.submit(job("long", seconds=30.0))
    wait_until(lambda: client.status(id)["state"] == "running")
    with pytest.raises(TimeoutError, match="has not ended after 0.05 s; it is running"):
        client.result(id, timeout=0.05)
    assert client.cancel(id)
    with pytest.raises(JobCancelled):
        client.result(id, timeout=PATIENCE)
    assert not client.cancel(id)


@pytest.mark.slow
def test_sets_that_fit_together(client: wf.Cluster) -> None:
    """The planner's sets: each device has 256 MiB, of which a part is the reserve."""
    jobs = [job(f"wide {n}", steps=2, width=750_000, seed=n) for n in range(4)]  # two of them fit
    ids = client.submit_apart(jobs)
    assert len(ids) == 2
    names = sorted(result.name for id in ids for result in client.result(id, timeout=PATIENCE))
    assert names == [f"wide {n}" for n in range(4)]
    with pytest.raises(
        wf.MemoryLimitError, match="job 'too wide' does not fit: .* the limit of 256.0 MiB leaves .*Make the model smaller"
    ):
        client.submit_apart([job("too wide", steps=1, width=9_000_000)])


def test_metrics(client: wf.Cluster) -> None:
    id = client.submit(job("measured", seconds=2.0))
    wait_until(lambda: (client.status(id)["step_seconds"] or 0) > 0)
    told = client.metrics()
    (line,) = [line for line in told.splitlines() if line.startswith("waterflow_job_rate{") and id in line]
    assert 0.5 < float(line.split()[-1]) < 40  # steps each second: 20 at most, for the data takes so long
    assert 'waterflow_node_up{node="one"} 1.0' in told
    client.cancel(id)


# -- refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"devices": 2}, "devices must be 1, as a job runs on one device; got 2. Submit several jobs each by itself, or"),
        ({"tenant": "nobody"}, r"unknown tenant 'nobody'; there are \['default', 'small'\]"),
        ({"memory": "1GiB"}, "needs 1,073,741,824 bytes on each device; the largest has 268,435,456"),
        ({"priority": "high"}, "priority 'high' is neither guaranteed nor opportunistic"),
        ({"id": "../x"}, "a job's id is 1 to 100 letters"),
    ],
)
def test_what_can_never_run_is_refused(client: wf.Cluster, asked: dict[str, Any], said: str) -> None:
    before = len(client.status()["jobs"])
    with pytest.raises(SubmissionError, match=said):
        client.submit(job(), **asked)
    assert len(client.status()["jobs"]) == before


def test_what_cannot_be_pickled_is_refused(client: wf.Cluster) -> None:
    made = job("locked")
    lock = threading.Lock()
    made.evaluate = lambda model: float(lock.locked())
    with pytest.raises(InvalidJobError, match=r"job 'locked': evaluate cannot be sent to another process: .*variable 'lock'"):
        client.submit(made)


def test_a_damaged_checkpoint_is_refused(client: wf.Cluster, tmp_path: Path) -> None:
    good = tmp_path / "good"
    saved = _stopped(job("saved", seconds=1.0, steps=200))
    saved.save(good)
    assert 0 < saved.steps < 200
    id = client.submit(job("saved", steps=200), checkpoint=good)
    same_bits(client.result(id, timeout=PATIENCE)[0], undisturbed(job("saved", steps=200)))
    damaged = tmp_path / "damaged"
    content = bytearray(good.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(wf.CheckpointError, match="damaged: its checksum is not the one"):
        client.submit(job("saved"), checkpoint=damaged)
    with pytest.raises(wf.CheckpointError, match="is of job 'saved', not of 'other'"):
        client.submit(job("other"), checkpoint=good)
    with pytest.raises(InvalidJobError, match="there is no checkpoint"):
        client.submit(job("saved"), checkpoint=tmp_path / "nothing")


def _stopped(made: wf.Job) -> wf.Checkpoint:
    from waterflow.training.runner import JobRunner

    with wf.Engine(lanes=1) as engine:
        runner = JobRunner(made, engine)
        thread = threading.Thread(target=runner.run)
        thread.start()
        wait_until(lambda: runner.step is not None and runner.step.steps > 3)
        found = runner.suspend()
        runner.stop()
        thread.join(PATIENCE)
    return found


# -- the door


def ask(cluster: LiveCluster, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    url = urllib.parse.urlsplit(json.loads(address_file(cluster.folder).read_text())["address"])
    assert url.hostname == "127.0.0.1"
    with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port, timeout=10)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_nobody_enters_without_the_token(shared_cluster: LiveCluster) -> None:
    token = token_file(shared_cluster.folder).read_text()
    assert token_file(shared_cluster.folder).stat().st_mode & 0o777 == 0o600
    assert shared_cluster.folder.stat().st_mode & 0o777 == 0o700
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer " + token[:-1]}, {"Authorization": "é"}):
        for method, path in (("GET", "/status"), ("POST", "/jobs"), ("POST", "/down"), ("GET", "/metrics"), ("GET", "/x")):
            status, told = ask(shared_cluster, method, path, **given)
            assert status == 401 and "the token is missing or wrong" in told["error"]
    assert ask(shared_cluster, "GET", "/status", Authorization="Bearer " + token)[0] == 200


def test_what_makes_no_sense_is_refused(shared_cluster: LiveCluster) -> None:
    entered = {"Authorization": "Bearer " + token_file(shared_cluster.folder).read_text()}
    for method, path, headers, status, said in [
        ("GET", "/nothing", {}, 404, "there is nothing at /nothing"),
        ("POST", "/jobs", {}, 400, "a submission is JSON in the header X-Submission"),
        ("POST", "/jobs", {"X-Submission": "[]"}, 400, "a submission is JSON"),
        ("POST", "/jobs", {"X-Submission": '{"id": "z", "colour": 1}'}, 400, "a submission has no 'colour'"),
        ("POST", "/jobs", {"X-Submission": '{"id": "z"}', "Content-Length": str(1 << 40)}, 413, "at most 900.0 MiB are taken"),
        ("POST", "/jobs", {"X-Submission": '{"id": "' + "z" * 60_000 + '"}'}, 400, "a job's id is 1 to 100"),
        ("POST", "/jobs/none/set", {}, 400, "the body must be quota, priority or both, by name, as JSON"),
        ("GET", "/wait?ids=none&seconds=1", {}, 400, "no job is called 'none'"),
        ("GET", "/wait?seconds=1e9", {}, 400, "seconds must be a number from 0 to 30"),
        ("GET", "/jobs/none/results", {}, 400, "no job is called 'none'"),
    ]:
        found, told = ask(shared_cluster, method, path, **entered, **headers)
        assert (found, said in told["error"]) == (status, True), (path, headers, found, told)


def test_nothing_listens_beyond_loopback_unless_told(tmp_path: Path) -> None:
    check_address("127.0.0.1", False)
    check_address("localhost", False)
    with pytest.raises(EndpointError, match="can be reached from other machines.*--listen-beyond-loopback"):
        check_address("0.0.0.0", False)
    check_address("0.0.0.0", True)
    with pytest.raises(EndpointError, match="cannot listen on 'no.such.host.invalid'"):
        check_address("no.such.host.invalid", False)
    token = make_token(tmp_path / "token")
    assert len(token) >= 32 and make_token(tmp_path / "token") == token
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(EndpointError, match=r"may be read by others \(mode 644\).*Remove it"):
        read_token(tmp_path / "token")


def test_an_address_needs_a_token(shared_cluster: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address = json.loads(address_file(shared_cluster.folder).read_text())["address"]
    with pytest.raises(ClusterError, match="asks for a token: pass token=, or set WATERFLOW_CLUSTER_TOKEN"):
        wf.Cluster(address)
    monkeypatch.setenv("WATERFLOW_CLUSTER_TOKEN", token_file(shared_cluster.folder).read_text())
    assert wf.Cluster(address).status()["nodes"]
    with pytest.raises(ClusterError, match="the token is missing or wrong"):
        wf.Cluster(address, token="x" * 40).status()


def test_no_cluster_is_up(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no cluster is up in .*; start one: waterflow cluster up --state "):
        wf.Cluster(tmp_path).status()
    with pytest.raises(ClusterError, match="no cluster answers at http://127.0.0.1:9"):
        wf.Cluster("http://127.0.0.1:9", token="x").status()


# -- killed in the middle


@pytest.mark.slow
def test_the_scheduler_is_killed(clusters: Callable[..., LiveCluster], tmp_path: Path) -> None:
    """It is back with all its state, and what runs is untouched."""
    cluster = clusters()
    client = cluster.client
    gate = tmp_path / "gate"
    running = {f"running-{n}": job(f"running {n}", seed=n, gate=gate) for n in range(2)}
    waiting = {f"waiting-{n}": job(f"waiting {n}", seed=10 + n) for n in range(3)}
    alone = {f"running-{n}": undisturbed(job(f"running {n}", seed=n)) for n in range(2)}
    alone |= {id: undisturbed(made) for id, made in waiting.items()}
    for id, made in (running | waiting).items():
        client.submit(made, id=id)
    wait_until(lambda: all(client.status(id)["steps"] > 0 for id in running))
    before = client.status()
    workers = cluster.workers()
    cluster.kill_scheduler()
    with pytest.raises(ClusterError, match="no cluster is up"):
        client.status()
    cluster.up()
    after = client.status()
    assert cluster.workers() == workers
    kept = ("id", "tenant", "priority", "submitted", "started", "attempts", "places")
    assert [{key: job[key] for key in kept} for job in after["jobs"]] == [
        {key: job[key] for key in kept} for job in before["jobs"]
    ]
    assert client.submit(waiting["waiting-0"], id="waiting-0") == "waiting-0"
    gate.touch()
    for id, result in alone.items():
        same_bits(client.result(id, timeout=PATIENCE)[0], result)
        assert client.status(id)["attempts"] == 1
    cluster.end()


@pytest.mark.slow
def test_a_node_is_killed(clusters: Callable[..., LiveCluster], tmp_path: Path) -> None:
    """Noticed in 2 s, its job goes on elsewhere in 10 s from its checkpoint, and ends with the same bits."""
    cluster = clusters()
    client = cluster.client
    gate = tmp_path / "gate"
    client.submit(job("moved", steps=60, seconds=2.0, gate=gate), id="moved")  # a checkpoint comes before the gate
    client.submit(job("other"), id="other")
    wait_until(lambda: client.status("moved")["steps"] > 10 and any("checkpoint" in line for line in client.logs("moved")))
    ((node, _),) = client.status("moved")["places"]
    os.killpg(cluster.workers()[node], signal.SIGKILL)
    killed = time.time()
    again = wait_until(lambda: (told := client.status("moved"))["attempts"] == 2 and told)
    noticed = time.time() - killed
    assert again["places"][0][0] != node
    wait_until(lambda: client.status("moved")["state"] == "running")
    going = time.time() - killed
    gate.touch()
    assert noticed < 2.0 and going < 10.0
    same_bits(client.result("moved", timeout=PATIENCE)[0], undisturbed(job("moved", steps=60)))
    lines = [line.split(" ", 2)[2] for line in client.logs("moved")]
    assert sum(line.startswith("starts at") for line in lines) == 2 and lines.count("completed") == 1
    assert any(line.startswith("lost: node ") for line in lines)
    wait_until(lambda: all(node["alive"] for node in client.status()["nodes"]))
    for id in [client.submit(job(f"after {n}", seconds=1.0)) for n in range(2)]:  # one on each device
        client.result(id, timeout=PATIENCE)
    cluster.end()
