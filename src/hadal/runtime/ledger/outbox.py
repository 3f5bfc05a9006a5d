"""The outbox: facts that wait for their database, in a SQLite file that all its writers share.

    append --one commit--> a row, kept --written to the database, then removed--> gone

A row is removed only after the database has its facts. A crash in between writes them twice, and
the ledger counts them once. Any writer may write the rows that another left. The file is created
when a fact first has to wait, and then stays. If it is removed while a writer has it open, the
writer creates it again with all rows that it can still read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hadal.core.facts import PackedFacts
from hadal.runtime.process.private import open_private, take_from_others

log = logging.getLogger("hadal.ledger")

MAX_BYTES = 64 * 1024 * 1024
"""Largest size of the file: some 400,000 requests."""
SUFFIX = ".outbox"
BUSY_S = 5.0
"""Longest wait of a writer for another's commit."""
BATCH_ROWS = 64
"""Rows written to the database in one transaction, and removed in one commit."""
_PAGE_BYTES = 4096
_PAGES_MIN = 8
_TABLES = """
CREATE TABLE IF NOT EXISTS waiting
    (id INTEGER PRIMARY KEY AUTOINCREMENT, crc INTEGER NOT NULL, facts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS damaged (facts BLOB NOT NULL);
"""
_decode = msgspec.msgpack.Decoder(PackedFacts).decode
_encode = msgspec.msgpack.Encoder().encode


class LedgerOutbox:
    """Connection of one writer to the outbox. Used by one thread at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.may_hold = path.exists()
        """True if the file may have rows, of any writer, that this writer has not tried to read."""
        self._max_pages = max(_PAGES_MIN, max_bytes // _PAGE_BYTES)
        self._connection: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        """Status of the file that the connection has open."""

    def append(self, facts: PackedFacts) -> bool:
        """Store facts durably. Return False if the file is full. Raises OSError or sqlite3.Error if
        it cannot be written; nothing is stored then.
        """
        body = _encode(facts)
        try:
            _insert(self._connected(), [(zlib.crc32(body), body)])
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                return False
            raise
        except sqlite3.DatabaseError:
            self._set_aside()
            raise
        self.may_hold = True
        return True

    def waiting(self) -> Iterator[tuple[list[int], PackedFacts]]:
        """Yield the rows that wait now, oldest first, BATCH_ROWS at a time: (their ids, their
        facts). Unreadable rows are moved to a table of their own and logged. Raises OSError or
        sqlite3.Error.
        """
        try:
            connection = self._connected()
            (newest,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM waiting").fetchone()
            at = 0
            while rows := connection.execute(
                "SELECT id, crc, facts FROM waiting WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
                (at + 1, newest, BATCH_ROWS),
            ).fetchall():
                at = rows[-1][0]
                read = [(number, _read(crc, body)) for number, crc, body in rows]
                self._keep_damaged([number for number, facts in read if facts is None])
                sound = {number: facts for number, facts in read if facts is not None}
                if sound:
                    yield list(sound), _together(sound.values())
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            self._set_aside()
            raise

    def remove(self, ids: list[int]) -> None:
        """Remove rows that are in the database. Raises OSError or sqlite3.Error; rows that stay are
        written to the database again, which counts them once.
        """
        connection = self._connected()
        with connection:
            connection.executemany("DELETE FROM waiting WHERE id = ?", ((one,) for one in ids))

    def _keep_damaged(self, ids: list[int]) -> None:
        if not ids:
            return
        log.error(
            "queued facts in %s cannot be read; they are moved to the table 'damaged' there",
            self.path,
        )
        connection, each = self._connected(), [(one,) for one in ids]
        with connection:
            connection.executemany(
                "INSERT INTO damaged SELECT facts FROM waiting WHERE id = ?", each
            )
            connection.executemany("DELETE FROM waiting WHERE id = ?", each)

    def close(self) -> None:
        """Close the file; its rows stay for the next writer."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> sqlite3.Connection:
        """Return the connection to the present file. A new file gets the rows of a removed one."""
        if self._connection is not None and _is_at(self.path, self._file):
            return self._connection
        left = _rows(self._connection) if self._connection is not None else []
        self.close()
        try:
            self._connection = self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # Not an SQLite file, or cut off.
            self._set_aside()
            self._connection = self._connect()
        if left:
            _insert(self._connection, left)
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # An existing file is not opened: closing it would drop the locks that another connection of
        # this process holds on it.
        with contextlib.suppress(FileExistsError):
            os.close(open_private(self.path, os.O_RDWR | os.O_EXCL))
        take_from_others(self.path)
        self._file = self.path.stat()
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level="IMMEDIATE", check_same_thread=False
        )
        try:
            # EXTRA: a commit survives a power cut, because the folder is synced as well.
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA auto_vacuum = FULL")
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute(f"PRAGMA max_page_count = {self._max_pages}")
            connection.executescript(_TABLES)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _set_aside(self) -> None:
        """Rename a file that is no outbox, so that people can look at it; a new one replaces it."""
        self.close()
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with contextlib.suppress(OSError):
            self.path.rename(aside)
            log.error("%s cannot be read; it is renamed to %s", self.path, aside.name)


def _insert(connection: sqlite3.Connection, rows: list[tuple[int, bytes]]) -> None:
    with connection:
        connection.executemany("INSERT INTO waiting (crc, facts) VALUES (?, ?)", rows)


def _rows(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    """Return the rows of a removed file: they are readable as long as it is open."""
    with contextlib.suppress(sqlite3.Error):
        return connection.execute("SELECT crc, facts FROM waiting ORDER BY id").fetchall()
    return []


def _together(batches: Iterable[PackedFacts]) -> PackedFacts:
    kept = list(batches)
    return PackedFacts(
        tuple(one for facts in kept for one in facts.requests),
        tuple(one for facts in kept for one in facts.nodes),
    )


def _read(crc: int, body: bytes) -> PackedFacts | None:
    if zlib.crc32(body) != crc:
        return None
    try:
        return _decode(body)
    except msgspec.DecodeError:
        return None


def _is_at(path: Path, file: os.stat_result | None) -> bool:
    try:
        return file is not None and os.path.samestat(path.stat(), file)
    except FileNotFoundError:
        return False
