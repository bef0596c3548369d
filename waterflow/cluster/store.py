"""The cluster's database: jobs, payloads, placements, results, logs, and the scheduler's state.

Every change is a transaction that has reached the disk when it returns (SQLite with a write-ahead log, synchronous=FULL).
After a crash the file has the state before a change or after it, and nothing between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from waterflow.cluster.state import private
from waterflow.errors import ClusterError, InvalidJobError
from waterflow.units import format_bytes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, tenant TEXT NOT NULL, submission TEXT NOT NULL, digest TEXT NOT NULL,
    state TEXT NOT NULL, priority TEXT NOT NULL, submitted REAL NOT NULL, started REAL, ended REAL,
    attempts INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0, checkpoint TEXT,
    steps INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', results TEXT, ran REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS payloads (id TEXT PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS placements (
    id TEXT NOT NULL, position INTEGER NOT NULL, node TEXT NOT NULL, device INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (id, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, at REAL NOT NULL, line TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, at REAL NOT NULL, arguments TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS device_losses (
    number INTEGER NOT NULL, id TEXT NOT NULL, alone INTEGER NOT NULL, ran REAL NOT NULL, saved INTEGER NOT NULL,
    reached INTEGER NOT NULL, PRIMARY KEY (number, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS since (id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS log_by_job ON log (id, number);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
"""


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables that are missing, also in a file of an older version."""
    database.executescript(_SCHEMA)
    if "ran" not in [column[1] for column in database.execute("PRAGMA table_info(jobs)")]:
        database.execute("ALTER TABLE jobs ADD COLUMN ran REAL NOT NULL DEFAULT 0")


FORMAT = 1  # of the file; another one is refused
LOG_LINES = 2000  # kept per job
LARGEST_PAYLOAD = 900 << 20  # bytes; a row of SQLite has 10**9 at most
NOT_NOW = (sqlite3.OperationalError, OSError, MemoryError)  # a full disk, among others: a retry may succeed

# A job on the backend: not there (waiting), its start was requested (starting), running, its stop was requested (stopping).
State = Literal["waiting", "starting", "running", "stopping", "completed", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("completed", "failed", "cancelled")

_CHANGE = frozenset(
    ["state", "priority", "started", "ended", "attempts", "losses", "checkpoint", "steps", "reason", "results", "ran"]
)
# One parameter for any number of values: SQLite limits the number of parameters.
_AMONG = "{} IN (SELECT value FROM json_each(?))"
# cloudpickle gives each class that it sends by value a random number, which must not make equal payloads differ.
_CLASS_NUMBER = re.compile(rb"\x8c\x20[0-9a-f]{32}")


@dataclass(frozen=True)
class JobRecord:
    """One job in the store. Times are seconds since 1970.

    ``places`` are its places on the backend, (node, device, epoch of the node when it started). ``attempts`` counts its
    starts, ``losses`` the starts that ended with a lost node; ``steps`` are the steps in ``checkpoint``. ``ran`` is the
    seconds of its runs that are over. A ``reason`` before its end says why it is being ended.
    """

    id: str
    number: int
    tenant: str
    submission: dict[str, Any]
    state: State
    priority: str
    submitted: float
    started: float | None
    ended: float | None
    attempts: int
    losses: int
    checkpoint: str | None
    steps: int
    reason: str
    results: str | None
    ran: float
    places: tuple[tuple[str, int, int], ...]

    @property
    def over(self) -> bool:
        """True once it has ended."""
        return self.state in ENDED


_COLUMNS = [field.name for field in fields(JobRecord) if field.name != "places"]


def too_large(size: int, most: int) -> str:
    """Return the message for a payload of ``size`` bytes, more than ``most``."""
    return (
        f"the payload has {format_bytes(size)}; at most {format_bytes(most)} are taken. Let a function load the "
        "data where the job runs"
    )


def digest_of(submission: dict[str, Any], payload: bytes, checkpoint: str | None = None) -> str:
    """Return a digest of a submission: two submissions with one id must agree in request, payload and checkpoint."""
    later = ("time_limit",)  # fields that older versions did not have
    asked = {key: value for key, value in submission.items() if key != "submitted" and not (key in later and value is None)}
    found = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    found.update(_CLASS_NUMBER.sub(b"", payload))
    if checkpoint is not None:
        found.update(f"from {checkpoint}".encode())
    return found.hexdigest()


class Store:
    """The database of one cluster. Thread-safe; changes inside ``transaction()`` are made together or not at all.

    Raises ClusterError if the file is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        try:
            os.close(private(str(path), os.O_RDWR | os.O_CREAT))  # SQLite gives its journals the mode of the file
            path.chmod(0o600)
            # isolation_level=None: transactions begin and end in ``transaction`` alone. The lock makes threads take
            # turns.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            create_tables(self._db)
            self._check_format()
        except (sqlite3.DatabaseError, OSError) as error:
            raise ClusterError(
                f"{path} cannot be used as the state of a cluster: {error}. Put back a copy of it, or start a new cluster "
                "with another --state folder"
            ) from error

    def _check_format(self) -> None:
        found = self.meta("format")
        if found is None:
            self.set_meta("format", FORMAT)
        elif found != FORMAT:
            raise ClusterError(
                f"{self.path} has format {found}, and this version reads format {FORMAT}. Use the version of waterflow "
                "that wrote it, or start a new cluster with another --state folder"
            )

    def close(self) -> None:
        """Close the file; all changes are on the disk already."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes inside, or none; they are on the disk when the block ends. Blocks nest: the outer one commits."""
        with self._lock:
            if self._depth:
                yield
                return
            # IMMEDIATE takes the write lock now, so that no change inside can fail for want of it.
            self._db.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled it back by itself
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Undo the changes inside if the block raises an error, and keep earlier ones of the transaction."""
        with self._lock:
            assert self._depth
            self._db.execute("SAVEPOINT part")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK TO part")
                    self._db.execute("RELEASE part")
                raise
            self._db.execute("RELEASE part")

    # -- the cluster's own

    def meta(self, key: str) -> Any:
        """Return a value of the cluster, such as its scheduler's state; None if it is not set."""
        rows = self._all("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: Any) -> None:
        """Set a value of the cluster, of JSON types."""
        self.set_meta_text(key, json.dumps(value))

    def set_meta_text(self, key: str, text: str) -> None:
        """Set a value of the cluster from JSON text."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))

    def add_event(self, name: str, at: float, arguments: list[Any]) -> None:
        """Append an event of the scheduler, until its next snapshot."""
        self._run("INSERT INTO events (name, at, arguments) VALUES (?, ?, ?)", (name, at, json.dumps(arguments)))

    def events(self) -> list[tuple[str, float, list[Any]]]:
        """Return the events since the last snapshot, in order: (name, time, arguments)."""
        rows = self._all("SELECT name, at, arguments FROM events ORDER BY number")
        return [(name, at, json.loads(arguments)) for name, at, arguments in rows]

    def last_event(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return int(self._all("SELECT COALESCE(MAX(number), 0) FROM events")[0][0])

    def forget_events(self, last: int | None = None) -> None:
        """Remove the events up to ``last``, or all: a snapshot contains them."""
        self._run("DELETE FROM events WHERE number <= ?", (self.last_event() if last is None else last,))

    # -- jobs

    def add(self, submission: dict[str, Any], payload: bytes, checkpoint: str | None = None) -> bool:
        """Add a job, which resumes from ``checkpoint`` if given. Return False, without a change, if this very job is known.

        Raises InvalidJobError if the id belongs to another job, or the payload has more than ``LARGEST_PAYLOAD`` bytes.
        """
        if len(payload) > LARGEST_PAYLOAD:
            raise InvalidJobError(too_large(len(payload), LARGEST_PAYLOAD))
        id, digest = submission["id"], digest_of(submission, payload, checkpoint)
        with self.transaction():
            known = self._all("SELECT digest, submission FROM jobs WHERE id = ?", (id,))
            if known:
                if known[0][0] == digest:
                    return False
                raise InvalidJobError(_told_apart(id, json.loads(known[0][1]), submission))
            self._run(
                "INSERT INTO jobs (id, number, tenant, submission, digest, state, priority, submitted, checkpoint) "
                "VALUES (?, (SELECT COUNT(*) FROM jobs), ?, ?, ?, 'waiting', ?, ?, ?)",
                (
                    id,
                    submission["tenant"],
                    json.dumps(submission),
                    digest,
                    submission["priority"],
                    submission["submitted"],
                    checkpoint,
                ),
            )
            self._run("INSERT INTO payloads VALUES (?, ?)", (id, payload))
        return True

    def job(self, id: str) -> JobRecord | None:
        """Return one job; None for an unknown id."""
        found = self.jobs([id])
        return found[0] if found else None

    def jobs(self, ids: Sequence[str] | None = None, *, states: Iterable[State] | None = None) -> list[JobRecord]:
        """Return jobs in the order of submission: all, those with ``ids``, or those in ``states``."""
        where, values = "1", []
        if ids is not None:
            where, values = f"{where} AND {_AMONG.format('id')}", [json.dumps(list(ids))]
        if states is not None:
            where, values = f"{where} AND {_AMONG.format('state')}", [*values, json.dumps(list(states))]
        with self._lock:
            rows = self._all(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE {where} ORDER BY number", values)
            places: dict[str, list[tuple[str, int, int]]] = {}
            for id, node, device, epoch in self._all("SELECT id, node, device, epoch FROM placements ORDER BY position"):
                places.setdefault(id, []).append((node, device, epoch))
        return [_record(dict(zip(_COLUMNS, row)), places) for row in rows]

    def page(self, ended: int | None = None, waiting: int | None = None) -> tuple[list[JobRecord], int, int]:
        """Return jobs in the order of submission, and how many more have ended, and wait.

        The jobs are all that occupy devices, the last ``ended`` of those that have ended, and the first ``waiting`` of those
        that wait (None: all).
        """
        if ended is None and waiting is None:
            return self.jobs(), 0, 0
        # Only the jobs that are shown are read whole: a cluster keeps every job that it has run.
        over, none = _AMONG.format("state"), -1  # -1 is SQLite's way to say no limit
        with self._lock:
            last = self._all(
                f"SELECT id FROM jobs WHERE {over} ORDER BY ended DESC, number DESC LIMIT ?",
                (json.dumps(ENDED), none if ended is None else ended),
            )
            first = self._all(
                "SELECT id FROM jobs WHERE state = 'waiting' ORDER BY number LIMIT ?", (none if waiting is None else waiting,)
            )
            placed = self._all(f"SELECT id FROM jobs WHERE NOT {over} AND state != 'waiting'", (json.dumps(ENDED),))
            ((all_over, all_waiting),) = self._all(
                f"SELECT COALESCE(SUM({over}), 0), COALESCE(SUM(state = 'waiting'), 0) FROM jobs", (json.dumps(ENDED),)
            )
            found = self.jobs([id for (id,) in placed + first + last])
            return found, all_over - len(last), all_waiting - len(first)

    def over(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that have ended, in the order of submission."""
        among = f"{_AMONG.format('id')} AND {_AMONG.format('state')} ORDER BY number"
        return [id for (id,) in self._all(f"SELECT id FROM jobs WHERE {among}", (json.dumps(list(ids)), json.dumps(ENDED)))]

    def unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that no job has."""
        known = {id for (id,) in self._all(f"SELECT id FROM jobs WHERE {_AMONG.format('id')}", (json.dumps(list(ids)),))}
        return [id for id in ids if id not in known]

    def payload(self, id: str) -> bytes:
        """Return the payload of a job that has not ended."""
        return bytes(self._all("SELECT payload FROM payloads WHERE id = ?", (id,))[0][0])

    def forget_payload(self, id: str) -> None:
        """Remove the payload of a job that has ended: it is never started again."""
        self._run("DELETE FROM payloads WHERE id = ?", (id,))
        self._run("DELETE FROM since WHERE id = ?", (id,))

    def change(self, id: str, **values: Any) -> None:
        """Set fields of one job; the fields of its submission cannot change."""
        assert values.keys() <= _CHANGE
        columns = ", ".join(f"{name} = ?" for name in values)
        self._run(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), id))

    def place(self, id: str, places: Iterable[tuple[str, int, int]]) -> None:
        """Set the places of a job, (node, device, epoch of the node); none: it is not on the backend."""
        with self.transaction():
            self._run("DELETE FROM placements WHERE id = ?", (id,))
            for position, (node, device, epoch) in enumerate(places):
                self._run("INSERT INTO placements VALUES (?, ?, ?, ?, ?)", (id, position, node, device, epoch))

    # -- devices that were lost under jobs

    def set_since(self, id: str, at: float) -> None:
        """Set the time at which a job was started, or wrote its last checkpoint."""
        self._run("INSERT OR REPLACE INTO since VALUES (?, ?)", (id, at))

    def since(self, id: str) -> float | None:
        """Return the time of ``set_since``; None if it was not set."""
        rows = self._all("SELECT at FROM since WHERE id = ?", (id,))
        return float(rows[0][0]) if rows else None

    def add_loss(self, number: int, id: str, alone: bool, ran: float, saved: int, reached: int) -> None:
        """Record that a job was on a device when the device was lost; the values are those of ``Loss``."""
        self._run("INSERT INTO device_losses VALUES (?, ?, ?, ?, ?, ?)", (number, id, alone, ran, saved, reached))

    def losses(self) -> list[tuple[int, str, bool, float, int, int]]:
        """Return all recorded losses: (number, job, alone, ran, saved, reached)."""
        rows = self._all("SELECT number, id, alone, ran, saved, reached FROM device_losses ORDER BY number, id")
        return [(number, id, bool(alone), *rest) for number, id, alone, *rest in rows]

    def forget_losses(self, *, ids: Sequence[str] = (), numbers: Sequence[int] = ()) -> None:
        """Remove all losses of some jobs, and some losses for all jobs."""
        self._run(f"DELETE FROM device_losses WHERE {_AMONG.format('id')}", (json.dumps(list(ids)),))
        self._run(f"DELETE FROM device_losses WHERE {_AMONG.format('number')}", (json.dumps(list(numbers)),))

    # -- logs of jobs

    def say(self, id: str, at: float, line: str) -> None:
        """Add a line to a job's log, which keeps the last ``LOG_LINES``."""
        with self.transaction():
            self._run("INSERT INTO log (id, at, line) VALUES (?, ?, ?)", (id, at, line))
            self._run(
                "DELETE FROM log WHERE id = ? AND number <= "
                "(SELECT number FROM log WHERE id = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (id, id, LOG_LINES),
            )

    def log(self, id: str, after: int = 0) -> list[tuple[int, float, str]]:
        """Return the lines of a job's log after number ``after``: (number, seconds since 1970, line)."""
        return self._all("SELECT number, at, line FROM log WHERE id = ? AND number > ? ORDER BY number", (id, after))

    def check(self) -> None:
        """Raise ClusterError if the file contradicts itself."""
        with self._lock:
            (found,) = self._all("PRAGMA integrity_check")[0]
            if found != "ok":
                raise ClusterError(f"{self.path} is damaged: {found}")
            for job in self.jobs():
                held = job.state in ("starting", "running", "stopping")
                if bool(job.places) != held:
                    raise ClusterError(f"{self.path}: job {job.id!r} is {job.state} and has {len(job.places)} places")

    def _run(self, sql: str, values: Sequence[Any] = ()) -> None:
        with self._lock:
            self._db.execute(sql, values)

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def _record(columns: dict[str, Any], places: dict[str, list[tuple[str, int, int]]]) -> JobRecord:
    columns["submission"] = json.loads(columns["submission"])
    return JobRecord(**columns, places=tuple(places.get(columns["id"], ())))


def _told_apart(id: str, known: dict[str, Any], given: dict[str, Any]) -> str:
    differ = [
        f"{key} {known.get(key)!r} there and {given.get(key)!r} here"
        for key in given
        if key != "submitted" and known.get(key) != given.get(key)
    ]
    what = "; ".join(differ) or "its payload, or the checkpoint that it resumes from"
    return f"job {id!r} is known already, and differs in {what}. One id is one job: take another id for another job"
