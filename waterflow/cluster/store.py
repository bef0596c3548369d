"""The cluster's database: jobs, with what the scheduler's book has of them, payloads, placements, results, and logs.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from waterflow.cluster.book import COLUMNS
from waterflow.cluster.state import private
from waterflow.errors import ClusterError, InvalidJobError
from waterflow.units import format_bytes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, tenant TEXT NOT NULL, submission TEXT NOT NULL, digest TEXT NOT NULL,
    state TEXT NOT NULL, priority TEXT NOT NULL, submitted REAL NOT NULL, started REAL, ended REAL,
    attempts INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0, checkpoint TEXT,
    steps INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', results TEXT, ran REAL NOT NULL DEFAULT 0,
    unsaved_since REAL, node TEXT, device INTEGER, epoch INTEGER,
    places TEXT, reserved TEXT, alone INTEGER, waiting_since REAL, since REAL, service REAL, on_devices REAL, done REAL,
    rate REAL, preemptions INTEGER, utilization REAL, memory INTEGER, entered INTEGER, key TEXT
);
CREATE TABLE IF NOT EXISTS payloads (id TEXT PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS log (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, at REAL NOT NULL, line TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS device_losses (
    number INTEGER NOT NULL, id TEXT NOT NULL, alone INTEGER NOT NULL, ran REAL NOT NULL, saved INTEGER NOT NULL,
    reached INTEGER NOT NULL, PRIMARY KEY (number, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS log_by_job ON log (id, number);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
"""

FORMAT = 2  # of the file; another one is refused
LOG_LINES = 2000  # kept per job
LARGEST_PAYLOAD = 900 << 20  # bytes; a row of SQLite has 10**9 at most
NOT_NOW = (sqlite3.OperationalError, OSError, MemoryError)  # a full disk, among others: a retry may succeed

# On no device (waiting); on one: its start was requested (starting), it trains (running), it waits there for its next turn (held),
# it is to leave (stopping).
State = Literal["waiting", "starting", "running", "held", "stopping", "completed", "failed", "cancelled"]
PLACED: tuple[State, ...] = ("starting", "running", "held", "stopping")
ENDED: tuple[State, ...] = ("completed", "failed", "cancelled")

_CHANGE = frozenset(
    ["state", "started", "ended", "attempts", "losses", "steps", "reason", "results", "ran", "unsaved_since", "submission"]
)
_AS_JSON = ("key", "places", "reserved")  # of what the book has of a job; ``places`` is NULL for one that is not in the book
# One parameter for any number of values: SQLite limits the number of parameters.
_AMONG = "{} IN (SELECT value FROM json_each(?))"
# cloudpickle gives each class that it sends by value a random number, which must not make equal payloads differ.
_CLASS_NUMBER = re.compile(rb"\x8c\x20[0-9a-f]{32}")


class JobRecord(NamedTuple):
    """One job in the store. Times are seconds since 1970.

    ``node``, ``device`` and ``epoch``, that of the node, say where its run is; None: nowhere. ``attempts`` counts its starts,
    ``losses`` those that ended with a lost node; ``steps`` are the steps in its last checkpoint, ``checkpoint`` the file that
    it was submitted with. ``ran`` is the seconds of its runs that are over, ``unsaved_since`` the time of its last start or
    checkpoint. A ``reason`` before its end says why it is being ended.
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
    unsaved_since: float | None
    node: str | None
    device: int | None
    epoch: int | None

    @property
    def over(self) -> bool:
        """True once it has ended."""
        return self.state in ENDED


_COLUMNS = ", ".join(JobRecord._fields)


def too_large(size: int, most: int) -> str:
    """Return the message for a payload of ``size`` bytes, more than ``most``."""
    return (
        f"the payload has {format_bytes(size)}; at most {format_bytes(most)} are taken. Let a function load the "
        "data where the job runs"
    )


def digest_of(submission: dict[str, Any], payload: bytes, checkpoint: str | None = None) -> str:
    """Return a digest of a submission: two submissions with one id must agree in request, payload and checkpoint."""
    later = ("time_limit", "quota")  # fields that older versions did not have
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
            self._db.executescript(_SCHEMA)
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
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

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
            plain = [submission[name] for name in ("tenant", "priority", "submitted")]
            self._run(
                "INSERT INTO jobs (id, number, state, tenant, priority, submitted, submission, digest, checkpoint) "
                "VALUES (?, (SELECT COUNT(*) FROM jobs), 'waiting', ?, ?, ?, ?, ?, ?)",
                (id, *plain, json.dumps(submission), digest, checkpoint),
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
        rows = self._all(f"SELECT {_COLUMNS} FROM jobs WHERE {where} ORDER BY number", values)
        records = map(JobRecord._make, rows)
        return [record._replace(submission=json.loads(record.submission)) for record in records]  # type: ignore[arg-type]

    def placed(self) -> list[JobRecord]:
        """Return the jobs that are on a device."""
        return self.jobs(states=PLACED)

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

    def change(self, id: str, **values: Any) -> None:
        """Set fields of one job; ``submission`` is JSON text, and its digest stays that of the job as it was handed in."""
        assert values.keys() <= _CHANGE
        columns = ", ".join(f"{name} = ?" for name in values)
        self._run(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), id))

    def place(self, id: str, place: tuple[str, int, int] | None) -> None:
        """Set where a job's run is, (node, device, epoch of the node); None: nowhere."""
        self._run("UPDATE jobs SET node = ?, device = ?, epoch = ? WHERE id = ?", (*(place or (None, None, None)), id))

    # -- what the scheduler's book has of jobs

    def write_entry(self, id: str, columns: Mapping[str, Any] | None) -> None:
        """Write the columns of a job that the book has, of ``Entry.columns``; None: it is no longer in the book."""
        if columns is None:
            self._run("UPDATE jobs SET places = NULL, reserved = NULL, key = NULL WHERE id = ?", (id,))
            return
        values = [json.dumps(columns[name]) if name in _AS_JSON else columns[name] for name in COLUMNS]
        self._run(f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE id = ?", (*values, id))

    def entries(self) -> list[tuple[dict[str, Any], int, dict[str, Any]]]:
        """Return the jobs in the book, in the order of submission: (submission, number, what ``write_entry`` wrote)."""
        rows = self._all(f"SELECT submission, number, {', '.join(COLUMNS)} FROM jobs WHERE places IS NOT NULL ORDER BY number")
        found = []
        for submission, number, *values in rows:
            columns = dict(zip(COLUMNS, values))
            columns["alone"] = bool(columns["alone"])
            found.append((json.loads(submission), number, columns | {name: json.loads(columns[name]) for name in _AS_JSON}))
        return found

    # -- devices that were lost under jobs

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

    def _run(self, sql: str, values: Sequence[Any] = ()) -> None:
        # Texts of users may have characters that are no text (of file names): they are written as "?".
        plain = [value.encode(errors="replace").decode() if isinstance(value, str) else value for value in values]
        with self._lock:
            self._db.execute(sql, plain)

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def _told_apart(id: str, known: dict[str, Any], given: dict[str, Any]) -> str:
    differ = [
        f"{key} {known.get(key)!r} there and {given.get(key)!r} here"
        for key in given
        if key != "submitted" and known.get(key) != given.get(key)
    ]
    what = "; ".join(differ) or "its payload, or the checkpoint that it resumes from"
    return f"job {id!r} is known already, and differs in {what}. One id is one job: take another id for another job"
