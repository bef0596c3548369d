"""The HTTP endpoint of a cluster: on loopback, with a token that only the cluster's owner can read.

Requests and answers are JSON; payloads and results are bytes that this process never unpickles. Each refusal has its reason.
"""

from __future__ import annotations

import functools
import hmac
import io
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import threading
import urllib.parse
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from waterflow.cluster.connections import LimitedServer
from waterflow.cluster.intake import check_text
from waterflow.cluster.service import BusyError, ClosedError, Service
from waterflow.cluster.shared_folder import result_files
from waterflow.cluster.store import LARGEST_PAYLOAD, too_large
from waterflow.errors import InvalidJobError, SubmissionError, WaterflowError

logger = logging.getLogger("waterflow")

LARGEST_SUBMISSION = 1 << 16
LARGEST_WAIT = 1 << 26  # ids of 100 characters: more than half a million
LONGEST_WAIT = 30.0  # seconds for which the answer to a request may be delayed
QUIET_SECONDS = 60.0  # after which a connection without data is closed
LEAST_TOKEN = 32  # characters


class EndpointError(WaterflowError, ValueError):
    """The endpoint cannot be opened with this address or token."""


def make_token(path: Path) -> str:
    """Return the token in a file that only its owner may read; create it if it is missing. Raises EndpointError."""
    try:
        # O_EXCL with the mode: the token is never in a file that others could have opened before.
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    with os.fdopen(made, "w") as file:
        token = secrets.token_hex(LEAST_TOKEN)
        file.write(token)
    return token


def read_token(path: Path) -> str:
    """Return the token in a file. Raises EndpointError if others can read the file, or the token is too short."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise EndpointError(
            f"{path} may be read by others (mode {mode:o}), and anyone who reads it can run code as you. "
            f"Remove it, and start the cluster again, which makes a new one"
        )
    token = path.read_text().strip()
    if len(token) < LEAST_TOKEN:
        raise EndpointError(f"the token in {path} has {len(token)} characters; it must have {LEAST_TOKEN} at least")
    return token


def check_address(host: str, anywhere: bool) -> None:
    """Raise EndpointError for a host beyond loopback, unless ``anywhere``."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise EndpointError(f"cannot listen on {host!r}: {error}") from None
    beyond = sorted(str(a) for a in addresses if not ipaddress.ip_address(str(a).split("%")[0]).is_loopback)
    if beyond and not anywhere:
        raise EndpointError(
            f"{host} ({', '.join(beyond)}) can be reached from other machines, and nothing is encrypted there. Listen on "
            "127.0.0.1 and use an SSH tunnel, or say --listen-beyond-loopback"
        )


class Endpoint:
    """Answers requests for a service on threads of its own, from ``start()`` to ``close()``.

    ``metrics`` returns the text of ``GET /metrics``; None answers it with status 404. Raises EndpointError for an address
    beyond loopback without ``anywhere``, or a short token.
    """

    def __init__(
        self,
        service: Service,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        anywhere: bool = False,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        check_address(host, anywhere)
        if len(token) < LEAST_TOKEN:
            raise EndpointError(f"a token must have {LEAST_TOKEN} characters at least; got {len(token)}")
        self.service, self.token, self.metrics = service, token, metrics
        self.wanted_down = threading.Event()  # a client asked for the end of the cluster
        self._server = LimitedServer((host, port), functools.partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="endpoint")

    @property
    def address(self) -> str:
        """The address that it listens on, as http://host:port."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer requests."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering requests, and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = QUIET_SECONDS

    def __init__(self, door: Endpoint, *rest: Any) -> None:
        self.door = door
        self.service = door.service
        super().__init__(*rest)  # answers

    def do_GET(self) -> None:
        self._answer(_GET)

    def do_POST(self) -> None:
        self._answer(_POST)

    def _answer(self, routes: list[tuple[str, str]]) -> None:
        self._body_read = False
        try:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            # Before the body is read, and in constant time.
            if not hmac.compare_digest(given.encode(), self.door.token.encode()):
                raise _Refused(401, "the token is missing or wrong; it is in the file token of the cluster's state folder")
            # From here on the connection is not closed in favour of a new one.
            self.server.known(self.connection)  # type: ignore[attr-defined]
            url = urllib.parse.urlsplit(self.path)
            self.query = dict(urllib.parse.parse_qsl(url.query))
            for pattern, name in routes:
                found = re.fullmatch(pattern, url.path)
                if found:
                    made = getattr(self, name)(*map(urllib.parse.unquote, found.groups()))
                    break
            else:
                raise _Refused(404, f"there is nothing at {url.path}")
            if isinstance(made, bytes):
                self._send(200, made, "application/octet-stream")
            else:
                self._send(200, json.dumps(made).encode())
        except _Refused as error:
            self._refuse(error.status, "EndpointError", str(error))
        except (SubmissionError, InvalidJobError) as error:
            self._refuse(400, type(error).__name__, str(error))
        except (BusyError, ClosedError) as error:
            self._refuse(503, type(error).__name__, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logger.exception("a request failed: %s %s", self.command, self.path)
            self._refuse(500, "ClosedError", f"{type(error).__name__}: {error}")

    def _refuse(self, status: int, kind: str, why: str) -> None:
        self.close_connection = True  # the rest of the request is not read
        self._send(status, json.dumps({"error": why, "kind": kind}).encode())

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("endpoint: " + format, *args)

    # -- requests: each method serves the route of its name below

    def status(self) -> dict[str, Any]:
        pages = {key: int(self._number(key, 0.0, 1e9)) for key in ("ended", "waiting") if key in self.query}
        return self.service.status(**pages)

    def job(self, id: str) -> dict[str, Any]:
        return self.service.told(self.service.record(id))

    def log(self, id: str) -> dict[str, Any]:
        after = self._number("after", 0, 1e18)
        state = self.service.record(id).state  # read before the lines: an ended job gets no more of them
        lines = [{"number": n, "at": at, "line": line} for n, at, line in self.service.store.log(id, int(after))]
        return {"lines": lines, "state": state}

    def results(self, id: str) -> bytes:
        """Return a zip file with the newest result of each job of the group, in their order."""
        job = self.service.record(id)
        if not job.over:
            raise _Refused(409, f"job {id!r} has not ended; it is {job.state}")
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for number, path in enumerate(result_files(Path(job.results)) if job.results else ()):
                archive.write(path, str(number))
        return packed.getvalue()

    def wait(self) -> dict[str, Any]:
        """Wait for one of the ids, which are the body, as JSON, or, if they are few, in the address."""
        ids = [id for id in self.query.get("ids", "").split(",") if id]
        if self.command == "POST":
            try:
                ids = json.loads(self._body(LARGEST_WAIT))
            except ValueError:
                ids = []
            if not isinstance(ids, list) or not ids or not all(isinstance(id, str) for id in ids):
                raise _Refused(400, "the body must be a list of ids as JSON, with one id at least")
        return {"ended": self.service.wait(ids, self._number("seconds", LONGEST_WAIT, LONGEST_WAIT))}

    def prometheus(self) -> bytes:
        if self.door.metrics is None:
            raise _Refused(404, "this cluster has no metrics: pip install waterflow[metrics], and start it again")
        return self.door.metrics()

    def submit(self) -> dict[str, Any]:
        given = self.headers.get("X-Submission", "")
        if len(given) > LARGEST_SUBMISSION:
            raise _Refused(413, f"a submission has at most {LARGEST_SUBMISSION} characters")
        try:
            submission = json.loads(given)
        except (ValueError, RecursionError):
            submission = None
        if not isinstance(submission, dict):
            raise _Refused(400, "a submission is JSON in the header X-Submission, and its payload is the body")
        checkpoint = submission.pop("checkpoint", None)
        if checkpoint is not None and not isinstance(checkpoint, str):
            raise _Refused(400, f"checkpoint must be a path; got {checkpoint!r}")
        check_text("checkpoint", checkpoint or "")
        return {"new": self.service.submit(submission, self._body(), checkpoint), "id": submission["id"]}

    def cancel(self, id: str) -> dict[str, Any]:
        return {"cancelled": self.service.cancel(id)}

    def set(self, id: str) -> dict[str, Any]:
        try:
            given = json.loads(self._body(LARGEST_SUBMISSION))
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or not given.keys() <= {"quota", "priority"}:
            raise _Refused(400, "the body must be quota, priority or both, by name, as JSON")
        self.service.set(id, **given)
        return self.job(id)

    def down(self) -> dict[str, Any]:
        self.door.wanted_down.set()
        return {"pid": os.getpid()}

    def _number(self, name: str, default: float, most: float) -> float:
        text = self.query.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise _Refused(400, f"{name} must be a number from 0 to {most:g}; got {text!r}")
        return value

    def _body(self, most: int = LARGEST_PAYLOAD) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise _Refused(411, "the payload needs a Content-Length, a number of bytes")
        if int(length) > most:
            raise _Refused(413, too_large(int(length), most))
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(400, f"the payload ended after {len(body)} of {length} bytes")
        return body


_JOB = "/jobs/([^/]+)"
_GET = [
    ("/status", "status"),
    (_JOB, "job"),
    (_JOB + "/log", "log"),
    (_JOB + "/results", "results"),
    ("/wait", "wait"),
    ("/metrics", "prometheus"),
]
_POST = [("/jobs", "submit"), (_JOB + "/cancel", "cancel"), (_JOB + "/set", "set"), ("/wait", "wait"), ("/down", "down")]
