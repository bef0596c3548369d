"""Limits of the endpoint: connections at once, and the time that a client has until it has sent the token."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

MOST = 512  # connections; half of the files that the process may open are for devices and the store
PART_UNKNOWN = 4  # a quarter of the connections is for clients that have not sent the token
HEADER_SECONDS = 10.0  # for all of a request up to its token
BACKLOG = 256  # connections that the system keeps until they are taken
_BUSY = json.dumps({"error": "the cluster has as many connections as it can have; try again", "kind": "BusyError"}).encode()


def most_connections() -> int:
    """Return the most connections to accept: half of the files that this process may open, at most ``MOST``."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else max(2 * PART_UNKNOWN, min(MOST, files // 2))


class LimitedServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection, and a limited number of connections.

    A connection that has not sent the token (``known``) is closed after ``HEADER_SECONDS``, or earlier to make room for a new
    one, the oldest first.
    """

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.most = most_connections()
        self._unknown: dict[socket.socket, float] = {}  # start times of connections without the token, the oldest first
        self._known: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def known(self, connection: socket.socket) -> None:
        """Record that a connection has sent the token."""
        with self._guard:
            if self._unknown.pop(connection, None) is not None:
                self._known.add(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See ``ThreadingHTTPServer``; refuses the connection with status 503 when all are taken."""
        with self._guard:
            # Without the token a client can neither fill the server nor keep others out: it only replaces others
            # without it.
            while self._unknown and (
                len(self._unknown) >= self.most // PART_UNKNOWN or len(self._unknown) + len(self._known) >= self.most
            ):
                self._send_away(next(iter(self._unknown)))
            full = len(self._known) >= self.most
            if not full:
                self._unknown[request] = time.monotonic()
        if full:
            with contextlib.suppress(OSError):
                head = f"HTTP/1.1 503 Busy\r\nContent-Length: {len(_BUSY)}\r\nConnection: close\r\n\r\n"
                request.sendall(head.encode() + _BUSY)
            super().shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """See ``ThreadingHTTPServer``; called when the thread of a connection ends."""
        with self._guard:
            self._unknown.pop(request, None)
            self._known.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """See ``ThreadingHTTPServer``; called several times a second."""
        with self._guard:
            now = time.monotonic()
            for connection in [each for each, since in self._unknown.items() if now - since > HEADER_SECONDS]:
                self._send_away(connection)

    def _send_away(self, connection: socket.socket) -> None:
        # Only its own thread may close the socket; after a shutdown that thread reads the end of the stream, and closes
        # it.
        del self._unknown[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
