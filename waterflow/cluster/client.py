"""``Cluster``: submit jobs to a running cluster, follow them, and fetch their results."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pickle
import time
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waterflow.cluster.state import address_file, state_folder, token_file
from waterflow.cluster.submission import Priority
from waterflow.errors import ClusterError, InvalidJobError, JobCancelled, SubmissionError, explained
from waterflow.executor.memory_limit import parse_memory
from waterflow.units import parse_seconds

if TYPE_CHECKING:  # these need torch, which most requests do not
    from waterflow.cluster.hand_in import JobSet
    from waterflow.cluster.payload import Jobs
    from waterflow.job import Job, JobResult, Results

_REQUEST_SECONDS = 60.0
_WAIT_SECONDS = 20.0  # for which one request waits for the end of a job
_AGAIN_SECONDS = 0.2
_KINDS: dict[str, type[Exception]] = {"SubmissionError": SubmissionError, "InvalidJobError": InvalidJobError}


class Cluster:
    """A running cluster. Thread-safe; it keeps no connection open.

    Args:
        where: The state folder of a cluster on this machine (default: ``$WATERFLOW_CLUSTER``, or the usual folder), or the
            address of a cluster, as ``http://host:port``.
        token: For an address; default: ``$WATERFLOW_CLUSTER_TOKEN``. A state folder contains its token.
        patience: Seconds for which a request is repeated while the cluster cannot be reached, as it may be restarting.
            Waiting for results is patient for a minute at least.
        tenant, priority: Defaults for ``submit``.

    Each method raises ClusterError if the cluster cannot be reached.
    """

    @explained("Cluster", 'Cluster(tenant="vision")', ClusterError)
    def __init__(
        self,
        where: str | Path | None = None,
        token: str | None = None,
        patience: float = 0.0,
        *,
        tenant: str = "default",
        priority: Priority = "guaranteed",
    ) -> None:
        self.tenant, self.priority = tenant, priority
        self._address: str | None = None
        self._folder: Path | None = None
        self._token = token
        self._patience = patience
        if isinstance(where, str) and where.startswith(("http://", "https://")):
            self._address = where
            self._token = token or os.environ.get("WATERFLOW_CLUSTER_TOKEN")
            if not self._token:
                raise ClusterError(
                    f"the cluster at {where} asks for a token: pass token=, or set WATERFLOW_CLUSTER_TOKEN; it is in the file "
                    "token of the cluster's state folder"
                )
        else:
            self._folder = state_folder(where)

    @explained("submit", "cluster.submit([job_a, job_b])", InvalidJobError)
    def submit(
        self,
        jobs: Jobs | Callable[[], Jobs],
        *,
        id: str | None = None,
        tenant: str | None = None,
        priority: Priority | None = None,
        devices: int = 1,
        auto: bool = True,
        memory: int | str = 0,
        model: str | None = None,
        duration: float | None = None,
        checkpoint: str | Path | None = None,
        time_limit: float | str | None = None,
    ) -> str:
        """Submit a job, several that train together, or a function that makes them where they run; return the id.

        Args:
            jobs: Jobs to train; they are pickled (lambdas, too). Functions and classes of modules in the current folder are
                sent with them; others must be installed where they run.
            id: One id is one job: submitted twice, it runs once. Default: a new id.
            tenant, priority, devices, auto, model, duration: As in ``Submission``. ``devices`` must be 1: a job of a cluster
                runs on one device.
            memory: Memory needed, in bytes or as ``"2GiB"``; 0: not known; ``"auto"``: the plan of the jobs,
                each of which is captured here first.
            checkpoint: A file of ``Checkpoint.save`` from which a single job resumes.
            time_limit: Seconds, or text like ``"2h"``, of running, all runs together, after which the job is ended as
                failed.

        Raises:
            CheckpointError: The checkpoint is damaged, of another version, or of another job.
            InvalidJobError: The jobs cannot be pickled, or the id belongs to another job.
            SubmissionError: The cluster can never run it: an unknown tenant, or more devices or memory than there are.
        """
        from waterflow.cluster import hand_in

        # It is read several times below.
        if isinstance(jobs, Iterator):
            jobs = list(jobs)
        payload = hand_in.packed(jobs)
        if checkpoint is not None:
            hand_in.check_checkpoint(Path(checkpoint), jobs)
        if memory == "auto":
            memory = hand_in.planned_memory(jobs)
        asked = {
            "id": id if id is not None else hand_in.new_id(jobs),
            "tenant": tenant or self.tenant,
            "priority": priority or self.priority,
            "devices": devices,
            "auto": auto,
            "memory": memory if memory == 0 else parse_memory(memory),
            "model": model,
            "duration": duration,
            "time_limit": None if time_limit is None else parse_seconds(time_limit, "time_limit"),
            "checkpoint": None if checkpoint is None else str(Path(checkpoint).resolve()),
        }
        return str(self._json("POST", "/jobs", payload, {"X-Submission": json.dumps(asked)})["id"])

    def check(self, jobs: Jobs | Callable[[], Jobs]) -> None:
        """Raise InvalidJobError if ``jobs`` cannot be pickled, as ``submit`` does."""
        from waterflow.cluster import hand_in

        hand_in.packed(jobs)

    def submit_apart(self, jobs: Sequence[Job], **asked: Any) -> list[str]:
        """Submit each of ``sets_of(jobs)``; return its id. ``asked`` is as in ``submit``, without ``id`` and ``memory``."""
        return [self.submit(list(found.jobs), memory=found.memory, **asked) for found in self.sets_of(jobs)]

    def sets_of(self, jobs: Sequence[Job]) -> list[JobSet]:
        """Return jobs in sets that, by the planner, fit on one device together.

        Builds each model and reads one of its batches, in this process. Raises MemoryLimitError for a job that fits on no
        device alone.
        """
        from waterflow.cluster.hand_in import sets_that_fit

        # The smallest device decides: the scheduler may place a set on any of them.
        most = min((node["memory"] for node in self.status()["nodes"] if node["memory"]), default=0)
        if not most:
            raise ClusterError("no device of the cluster reports its memory; submit the jobs one by one")
        return sets_that_fit(jobs, most)

    def status(self, id: str | None = None, *, ended: int | None = None, waiting: int | None = None) -> dict[str, Any]:
        """Return the cluster's nodes, tenants and jobs, or one job. Memory is bytes, times are seconds since 1970.

        ``ended`` limits the ended jobs to the last so many; ``jobs_not_shown`` counts the others. ``waiting`` limits the
        waiting jobs to the first so many; ``waiting_not_shown`` counts the others.
        """
        pages = {"ended": ended, "waiting": waiting}
        query = urllib.parse.urlencode({key: value for key, value in pages.items() if value is not None})
        made: dict[str, Any] = self._json("GET", f"/status?{query}" if id is None else _of(id))
        return made

    def wait(self, id: str | Iterable[str], timeout: float | None = None) -> list[str]:
        """Wait until at least one of the jobs has ended; return all that have. Empty after ``timeout`` seconds."""
        ids = [id] if isinstance(id, str) else list(id)
        if not ids:
            return []
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT_SECONDS if until is None else max(0.0, until - time.monotonic())
            path = f"/wait?seconds={min(_WAIT_SECONDS, left):.3f}"
            ended: list[str] = self._json("POST", path, json.dumps(ids).encode(), patience=60.0)["ended"]
            if ended or (until is not None and time.monotonic() >= until):
                return ended

    def result(self, id: str, timeout: float | None = None) -> Results:
        """Wait for the end of a job, and return its results, in the order of the jobs submitted.

        Raises the error that made it fail, JobCancelled if it was cancelled, TimeoutError after ``timeout`` seconds.
        """
        if not self.wait(id, timeout):
            raise TimeoutError(f"job {id!r} has not ended after {timeout} s; it is {self.status(id)['state']}")
        told = self.status(id)
        if told["state"] == "cancelled":
            raise JobCancelled(f"job {id!r} was cancelled")
        results = self.results(id)
        if told["state"] == "failed":
            for result in results:
                if result.error is not None:
                    raise result.error
            raise ClusterError(f"job {id!r} failed: {told['reason']}")
        return results

    def results(self, id: str) -> Results:
        """Return the results that an ended job left, however it ended."""
        from waterflow.job import Results

        # Unpickled here, by the user's process; the cluster's process never unpickles.
        with zipfile.ZipFile(io.BytesIO(self._ask("GET", _of(id) + "/results"))) as archive:
            found: list[JobResult] = [pickle.loads(archive.read(name)) for name in archive.namelist()]
        return Results(found)

    def cancel(self, id: str) -> bool:
        """End a job; return False if it had ended already."""
        return bool(self._json("POST", _of(id) + "/cancel")["cancelled"])

    @explained("set", 'cluster.set(id, quota="2GiB")', SubmissionError)
    def set(self, id: str, quota: int | float | str | None = None, priority: Priority | None = None) -> dict[str, Any]:
        """Change a job that waits or runs, from its next step on; return its status.

        Args:
            id: The job's id.
            quota: Memory of each of the jobs handed in with it, as ``Job(quota=)``; a share is of its device.
            priority: As in ``submit``. What runs stays where it is.

        Raises:
            InvalidJobError: ``quota`` is no memory or more than the device has, or ``priority`` is none.
            SubmissionError: The job is unknown or has ended, neither is given, the policy knows no priorities, or a guaranteed
                job finds no quota of its tenant, or another guaranteed job on its device.
        """
        told: dict[str, Any] = self._json("POST", _of(id) + "/set", json.dumps({"quota": quota, "priority": priority}).encode())
        return told

    def logs(self, id: str, follow: bool = False) -> Iterator[str]:
        """Yield the lines of a job's log, with times; with ``follow`` until the job has ended."""
        after = 0
        while True:
            told = self._json("GET", f"{_of(id)}/log?after={after}", patience=60.0 if follow else None)
            for line in told["lines"]:
                after = line["number"]
                yield f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(line['at']))} {line['line']}"
            if not follow or told["state"] in ("completed", "failed", "cancelled"):
                return
            time.sleep(_AGAIN_SECONDS)

    def metrics(self) -> str:
        """Return the cluster's metrics in Prometheus' text format."""
        return self._ask("GET", "/metrics").decode()

    def down(self) -> int:
        """End the cluster: jobs that run are suspended, and resume when it is up again. Return its process id."""
        return int(self._json("POST", "/down")["pid"])

    # -- requests

    def _json(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, patience: float | None = None
    ) -> Any:
        return json.loads(self._ask(method, path, body, headers, patience))

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, patience: float | None = None
    ) -> bytes:
        until = time.monotonic() + max(self._patience, patience or 0.0)
        while True:
            status = 0
            try:
                status, content = self._ask_once(method, path, body, headers or {})
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= until:
                    raise self._nobody(error) from error
            if status == 200:
                return content
            # 503 means busy or closing: the same request may succeed once the cluster is up again.
            if status and (status != 503 or time.monotonic() >= until):
                raise _refusal(status, content)
            time.sleep(_AGAIN_SECONDS)

    def _ask_once(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        address, token = self._door()
        url = urllib.parse.urlsplit(address)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        assert url.hostname is not None
        connection = kind(url.hostname, url.port, timeout=_REQUEST_SECONDS)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError):  # the server refused it unread, and its answer says why
                connection.request(method, path, body, {"Authorization": f"Bearer {token}", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _door(self) -> tuple[str, str]:
        if self._folder is None:
            assert self._address is not None and self._token is not None
            return self._address, self._token
        told = json.loads(address_file(self._folder).read_text())  # read each time: a restart may change it
        return told["address"], self._token or token_file(self._folder).read_text().strip()

    def _nobody(self, error: Exception) -> ClusterError:
        if self._folder is None:
            return ClusterError(f"no cluster answers at {self._address}: {error}")
        remedy = "start one: waterflow cluster up"
        if self._folder != state_folder(None):
            remedy += f" --state {self._folder}"
        return ClusterError(f"no cluster is up in {self._folder}; {remedy}")


def _of(id: str) -> str:
    return "/jobs/" + urllib.parse.quote(id, safe="")


def _refusal(status: int, content: bytes) -> Exception:
    try:
        told = json.loads(content)
        return _KINDS.get(told["kind"], ClusterError)(told["error"])
    except (ValueError, KeyError, TypeError):
        return ClusterError(f"the answer of the cluster cannot be read (status {status}): {content[:200]!r}")
