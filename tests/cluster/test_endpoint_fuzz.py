"""Requests with the token that make no sense: each is refused with its reason, and the cluster goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_service import Cluster
from tests.cluster.test_store import check
from waterflow.cluster.endpoint import Endpoint

pytestmark = pytest.mark.slow

TOKEN = "t" * 40
NAMES = ["id", "tenant", "devices", "priority", "auto", "memory", "model", "duration", "checkpoint", "submitted", "\0"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), -float("inf"), "", "a", "known", "x" * 101, "a" + "." * 99, "../../etc/passwd", "a/b", "a\0b",
    "\ud800", "\udcff", "é\u202e", "guaranteed", "opportunistic", "default", [], {}, [[]], {"id": "a"}, ["a"], "/" + "n" * 300,
    "n" * 300, "/dev/zero", "/", "\n", "%00",
]  # fmt: skip


@pytest.fixture
def door(tmp_path: Path) -> Iterator[tuple[Endpoint, Cluster]]:
    cluster = Cluster(tmp_path)
    cluster.submit("known")
    cluster.service.start()
    endpoint = Endpoint(cluster.service, TOKEN)
    endpoint.start()
    yield endpoint, cluster
    endpoint.close()
    cluster.service.close()


def ask(endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    host = urllib.parse.urlsplit(endpoint.address).netloc
    with contextlib.closing(http.client.HTTPConnection(host, timeout=20)) as connection:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(body)), "Authorization": f"Bearer {TOKEN}", **headers}.items():
            connection.putheader(name, value.encode("latin-1", "replace"))
        connection.endheaders()
        with contextlib.suppress(OSError):  # refused before all of it was read
            connection.send(body)
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content[:1] in (b"{", b"[") else content


def submission(chance: random.Random) -> str:
    """Headers take Latin-1 on one line alone."""
    draw = chance.random()
    if draw < 0.1:
        deep = chance.choice([10, 5_000, 30_000])
        return "[" * deep + "]" * (deep if chance.random() < 0.5 else 0)
    if draw < 0.2:
        return "".join(chance.choice('{}[]",:0eE+-.nulltrueNaN\\u d8') for _ in range(chance.randint(0, 60)))
    if draw < 0.25:
        return '{"id": "a", "memory": ' + "9" * chance.choice([30, 4000, 5000]) + "}"
    given = {name: chance.choice(VALUES) for name in NAMES if chance.random() < 0.25}
    given |= {"id": chance.choice(["new-1", "new-2", "known", chance.choice(VALUES)])}
    return json.dumps(given)


@pytest.mark.parametrize("seed", range(3))
def test_no_request_ends_the_cluster(door: tuple[Endpoint, Cluster], seed: int) -> None:
    endpoint, cluster = door
    chance = random.Random(seed)
    names = ["known", "nobody", "..", "%00", "%ed%a0%80", "a%2fb", "n" * 5000, "%", "%zz", "*", "-1", ""]
    queries = ["", "?after=-1", "?after=nan", "?after=1e18", "?after=9e99", "?ended=-5", "?ended=1e308", "?seconds=inf",
               "?seconds=0&ids=known,nobody", "?seconds=0&ids=" + ",".join("x" * 50), "?seconds=0&ids=%00", "?a" * 500,
               "?ended=1&ended=2", "?ended=%ff", "?waiting=nan", "?seconds=0"]  # fmt: skip
    for _ in range(150):
        what = chance.random()
        headers: dict[str, str] = {}
        body = b""
        if what < 0.5:
            method, path = "POST", "/jobs"
            headers["X-Submission"] = submission(chance)
            body = chance.randbytes(chance.choice([0, 3, 1000]))
            if chance.random() < 0.2:
                lengths = ["-1", "", "9" * 30, "9" * 5000, "²", "1e3", "0x10", str(1 << 40), "1050000000"]
                headers["Content-Length"] = chance.choice(lengths)
        else:
            method = chance.choice(["GET", "POST"])
            rest = chance.choice(["", "/log", "/results", "/cancel", "/set", "/more"])
            if rest == "/set":
                body = json.dumps(
                    {name: chance.choice(VALUES) for name in ("quota", "priority", "\0") if chance.random() < 0.6}
                ).encode()
            path = chance.choice([f"/jobs/{chance.choice(names)}{rest}", "/status", "/wait", "/metrics", "/", "//", "/jobs"])
            path += chance.choice(queries)
            if path.startswith("/wait") and "seconds" not in path:
                path = path.replace("/wait", "/wait?seconds=0").replace("0?", "0&")  # else it waits
        status, told = ask(endpoint, method, path, headers, body)
        assert status < 500 or status == 503, (method, path, headers, status, told)
        assert status == 200 or (isinstance(told, bytes) or told["error"]), (method, path, headers, told)
    status, told = ask(endpoint, "GET", "/status", {}, b"")
    assert status == 200 and told["trouble"] is None and not cluster.service.over
    assert ask(endpoint, "POST", "/jobs", {"X-Submission": '{"id": "after"}'}, b"x")[1] == {"new": True, "id": "after"}
    check(cluster.store)


def test_a_payload_that_sqlite_cannot_take_is_refused_before_it_is_read(door: tuple[Endpoint, Cluster]) -> None:
    endpoint, _ = door
    headers = {"X-Submission": '{"id": "large"}', "Content-Length": "1050000000"}
    status, told = ask(endpoint, "POST", "/jobs", headers, b"")
    assert status == 413 and "the payload has 1001.4 MiB; at most 900.0 MiB are taken" in told["error"]
