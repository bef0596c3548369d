"""The tables of a cluster's database."""

from __future__ import annotations

import sqlite3

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
    """Create what is not there yet, also in a file of an older version."""
    database.executescript(_SCHEMA)
    if "ran" not in [column[1] for column in database.execute("PRAGMA table_info(jobs)")]:
        database.execute("ALTER TABLE jobs ADD COLUMN ran REAL NOT NULL DEFAULT 0")
