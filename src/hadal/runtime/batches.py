"""Files and batches of tenants, in SQLite or PostgreSQL: each batch's lines, and their answers.

    validating --begin: a row for each line--> in_progress --all answered--> finalizing --> completed
        └──> failed                                 ├──> cancelling ──> cancelled
                                                    └──> expired

A validating batch may also be cancelled or expire. A line's answer is written once; a second write
changes nothing. So no custom_id is in the output files twice, even after crashes; only the lines
not answered before a cancellation are missing. A line's cost is written in the same transaction and
dropped once the ledger has it. A batch ends in one transaction, which makes its output files, sets
its status and drops its lines. Contents are stored in the database in pieces, so that gateways on
every host can read them. The store connects, and makes the tables, at its first use. Does not
depend on HTTP or the model. Not thread-safe: one thread at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from hadal.core.errors import HadalError
from hadal.core.facts import RequestFact
from hadal.runtime.ledger.address import file_of, ledger_url
from hadal.runtime.ledger.store import IS_READING, engine_of
from hadal.runtime.process.private import open_private

PIECE_BYTES = 1 << 20
VALIDATING, IN_PROGRESS, FAILED = "validating", "in_progress", "failed"
CANCELLING, CANCELLED = "cancelling", "cancelled"
FINALIZING, COMPLETED, EXPIRED = "finalizing", "completed", "expired"
OPEN = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
"""Statuses of batches that have not ended."""
_FROM = {
    IN_PROGRESS: (VALIDATING,),
    FAILED: (VALIDATING,),
    CANCELLING: (VALIDATING, IN_PROGRESS),
    CANCELLED: (CANCELLING,),
    FINALIZING: (IN_PROGRESS,),
    COMPLETED: (FINALIZING,),
    EXPIRED: (VALIDATING, IN_PROGRESS),
}
"""Status -> statuses that it may follow."""
_LOCK = 0x48414442
"""First half of PostgreSQL's advisory lock keys here ("HADB")."""
MAX_CHARGES = 4096
"""Largest number of charges (costs of written lines) per read."""
BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of files: an upload for a batch, and a file that a batch has made."""


class _Name(sa.TypeDecorator[str]):
    """Column for clients' texts. U+FFFD replaces null characters, which PostgreSQL rejects."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd")


_tables = sa.MetaData()
_files = sa.Table(
    "hadal_batch_files",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("id", _Name(64), unique=True, nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False, index=True),
    sa.Column("purpose", _Name(32), nullable=False),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_s", sa.BigInteger, nullable=False),
)
_pieces = sa.Table(
    "hadal_batch_file_pieces",
    _tables,
    sa.Column("file_id", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
_batches = sa.Table(
    "hadal_batches",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("id", _Name(64), unique=True, nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False, index=True),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", _Name(64), nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("status", sa.String(16), nullable=False, index=True),
    sa.Column("created_s", sa.BigInteger, nullable=False),
    sa.Column("expires_s", sa.BigInteger, nullable=False),
    sa.Column("times", sa.Text, nullable=False),
    sa.Column("errors", sa.Text, nullable=False),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("num_total", sa.Integer, nullable=False),
    sa.Column("num_completed", sa.Integer, nullable=False),
    sa.Column("num_failed", sa.Integer, nullable=False),
)
_lines = sa.Table(
    "hadal_batch_lines",
    _tables,
    sa.Column("batch_id", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("custom_id", sa.String(512), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("answer", sa.LargeBinary),
    sa.Column("is_error", sa.Boolean, nullable=False, default=False),
    sa.UniqueConstraint("batch_id", "custom_id"),
)
_charges = sa.Table(
    "hadal_batch_charges",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("request_id", sa.String(128), unique=True, nullable=False),
    sa.Column("fact", sa.LargeBinary, nullable=False),
)
_encode_fact = msgspec.msgpack.Encoder().encode
_decode_fact = msgspec.msgpack.Decoder(RequestFact).decode


class BatchesDown(HadalError):
    """The database failed or is unavailable now; a later retry may succeed."""


@dataclass(frozen=True)
class FileRow:
    """A file, without its contents."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: int


@dataclass(frozen=True)
class BatchRow:
    """Current state of a batch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str]
    status: str
    created_s: int
    expires_s: int
    times: dict[str, int]
    """Status after VALIDATING -> time at which the batch reached it, in unix seconds."""
    errors: list[dict[str, Any]]
    output_file_id: str | None
    error_file_id: str | None
    num_total: int
    num_completed: int
    num_failed: int


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch."""

    number: int
    custom_id: str
    body: bytes


def batches_url(asked: str, ledger: str, port: int) -> str:
    """Return the database URL of batches, or "" for none. `asked` is a setting as in ledger_url;
    "auto" or "": beside the ledger, in a file or in its server's database. Raises LedgerError.

    Servers may share a ledger, but not batches: another server has other tenants and models. So the
    file name contains this server's `port`.
    """
    if asked not in ("", "auto"):
        return ledger_url(asked)
    url = ledger_url(ledger)
    path = file_of(url) if url else None
    return ledger_url(str(path.with_name(f"batches-{port}.sqlite"))) if path is not None else url


class BatchStore:
    """All files and batches of a deployment. Methods raise BatchesDown."""

    def __init__(self, url: str) -> None:
        self._path = file_of(url)
        self._engine = engine_of(url)
        self._is_prepared = False

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    # ---- files ----
    def add_file(self, row: FileRow, contents: Iterable[bytes], most_bytes: int) -> FileRow | None:
        """Store a file; `num_bytes` is counted here. Return None, and store nothing, if the
        tenant's files would have more than `most_bytes` together.
        """
        with self._begin() as connection:
            kept = _add_file(connection, row, contents)
            _lock(connection, row.tenant)  # Two concurrent uploads must count each other.
            if _num_bytes(connection, row.tenant) <= most_bytes:
                return kept
            connection.rollback()
            return None

    def file(self, tenant: str, file_id: str) -> FileRow | None:
        """Return a tenant's file; None if the tenant has none with this id."""
        chosen = (_files.c.id == file_id) & (_files.c.tenant == tenant)
        with self._begin(is_reading=True) as connection:
            found = connection.execute(sa.select(_files).where(chosen)).one_or_none()
        return None if found is None else _file_of(found)

    def files(
        self, tenant: str, purpose: str, after: str, limit: int, *, is_ascending: bool
    ) -> list[FileRow] | None:
        """Return a page of a tenant's files, oldest or newest first; None if it has no `after`."""
        chosen = _files.c.tenant == tenant
        if purpose:
            chosen &= _files.c.purpose == purpose
        rows = self._page(_files, tenant, chosen, after, limit, is_ascending=is_ascending)
        return None if rows is None else [_file_of(row) for row in rows]

    def num_bytes(self, tenant: str) -> int:
        """Return the bytes of all of a tenant's files."""
        with self._begin(is_reading=True) as connection:
            return _num_bytes(connection, tenant)

    def contents(self, file_id: str) -> Iterator[bytes]:
        """Yield a file's pieces, in order."""
        number = 0
        while True:
            chosen = (_pieces.c.file_id == file_id) & (_pieces.c.number == number)
            with self._begin(is_reading=True) as connection:
                data = connection.execute(sa.select(_pieces.c.data).where(chosen)).scalar()
            if data is None:
                return
            yield data
            number += 1

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a tenant's file; False if there is none. Batches that have begun have a copy."""
        with self._begin() as connection:
            chosen = (_files.c.id == file_id) & (_files.c.tenant == tenant)
            if not connection.execute(sa.delete(_files).where(chosen)).rowcount:
                return False
            connection.execute(sa.delete(_pieces).where(_pieces.c.file_id == file_id))
            return True

    # ---- batches ----
    def add_batch(self, row: BatchRow) -> None:
        """Store a new batch."""
        with self._begin() as connection:
            connection.execute(sa.insert(_batches), _values_of(row))

    def batch(self, tenant: str, batch_id: str) -> BatchRow | None:
        """Return a tenant's batch; None if the tenant has none with this id."""
        chosen = (_batches.c.id == batch_id) & (_batches.c.tenant == tenant)
        with self._begin(is_reading=True) as connection:
            found = connection.execute(sa.select(_batches).where(chosen)).one_or_none()
        return None if found is None else _batch_of(found)

    def batches(self, tenant: str, after: str, limit: int) -> list[BatchRow] | None:
        """Return a page of a tenant's batches, newest first; None if it has no batch `after`."""
        chosen = _batches.c.tenant == tenant
        rows = self._page(_batches, tenant, chosen, after, limit, is_ascending=False)
        return None if rows is None else [_batch_of(row) for row in rows]

    def open_batches(self) -> list[BatchRow]:
        """Return the batches of all tenants that have not ended, oldest first."""
        chosen = sa.select(_batches).where(_batches.c.status.in_(OPEN)).order_by(_batches.c.number)
        with self._begin(is_reading=True) as connection:
            return [_batch_of(row) for row in connection.execute(chosen)]

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRow | None:
        """Cancel a validating or running batch: no more of its lines begin. Return the batch,
        unchanged in any other status; None if the tenant has no such batch.
        """
        with self._begin() as connection:
            chosen = (_batches.c.id == batch_id) & (_batches.c.tenant == tenant)
            if connection.execute(sa.select(_batches.c.id).where(chosen)).scalar() is None:
                return None
            _move(connection, batch_id, CANCELLING, now_s)
        return self.batch(tenant, batch_id)

    def fail(self, batch: BatchRow, errors: list[dict[str, Any]], now_s: int) -> None:
        """Mark a batch as failed because its input is invalid."""
        with self._begin() as connection:
            _move(connection, batch.id, FAILED, now_s, errors=_text(errors))

    def begin(self, batch: BatchRow, lines: Iterable[BatchLine], now_s: int) -> None:
        """Start a validated batch and store its lines, unless its status has changed meanwhile."""
        rows = [
            {
                "batch_id": batch.id,
                "number": line.number,
                "custom_id": line.custom_id,
                "body": line.body,
                "is_error": False,
            }
            for line in lines
        ]
        with self._begin() as connection:
            if _move(connection, batch.id, IN_PROGRESS, now_s, num_total=len(rows)):
                connection.execute(sa.insert(_lines), rows)

    def waiting(self, batch_id: str, after: int, limit: int) -> list[BatchLine]:
        """Return at most `limit` unanswered lines with numbers above `after`, in order."""
        chosen = (_lines.c.batch_id == batch_id) & (_lines.c.number > after)
        chosen &= _lines.c.answer.is_(None)
        columns = (_lines.c.number, _lines.c.custom_id, _lines.c.body)
        query = sa.select(*columns).where(chosen).order_by(_lines.c.number).limit(limit)
        with self._begin(is_reading=True) as connection:
            return [BatchLine(*row) for row in connection.execute(query)]

    def answer(
        self,
        batch_id: str,
        number: int,
        answer: bytes,
        *,
        is_error: bool,
        facts: Sequence[RequestFact] = (),
    ) -> bool:
        """Write a line's answer and its cost durably. Return False if it has an answer already or
        its batch has ended. After BatchesDown the write may have succeeded all the same.
        """
        mine = _batches.c.id == batch_id
        chosen = (_lines.c.batch_id == batch_id) & (_lines.c.number == number)
        values = {"answer": answer, "is_error": is_error}
        count = _batches.c.num_failed if is_error else _batches.c.num_completed
        with self._begin() as connection:
            # Lock the batch's row first, as `end` does, so that transactions cannot deadlock.
            held = sa.select(_batches.c.status).where(mine).with_for_update()
            if connection.execute(held).scalar() not in OPEN:
                return False
            update = sa.update(_lines).where(chosen & _lines.c.answer.is_(None)).values(values)
            if not connection.execute(update).rowcount:
                return False
            connection.execute(sa.update(_batches).where(mine).values({count.name: count + 1}))
            rows = [{"request_id": fact.request_id, "fact": _encode_fact(fact)} for fact in facts]
            if rows:
                connection.execute(sa.insert(_charges), rows)
            return True

    def charges(self) -> list[RequestFact]:
        """Return the costs of written lines that the ledger may still lack, the oldest MAX_CHARGES."""
        chosen = sa.select(_charges.c.fact).order_by(_charges.c.number).limit(MAX_CHARGES)
        with self._begin(is_reading=True) as connection:
            return [_decode_fact(fact) for fact in connection.execute(chosen).scalars()]

    def drop_charges(self, request_ids: Collection[str]) -> None:
        """Drop charges that the ledger has recorded."""
        ids = [{"its_id": request_id} for request_id in request_ids]
        known = sa.delete(_charges).where(_charges.c.request_id == sa.bindparam("its_id"))
        if ids:
            with self._begin() as connection:
                connection.execute(known, ids)

    def finalize(self, batch: BatchRow, now_s: int) -> None:
        """Mark a batch as answered: only its files remain to be made."""
        with self._begin() as connection:
            _move(connection, batch.id, FINALIZING, now_s)

    def end(
        self, batch: BatchRow, status: str, now_s: int, file_ids: tuple[str, str], expired: bytes
    ) -> BatchRow | None:
        """End a batch with the answers so far, and return it; None if its status cannot change to
        `status`. `file_ids` are the ids of its output and error files, made only if they have
        lines. `expired` is the answer for lines without one; b"" leaves such lines out.
        """
        mine = _batches.c.id == batch.id
        with self._begin() as connection:
            if not _move(connection, batch.id, status, now_s):
                return None
            if expired:
                late = (_lines.c.batch_id == batch.id) & _lines.c.answer.is_(None)
                num_late = connection.execute(
                    sa.update(_lines).where(late).values(answer=expired, is_error=True)
                ).rowcount
                num_failed = _batches.c.num_failed + num_late
                connection.execute(sa.update(_batches).where(mine).values(num_failed=num_failed))
            made: dict[str, str] = {}
            for is_error, name in ((False, "output_file_id"), (True, "error_file_id")):
                purpose_name = f"{batch.id}_{'error' if is_error else 'output'}.jsonl"
                row = FileRow(
                    file_ids[is_error], batch.tenant, BATCH_OUTPUT, purpose_name, 0, now_s
                )
                answers = _answers(connection, batch.id, is_error=is_error)
                first = next(answers, None)
                if first is not None:
                    made[name] = _add_file(connection, row, itertools.chain((first,), answers)).id
            connection.execute(sa.delete(_lines).where(_lines.c.batch_id == batch.id))
            if made:
                connection.execute(sa.update(_batches).where(mine).values(made))
        return self.batch(batch.tenant, batch.id)

    def forget(self, before_s: int) -> None:
        """Delete files, and ended batches, created before a time."""
        self._forget(_files.c.created_s < before_s, _batches.c.created_s < before_s)

    def forget_tenant(self, tenant: str) -> tuple[int, int, int]:
        """Delete a tenant's files and ended batches. Return the number of deleted files, of deleted
        batches, and of the tenant's batches that have not ended.
        """
        num_files, num_batches = self._forget(
            _files.c.tenant == tenant, _batches.c.tenant == tenant
        )
        left = sa.select(sa.func.count()).select_from(_batches).where(_batches.c.tenant == tenant)
        with self._begin(is_reading=True) as connection:
            return num_files, num_batches, int(connection.execute(left).scalar_one())

    def _forget(
        self, files: sa.ColumnElement[bool], batches: sa.ColumnElement[bool]
    ) -> tuple[int, int]:
        with self._begin() as connection:
            old = connection.execute(sa.select(_files.c.id).where(files)).scalars().all()
            for file_id in old:
                connection.execute(sa.delete(_pieces).where(_pieces.c.file_id == file_id))
                connection.execute(sa.delete(_files).where(_files.c.id == file_id))
            ended = sa.delete(_batches).where(_batches.c.status.notin_(OPEN) & batches)
            return len(old), connection.execute(ended).rowcount

    def _page(
        self,
        table: sa.Table,
        tenant: str,
        chosen: sa.ColumnElement[bool],
        after: str,
        limit: int,
        *,
        is_ascending: bool,
    ) -> list[Any] | None:
        number = table.c.number
        with self._begin(is_reading=True) as connection:
            if after:
                mine = (table.c.id == after) & (table.c.tenant == tenant)
                at = connection.execute(sa.select(number).where(mine)).scalar()
                if at is None:
                    return None
                chosen &= number > at if is_ascending else number < at
            order = number.asc() if is_ascending else number.desc()
            query = sa.select(table).where(chosen).order_by(order).limit(limit)
            return list(connection.execute(query))

    def _prepare(self) -> None:
        """Make the file and the tables if they are missing."""
        if self._path is not None:
            _make_private(self._path)
        with self._engine.begin() as connection:
            _lock(connection, "")
            _tables.create_all(connection)
        self._is_prepared = True

    @contextlib.contextmanager
    def _begin(self, *, is_reading: bool = False) -> Iterator[sa.Connection]:
        try:
            if not self._is_prepared:
                self._prepare()
            with self._engine.execution_options(**{IS_READING: is_reading}).begin() as connection:
                yield connection
        except (exc.SQLAlchemyError, OSError) as error:
            cause = getattr(error, "orig", None) or error
            raise BatchesDown(f"files and batches: {str(cause).splitlines()[0]}") from error


def _make_private(path: Path) -> None:
    """Make the file if it is missing, readable for its owner only: it holds tenants' requests."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        os.close(open_private(path, os.O_WRONLY | os.O_EXCL))


def _lock(connection: sa.Connection, name: str) -> None:
    """Lock a name until the transaction's end."""
    if connection.dialect.name == "postgresql":  # SQLite's transaction is exclusive already.
        asked = sa.text("SELECT pg_advisory_xact_lock(:key, hashtext(:name))")
        connection.execute(asked, {"key": _LOCK, "name": name})


def _num_bytes(connection: sa.Connection, tenant: str) -> int:
    summed = sa.select(sa.func.coalesce(sa.func.sum(_files.c.num_bytes), 0))
    return int(connection.execute(summed.where(_files.c.tenant == tenant)).scalar_one())


def _add_file(connection: sa.Connection, row: FileRow, contents: Iterable[bytes]) -> FileRow:
    num_bytes = 0
    for number, data in enumerate(_in_pieces(contents)):
        values = {"file_id": row.id, "number": number, "data": data}
        connection.execute(sa.insert(_pieces), values)
        num_bytes += len(data)
    row = replace(row, num_bytes=num_bytes)
    connection.execute(sa.insert(_files), row.__dict__)
    return row


def _in_pieces(contents: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for data in contents:
        held += data
        while len(held) >= PIECE_BYTES:
            yield bytes(held[:PIECE_BYTES])
            del held[:PIECE_BYTES]
    if held:
        yield bytes(held)


def _answers(connection: sa.Connection, batch_id: str, *, is_error: bool) -> Iterator[bytes]:
    """Yield the lines of an output or error file, reading 256 rows at a time. A stored answer is
    the text of its line after the custom_id.
    """
    after = -1
    while True:
        chosen = (_lines.c.batch_id == batch_id) & (_lines.c.number > after)
        chosen &= _lines.c.answer.isnot(None) & (_lines.c.is_error == is_error)
        columns = (_lines.c.number, _lines.c.custom_id, _lines.c.answer)
        query = sa.select(*columns).where(chosen).order_by(_lines.c.number).limit(256)
        rows = connection.execute(query).all()
        for number, custom_id, answer in rows:
            head = f'{{"id":"batch_req_{batch_id[6:]}_{number}","custom_id":'
            yield head.encode() + msgspec.json.encode(custom_id) + b"," + answer + b"}\n"
            after = number
        if not rows:
            return


def _move(connection: sa.Connection, batch_id: str, status: str, now_s: int, **values: Any) -> bool:
    """Change a batch's status, and lock its row until the transaction's end. False if its current
    status does not permit the new one.
    """
    chosen = _batches.c.id == batch_id
    query = sa.select(_batches.c.status, _batches.c.times).where(chosen)
    while (found := connection.execute(query).one_or_none()) and found.status in _FROM[status]:
        times = {**msgspec.json.decode(found.times), status: now_s}
        # Only if the status is still the one read: another gateway may have changed it meanwhile.
        moved = sa.update(_batches).where(chosen & (_batches.c.status == found.status))
        moved = moved.values(status=status, times=_text(times), **values)
        if connection.execute(moved).rowcount:
            return True
    return False


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _file_of(row: Any) -> FileRow:
    values = dict(row._mapping)
    del values["number"]
    return FileRow(**values)


def _batch_of(row: Any) -> BatchRow:
    values = dict(row._mapping)
    del values["number"]
    for name in ("metadata", "times", "errors"):
        values[name] = msgspec.json.decode(values[name])
    return BatchRow(**values)


def _values_of(row: BatchRow) -> dict[str, Any]:
    return {
        **row.__dict__,
        **{name: _text(getattr(row, name)) for name in ("metadata", "times", "errors")},
    }
