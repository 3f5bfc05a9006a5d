"""Tables of the ledger and queries on them, over a given connection to SQLite or PostgreSQL.

A request's row is written once: a repeated fact changes nothing. A different fact under the same id
is refused and reported, regardless of the writing process and time. Times are whole microseconds,
charges whole pico-dollars, prices of GPU-hours whole micro-dollars. runtime/ledger/store manages
engines, files and threads; every function here runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from hadal.core.errors import ConfigError
from hadal.core.facts import (
    BATCH_MODEL,
    CANCELLED,
    FINISHES,
    REFUSALS,
    NodesFact,
    RequestFact,
    micros,
)
from hadal.stats.prices import BUCKET_US, DAY_S, HOUR_S
from hadal.stats.report import HOUR, MODEL, QUANTILES, TENANT, Detail, Details, check_by
from hadal.stats.tally import COUNTERS, Counts, Key, Tally
from hadal.stats.usage import WorkSpan

SCHEMA = 1
"""Version of the tables, raised whenever a table changes. A ledger of another version is not touched."""
MAX_ROWS = 500
"""Maximum number of rows of one statement."""
_LOCK = 0x4841444C
"""PostgreSQL's advisory lock during creation of the tables ("HADL")."""

metadata = sa.MetaData()
_schema = sa.Table("hadal_schema", metadata, sa.Column("version", sa.Integer, primary_key=True))
_requests = sa.Table(
    "hadal_requests",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("tokens_hit", sa.BigInteger, nullable=False),
    sa.Column("tokens_miss", sa.BigInteger, nullable=False),
    sa.Column("tokens_out", sa.BigInteger, nullable=False),
    sa.Column("kv_tokens", sa.BigInteger, nullable=False),
    sa.Column("end", sa.Text, nullable=False),
    sa.Column("received_us", sa.BigInteger, nullable=False),
    sa.Column("completed_us", sa.BigInteger, nullable=False, index=True),
    sa.Column("first_token_us", sa.BigInteger),
    sa.Column("last_token_us", sa.BigInteger),
    sa.Column("prefill_unit", sa.Text, nullable=False),
    sa.Column("decode_unit", sa.Text, nullable=False),
    sa.Column("num_retries", sa.BigInteger, nullable=False),
    sa.Column("income_pico_usd", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
_nodes = sa.Table(
    "hadal_nodes",
    metadata,
    sa.Column("unit", sa.Text, primary_key=True),
    sa.Column("epoch", sa.Text, primary_key=True),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("num_ranks", sa.Integer, nullable=False),
    sa.Column("ranks_per_node", sa.Integer, nullable=False),
    sa.Column("from_us", sa.BigInteger, nullable=False),
    sa.Column("to_us", sa.BigInteger, nullable=False, index=True),
    sa.Column("gpu", sa.Text, nullable=False),
    sa.Column("gpu_hour_micro_usd", sa.BigInteger, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sqlite_with_rowid=False,
)
_tallies = sa.Table(
    "hadal_tallies",
    metadata,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("bucket", sa.BigInteger, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, primary_key=True),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTERS),
    sqlite_with_rowid=False,
)


class LedgerError(ConfigError):
    """Error for a database that cannot be used as this ledger; the message says what to do."""


@dataclass(frozen=True)
class Written:
    """Result of writing request facts."""

    num_new: int = 0
    num_same: int = 0
    """Facts that were already recorded, or given before, with equal values."""
    refused_ids: tuple[str, ...] = ()
    """Ids already recorded, or given before, with different values; the first are kept."""


def prepare(connection: sa.Connection) -> None:
    """Create the tables if they do not exist. Raises LedgerError for a ledger of another schema."""
    if (
        connection.dialect.name == "postgresql"
    ):  # SQLite's transaction already locks the whole database.
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    if not sa.inspect(connection).has_table(_schema.name):
        metadata.create_all(connection)
        connection.execute(_schema.insert(), {"version": SCHEMA})
    check_schema(connection)


def check_schema(connection: sa.Connection) -> None:
    """Raise LedgerError unless the database has a ledger of this schema."""
    if not sa.inspect(connection).has_table(_schema.name):
        raise LedgerError("it holds no ledger.")
    versions = [version for (version,) in connection.execute(sa.select(_schema.c.version))]
    if versions != [SCHEMA]:
        found = ", ".join(map(str, versions)) or "none"
        raise LedgerError(
            f"it is a ledger of schema {found}, and this Hadal writes and reads schema {SCHEMA}."
            " Use the Hadal that wrote it, or another ledger."
        )


def write_requests(connection: sa.Connection, facts: Iterable[RequestFact]) -> Written:
    """Write each fact once, even if it is given repeatedly."""
    id_to_row: dict[str, dict[str, Any]] = {}
    num_same, refused = 0, []
    for fact in facts:
        row = _request_row(fact)
        if (first := id_to_row.setdefault(fact.request_id, row)) is not row:
            num_same += first == row
            refused += [fact.request_id] * (first != row)
    num_new = 0
    # Sorted ids give all writers the same lock order, so that they cannot deadlock.
    ids = sorted(id_to_row)
    for start in range(0, len(ids), MAX_ROWS):
        rows = [id_to_row[one] for one in ids[start : start + MAX_ROWS]]
        insert = (
            _insert(connection, _requests)
            .on_conflict_do_nothing()
            .returning(_requests.c.request_id)
        )
        new = {request_id for (request_id,) in connection.execute(insert, rows)}
        num_new += len(new)
        old = [row for row in rows if row["request_id"] not in new]
        if old:
            kept = _rows_by_id(connection, [row["request_id"] for row in old])
            differ = [row["request_id"] for row in old if kept.get(row["request_id"]) != row]
            refused += differ
            num_same += len(old) - len(differ)
    return Written(num_new, num_same, tuple(refused))


def write_nodes(connection: sa.Connection, facts: Iterable[NodesFact]) -> None:
    """Write intervals; a known interval is extended to include the new one."""
    for fact in sorted(facts, key=lambda fact: (fact.unit, fact.epoch)):
        insert = _insert(connection, _nodes).values(_nodes_row(fact))
        to_us, from_us = insert.excluded.to_us, insert.excluded.from_us
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=[_nodes.c.unit, _nodes.c.epoch],
                set_={
                    "from_us": sa.case(
                        (from_us < _nodes.c.from_us, from_us), else_=_nodes.c.from_us
                    ),
                    "to_us": sa.case((to_us > _nodes.c.to_us, to_us), else_=_nodes.c.to_us),
                },
            )
        )


def write_tally(connection: sa.Connection, batch_id: str, tally: Tally) -> int:
    """Add counters of facts that have no rows; a tally with a known `batch_id` is not added again.

    Returns the number of added rows. All counters of one `batch_id` must be written in one call.
    """
    known = sa.select(_tallies.c.batch_id).where(_tallies.c.batch_id == batch_id).limit(1)
    if connection.execute(known).first() is not None:
        return 0
    rows = [
        {
            "batch_id": batch_id,
            **key._asdict(),
            **{name: getattr(counts, name) for name in COUNTERS},
        }
        for key, counts in tally
    ]
    for start in range(0, len(rows), MAX_ROWS):
        connection.execute(_tallies.insert(), rows[start : start + MAX_ROWS])
    return len(rows)


def read_tally(connection: sa.Connection, from_us: int, to_us: int) -> Tally:
    """Return the sums of generations completed in [from_us, to_us). Counters of `write_tally` count
    if their quarter hour begins in that window.
    """
    tally = Tally()
    of = _requests.c
    bucket = (of.completed_us // BUCKET_US).label("bucket")
    is_finished, is_cancelled = of.end.in_(FINISHES), of.end == CANCELLED
    is_unbilled = of.tokens_hit + of.tokens_miss + of.tokens_out == 0
    is_refused = sa.and_(of.end.in_(REFUSALS), is_unbilled, of.prefill_unit == "")
    sums: dict[str, sa.ColumnElement[int]] = {
        "num_requests": sa.func.count(),
        "num_finished": _count(is_finished),
        "num_cancelled": _count(is_cancelled),
        "num_refused": _count(is_refused),
        "num_failed": _count(sa.not_(sa.or_(is_finished, is_cancelled, is_refused))),
        "tokens_after_first": sa.func.sum(sa.case((of.tokens_out > 1, of.tokens_out - 1), else_=0)),
        "stream_us": sa.func.sum(sa.func.coalesce(of.last_token_us - of.first_token_us, 0)),
    }
    columns = [sums[name] if name in sums else sa.func.sum(of[name]) for name in COUNTERS]
    rows = connection.execute(
        sa.select(bucket, of.model, of.tenant, *columns)
        .where(of.completed_us >= from_us, of.completed_us < to_us)
        .group_by(bucket, of.model, of.tenant)
    )
    _add_rows(tally, rows)
    batches = sa.select(
        _tallies.c.bucket,
        _tallies.c.model,
        _tallies.c.tenant,
        *(_tallies.c[name] for name in COUNTERS),
    ).where(_tallies.c.bucket >= -(-from_us // BUCKET_US), _tallies.c.bucket * BUCKET_US < to_us)
    _add_rows(tally, connection.execute(batches))
    return tally


def read_details(
    connection: sa.Connection, from_us: int, to_us: int, *, by: str = HOUR, utc_offset_s: int = 0
) -> Details:
    """Return quantiles and errors of generations completed in [from_us, to_us) that have rows, not
    of those in `write_tally`.

    Raises ValueError for an unknown `by`.
    """
    check_by(by)
    of = _requests.c
    hour = (of.completed_us + utc_offset_s * 1_000_000) // (HOUR_S * 1_000_000)
    key = {HOUR: hour, MODEL: of.model, TENANT: of.tenant}[by]
    within = sa.and_(of.completed_us >= from_us, of.completed_us < to_us)
    total = _details(connection, sa.literal(0), within).get(0, Detail())
    return Details(total, _details(connection, key, within))


def _details(
    connection: sa.Connection, key: sa.ColumnElement[Any], within: sa.ColumnElement[bool]
) -> dict[Any, Detail]:
    of = _requests.c
    ttft_us = of.first_token_us - of.received_us
    tpot_ns = (
        (of.last_token_us - of.first_token_us)
        * 1000
        // sa.case((of.tokens_out > 1, of.tokens_out - 1))
    )
    key_to_ttft, key_to_tpot = (
        _quantiles(connection, key, value, within) for value in (ttft_us, tpot_ns)
    )
    rows = (
        sa.select(key.label("key"), of.end)
        .where(within, of.end.not_in((*FINISHES, CANCELLED)))
        .subquery()
    )
    ends = sa.select(rows.c.key, rows.c.end, sa.func.count()).group_by(rows.c.key, rows.c.end)
    key_to_errors: dict[Any, dict[str, int]] = {}
    for found, end, number in connection.execute(ends.order_by(rows.c.key, rows.c.end)):
        key_to_errors.setdefault(found, {})[end] = int(number)
    return {
        found: Detail(
            key_to_ttft.get(found, ()), key_to_tpot.get(found, ()), key_to_errors.get(found, {})
        )
        for found in key_to_ttft | key_to_tpot | key_to_errors
    }


def _quantiles(
    connection: sa.Connection,
    key: sa.ColumnElement[Any],
    value: sa.ColumnElement[int],
    within: sa.ColumnElement[bool],
) -> dict[Any, tuple[int, ...]]:
    """Return key -> nearest-rank QUANTILES of the existing values: the p-th of N is the ceil(p N /
    100)-th smallest.
    """
    rows = sa.select(key.label("key"), value.label("value")).where(within).subquery()
    position = (
        sa.func.row_number().over(partition_by=rows.c.key, order_by=rows.c.value).label("position")
    )
    number = sa.func.count().over(partition_by=rows.c.key).label("number")
    ranked = (
        sa.select(rows.c.key, rows.c.value, position, number)
        .where(rows.c.value.is_not(None))
        .subquery()
    )
    wanted = [(ranked.c.number * percent + 99) // 100 for percent in QUANTILES]
    key_to_values: dict[Any, tuple[int, ...]] = {}
    found = sa.select(ranked.c.key, ranked.c.value, ranked.c.position, *wanted).where(
        ranked.c.position.in_(wanted)
    )
    for one, least, at, *positions in connection.execute(
        found.order_by(ranked.c.key, ranked.c.position)
    ):
        values = key_to_values.setdefault(one, ())
        key_to_values[one] = values + (int(least),) * positions.count(at)
    return key_to_values


def read_spans(connection: sa.Connection, from_us: int, to_us: int) -> list[WorkSpan]:
    """Return the times on units of generations with a first token that ended after `from_us` and
    arrived before `to_us`. The times are not cut to that window.
    """
    of = _requests.c
    spans = []
    for (
        tenant,
        model,
        prefill,
        decode,
        received_us,
        first_us,
        last_us,
        miss,
        out,
    ) in connection.execute(
        sa.select(
            of.tenant,
            of.model,
            of.prefill_unit,
            of.decode_unit,
            of.received_us,
            of.first_token_us,
            of.last_token_us,
            of.tokens_miss,
            of.tokens_out,
        ).where(of.completed_us > from_us, of.received_us < to_us, of.first_token_us.is_not(None))
    ):
        model = model.removesuffix(
            BATCH_MODEL
        )  # Units serve batches and other requests under one model name.
        spans.append(WorkSpan(prefill, model, tenant, received_us, first_us, miss))
        spans.append(WorkSpan(decode, model, tenant, first_us, last_us, out))
    return spans


def read_nodes(connection: sa.Connection, from_us: int, to_us: int) -> list[NodesFact]:
    """Return the intervals that overlap [from_us, to_us), not cut to it."""
    rows = connection.execute(
        sa.select(_nodes)
        .where(_nodes.c.to_us > from_us, _nodes.c.from_us < to_us)
        .order_by(_nodes.c.from_us, _nodes.c.unit, _nodes.c.epoch)
    ).mappings()
    return [
        NodesFact(
            **{
                **{name: value for name, value in row.items() if name not in ("from_us", "to_us")},
                "from_s": row["from_us"] / 1e6,
                "to_s": row["to_us"] / 1e6,
            }
        )
        for row in rows
    ]


def read_spent(
    connection: sa.Connection, day: int, tenants: Collection[str], recent_us: int, ids: list[str]
) -> tuple[dict[str, int], list[str], set[str]]:
    """Return (charges of the tenants in a UTC day, 0 for none; ids of their requests completed
    since `recent_us`; those of `ids` that are recorded).
    """
    of, day_us = _requests.c, DAY_S * 1_000_000
    its = of.tenant.in_(sorted(tenants))
    sums = dict.fromkeys(tenants, 0)
    found = connection.execute(
        sa.select(of.tenant, sa.func.sum(of.income_pico_usd))
        .where(its, of.completed_us >= day * day_us, of.completed_us < (day + 1) * day_us)
        .group_by(of.tenant)
    )
    sums |= {tenant: int(pico_usd) for tenant, pico_usd in found}
    recent = connection.execute(sa.select(of.request_id).where(its, of.completed_us >= recent_us))
    had: set[str] = set()
    for start in range(0, len(ids), MAX_ROWS):
        had |= _rows_by_id(connection, ids[start : start + MAX_ROWS]).keys()
    return sums, [request_id for (request_id,) in recent], had


def last_completed_us(connection: sa.Connection) -> int | None:
    """Return the completion time of the last request; None if there is none."""
    newest = connection.execute(sa.select(sa.func.max(_requests.c.completed_us))).scalar()
    return None if newest is None else int(newest)


def _add_rows(tally: Tally, rows: Iterable[Sequence[Any]]) -> None:
    for bucket, model, tenant, *values in rows:
        # PostgreSQL returns sums of big integers as decimals.
        counters = {name: int(value) for name, value in zip(COUNTERS, values, strict=True)}
        tally.add_counts(Key(int(bucket), model, tenant), Counts(**counters))


def _count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.sum(sa.case((condition, 1), else_=0))


def _rows_by_id(connection: sa.Connection, ids: list[str]) -> dict[str, dict[str, Any]]:
    rows = connection.execute(
        sa.select(_requests).where(_requests.c.request_id.in_(ids))
    ).mappings()
    return {row["request_id"]: dict(row) for row in rows}


def _insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """Return the dialect's insert; both dialects spell "on conflict" alike."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _request_row(fact: RequestFact) -> dict[str, Any]:
    return {
        "request_id": fact.request_id,
        "tenant": fact.tenant,
        "model": fact.model,
        "tokens_hit": fact.tokens_hit,
        "tokens_miss": fact.tokens_miss,
        "tokens_out": fact.tokens_out,
        "kv_tokens": fact.kv_tokens,
        "end": fact.end,
        "received_us": micros(fact.received_s),
        "completed_us": micros(fact.completed_s),
        "first_token_us": _micros(fact.first_token_s),
        "last_token_us": _micros(fact.last_token_s),
        "prefill_unit": fact.prefill_unit,
        "decode_unit": fact.decode_unit,
        "num_retries": fact.num_retries,
        "income_pico_usd": fact.income_pico_usd,
    }


def _nodes_row(fact: NodesFact) -> dict[str, Any]:
    return {
        "unit": fact.unit,
        "epoch": fact.epoch,
        "role": fact.role,
        "num_ranks": fact.num_ranks,
        "ranks_per_node": fact.ranks_per_node,
        "from_us": micros(fact.from_s),
        "to_us": micros(fact.to_s),
        "gpu": fact.gpu,
        "gpu_hour_micro_usd": fact.gpu_hour_micro_usd,
        "model": fact.model,
    }


def _micros(time_s: float | None) -> int | None:
    return None if time_s is None else micros(time_s)
