"""The ledger's database: one engine, its settings and deadlines, and its errors, divided into
temporary and permanent ones.

SQLite writes ahead into a log that is flushed at every commit (WAL, synchronous=FULL), and a write
takes the lock at its beginning, so two processes take turns. Committed facts survive `kill -9` and
a power cut.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from hadal.core.documents import is_file
from hadal.core.errors import HadalError
from hadal.core.facts import NodesFact, PackedFacts
from hadal.runtime.ledger.address import file_of, shown
from hadal.runtime.process.private import open_private, take_from_others
from hadal.stats import ledger
from hadal.stats.ledger import LedgerError, Written
from hadal.stats.report import HOUR, Details
from hadal.stats.tally import Tally
from hadal.stats.usage import WorkSpan

log = logging.getLogger("hadal.ledger")
BUSY_S = 5.0
"""Longest wait of a write for another process's write."""
CONNECT_S = 5.0
STATEMENT_S = 10.0
IS_READING = "hadal_is_reading"
"""Option of a connection that only reads: in SQLite it waits for no writer."""


class StoreDown(HadalError):
    """Temporary failure of the database: full, locked, gone, not answering."""


class FactsRefused(HadalError):
    """Permanent refusal by a working database: at least one of the facts is invalid."""


@dataclass(frozen=True)
class LedgerWindow:
    """Content of the ledger for a span of time."""

    tally: Tally
    nodes: list[NodesFact]
    details: Details | None
    """Quantiles and statuses; None if they were not requested."""
    last_completed_us: int | None
    """End of the last finished request in the whole ledger, in unix us; None if it has none."""
    spans: list[WorkSpan] | None = None
    """Time of generations on units; None if it was not requested."""


class Store:
    """One database. Used by one thread at a time; connects when it is first used."""

    def __init__(self, url: str) -> None:
        """`url`: as `ledger_url` returns it (runtime/ledger/address)."""
        self.place = shown(url)
        self._path = file_of(url)
        self._engine = engine_of(url)
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that was prepared."""

    def prepare(self) -> None:
        """Create file and tables if they are missing. Raises LedgerError if the database is not a
        ledger of ours, and StoreDown.
        """
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise StoreDown(f"{self._path.parent}: {error.strerror}") from error
            _close_to_others(self._path)
        try:
            with self._begin() as connection:
                ledger.prepare(connection)
        except LedgerError as error:
            raise LedgerError(f"{self.place}: {error}") from None
        self._identity = self._found()

    def write(self, facts: PackedFacts) -> Written:
        """Write all or nothing, durably. Raises StoreDown, FactsRefused, and LedgerError if another
        database is there now that is not a ledger of ours.
        """
        if self._identity is not None and self._found() != self._identity:
            # The file was moved or removed: SQLite would keep writing where no reader looks.
            self._leave_file()
            self.prepare()
        with self._begin() as connection:
            ledger.write_nodes(connection, facts.nodes)
            return ledger.write_requests(connection, facts.requests)

    def read(
        self,
        from_us: int,
        to_us: int,
        *,
        by: str = HOUR,
        utc_offset_s: int = 0,
        has_details: bool = True,
        has_spans: bool = False,
    ) -> LedgerWindow:
        """Read the window from one snapshot, with details for each of `by` (stats/report). Raises
        LedgerError if there is no ledger of ours, StoreDown, FactsRefused for an unknown `by`.
        """
        if self._path is not None and not is_file(self._path):
            raise LedgerError(f"there is no ledger at {self.place}.")
        try:
            with self._begin(is_reading=True) as connection:
                ledger.check_schema(connection)
                return LedgerWindow(
                    ledger.read_tally(connection, from_us, to_us),
                    ledger.read_nodes(connection, from_us, to_us),
                    ledger.read_details(
                        connection, from_us, to_us, by=by, utc_offset_s=utc_offset_s
                    )
                    if has_details
                    else None,
                    ledger.last_completed_us(connection),
                    ledger.read_spans(connection, from_us, to_us) if has_spans else None,
                )
        except LedgerError as error:
            raise LedgerError(f"{self.place}: {error}") from None

    def read_spent(
        self, day: int, tenants: Collection[str], recent_us: int, ids: list[str]
    ) -> tuple[dict[str, int], list[str], set[str]]:
        """Call stats/ledger.read_spent on one snapshot. Raises LedgerError, StoreDown."""
        if self._path is not None and not is_file(self._path):
            raise LedgerError(f"there is no ledger at {self.place}.")
        with self._begin(is_reading=True) as connection:
            ledger.check_schema(connection)
            return ledger.read_spent(connection, day, tenants, recent_us, ids)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _leave_file(self) -> None:
        """Close a file that was moved or removed. If there is no new database at its old path,
        first write the log (WAL) there into the file: a new database would remove that log.
        """
        try:
            if self._found() is None:
                connection = self._engine.raw_connection()
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.close()
        except (exc.SQLAlchemyError, sqlite3.Error) as error:
            log.warning(
                "%s was removed, and the latest facts may be lost: %s", self.place, _reason(error)
            )
        self._engine.dispose()

    def _found(self) -> tuple[int, int] | None:
        """Return device and inode of the file at the path; None without one, or for a server."""
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    @contextmanager
    def _begin(self, *, is_reading: bool = False) -> Iterator[sa.Connection]:
        try:
            with self._engine.execution_options(**{IS_READING: is_reading}).begin() as connection:
                yield connection
        except HadalError:
            raise
        except (
            exc.DataError,
            exc.IntegrityError,
            OverflowError,
            ValueError,
        ) as error:  # A value is too large, not text, ...
            raise FactsRefused(f"{self.place}: {_reason(error)}") from error
        except exc.SQLAlchemyError as error:
            raise self._sorted(error) from error

    def _sorted(self, error: exc.SQLAlchemyError) -> HadalError:
        reason = _reason(error)
        if "is not a database" in reason:
            return LedgerError("it is not a SQLite file. Give the ledger another path.")
        return StoreDown(f"{self.place}: {reason}")


def _reason(error: Exception) -> str:
    """Return the first line of the driver's error, without the statement and its values."""
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().split("\n", 1)[0]


def _close_to_others(path: Path) -> None:
    """Make the ledger private to its owner, even if it or its folder existed before: it records how
    much each tenant asked, and when.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.close(open_private(path, os.O_WRONLY | os.O_EXCL))
        # Do not open an existing file: closing it would drop SQLite's locks on it in this process.
        for beside in (
            path,
            path.with_name(f"{path.name}-wal"),
            path.with_name(f"{path.name}-shm"),
        ):
            with contextlib.suppress(FileNotFoundError):
                take_from_others(beside)
    except OSError as error:
        log.warning("%s may be readable by other users: %s", path, error.strerror)


def engine_of(url: str) -> sa.Engine:
    """Make an engine with one connection to the database. It takes turns with other processes'
    connections, and all its waits are bounded.
    """
    return _sqlite(url) if file_of(url) is not None else _postgresql(url)


def _sqlite(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=1, max_overflow=0, connect_args={"timeout": BUSY_S})

    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # `take_lock` sends BEGIN.
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def take_lock(connection: sa.Connection) -> None:
        # A reading transaction sees one snapshot, and no writer waits for it.
        is_reading = connection.get_execution_options().get(IS_READING)
        connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")

    return engine


def _postgresql(url: str) -> sa.Engine:
    """Make an engine with bounded waits: for a connection, a statement, or a silent peer."""
    milliseconds = round(STATEMENT_S * 1e3)
    return sa.create_engine(
        url,
        pool_size=1,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": round(CONNECT_S),
            "tcp_user_timeout": milliseconds,
            "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
        },
    )
