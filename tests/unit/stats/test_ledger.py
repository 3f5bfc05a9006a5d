"""The ledger's tables in an in-memory SQLite. tests/dist has real files and PostgreSQL."""

from collections.abc import Iterator

import msgspec
import pytest
import sqlalchemy as sa

from hadal.core.facts import BATCH_MODEL, NodesFact, RequestFact, micros
from hadal.stats import ledger
from hadal.stats.ledger import MAX_ROWS, LedgerError, Written
from hadal.stats.prices import BUCKET_US
from hadal.stats.tally import Tally

from .facts import START_S, details_of, random_facts

ALWAYS = (0, 2**60)


@pytest.fixture
def connection() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as open_one:
        ledger.prepare(open_one)
        yield open_one
    engine.dispose()


def tally_of(facts: list[RequestFact]) -> Tally:
    tally = Tally()
    tally.add_facts(facts)
    return tally


def test_the_database_adds_up_as_the_tally_does(connection: sa.Connection) -> None:
    """Compare every counter of each quarter hour, model and tenant."""
    facts = random_facts(1, 2 * MAX_ROWS + 7)
    assert ledger.write_requests(connection, facts) == Written(len(facts))
    assert ledger.read_tally(connection, *ALWAYS) == tally_of(facts)


def test_a_window_holds_what_completed_in_it_to_the_microsecond(connection: sa.Connection) -> None:
    facts = random_facts(2, 300)
    ledger.write_requests(connection, facts)
    times = sorted(micros(fact.completed_s) for fact in facts)
    first_us, last_us = times[50], times[200]
    within = [fact for fact in facts if first_us <= micros(fact.completed_s) < last_us]
    assert len(within) == 150
    assert ledger.read_tally(connection, first_us, last_us) == tally_of(within)
    assert ledger.last_completed_us(connection) == times[-1]


@pytest.mark.parametrize("number", [1, 2, 99, 100, 101, 1000])
def test_quantiles_and_errors_of_every_line(connection: sa.Connection, number: int) -> None:
    facts = random_facts(number, number)
    ledger.write_requests(connection, facts)
    offset_s = 8 * 3600
    for by, key in (
        ("model", lambda fact: fact.model),
        ("tenant", lambda fact: fact.tenant),
        ("hour", lambda fact: (micros(fact.completed_s) + offset_s * 10**6) // (3600 * 10**6)),
    ):
        seen = ledger.read_details(connection, *ALWAYS, by=by, utc_offset_s=offset_s)
        assert seen == details_of(facts, key)
    times = sorted(micros(fact.completed_s) for fact in facts)
    within = [fact for fact in facts if micros(fact.completed_s) < times[-1]]
    found = ledger.read_details(connection, 0, times[-1]).total
    assert found == details_of(within, lambda fact: 0).total
    with pytest.raises(ValueError, match="by hour, model, tenant"):
        ledger.read_details(connection, *ALWAYS, by="day")


@pytest.mark.promise(
    "A fact that arrives twice counts once. A different fact with the id of a stored "
    "one is refused, logged and counted"
)
def test_said_again_a_fact_counts_once(connection: sa.Connection) -> None:
    facts = random_facts(3, 100)
    assert ledger.write_requests(connection, [*facts, *facts[:10]]) == Written(100, 10)
    assert ledger.write_requests(connection, facts) == Written(0, 100)
    assert ledger.read_tally(connection, *ALWAYS) == tally_of(facts)


@pytest.mark.promise(
    "A fact that arrives twice counts once. A different fact with the id of a stored "
    "one is refused, logged and counted"
)
@pytest.mark.parametrize(
    "change",
    [
        {"tokens_out": 3},
        {"tenant": "other"},
        {"completed_s": START_S + 9},
        {"last_token_s": START_S + 2.000001},
        {"decode_unit": "decode-1"},
        {"income_pico_usd": 1},
        {"end": "length"},
    ],
)
@pytest.mark.parametrize("is_together", [True, False])
def test_another_fact_under_a_known_id_is_refused(
    connection: sa.Connection, change: dict[str, object], is_together: bool
) -> None:
    first = RequestFact(
        "r", "t", "m", 1, 2, 2, 7, "stop", START_S, START_S + 3, START_S + 1, START_S + 2, "p", "d"
    )
    other = msgspec.structs.replace(first, **change)
    if is_together:
        assert ledger.write_requests(connection, [first, other]) == Written(1, 0, ("r",))
    else:
        ledger.write_requests(connection, [first])
        assert ledger.write_requests(connection, [other, other]) == Written(0, 1, ("r",))
    assert ledger.read_tally(connection, *ALWAYS) == tally_of([first])


def test_an_interval_grows_and_never_shrinks(connection: sa.Connection) -> None:
    def up(from_s: float, to_s: float, unit: str = "decode-0", epoch: str = "a") -> NodesFact:
        return NodesFact(unit, epoch, "decode", 2, 8, from_s, to_s, "cpu", 2_000_000, "m")

    ledger.write_nodes(connection, [up(100.0, 100.0), up(100.0, 120.0), up(100.0, 110.0)])
    ledger.write_nodes(
        connection, [up(90.0, 95.0), up(300.0, 310.0, epoch="b"), up(100.0, 101.0, "decode-1")]
    )
    found = ledger.read_nodes(connection, *ALWAYS)
    assert found == [up(90.0, 120.0), up(100.0, 101.0, "decode-1"), up(300.0, 310.0, epoch="b")]
    assert ledger.read_nodes(connection, 120_000_000, 300_000_001) == [up(300.0, 310.0, epoch="b")]
    assert ledger.read_nodes(connection, 120_000_000, 300_000_000) == []


def test_what_batches_used_of_a_unit_was_its_model_s(connection: sa.Connection) -> None:
    times = (START_S, START_S + 3, START_S + 1, START_S + 2)
    fact = RequestFact("r", "t", f"m{BATCH_MODEL}", 1, 2, 2, 7, "stop", *times, "p", "d")
    ledger.write_requests(connection, [fact])
    spans = ledger.read_spans(connection, *ALWAYS)
    found = [(span.unit, span.model, span.tenant) for span in spans]
    assert found == [("p", "m", "t"), ("d", "m", "t")]


def test_counters_are_added_once_by_batch(connection: sa.Connection) -> None:
    facts, own = random_facts(4, 200), random_facts(5, 50, prefix="own")
    tally = tally_of(facts)
    num_keys = len(list(tally))
    assert ledger.write_tally(connection, "day-1", tally) == num_keys
    assert ledger.write_tally(connection, "day-1", tally) == 0
    ledger.write_requests(connection, own)
    assert ledger.read_tally(connection, *ALWAYS) == tally_of([*facts, *own])
    ledger.write_tally(connection, "day-2", tally)
    assert ledger.read_tally(connection, *ALWAYS) == tally_of([*facts, *facts, *own])


def test_counters_belong_to_the_window_their_quarter_hour_begins_in(
    connection: sa.Connection,
) -> None:
    tally = tally_of(random_facts(6, 200))
    ledger.write_tally(connection, "b", tally)
    bucket = sorted(key.bucket for key, _ in tally)[20]
    read = ledger.read_tally(connection, bucket * BUCKET_US, (bucket + 1) * BUCKET_US)
    assert {key.bucket for key, _ in read} == {bucket}
    found = list(ledger.read_tally(connection, bucket * BUCKET_US + 1, (bucket + 1) * BUCKET_US))
    assert found == []


def test_no_ledger_and_other_schemas_are_told_apart() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        with pytest.raises(LedgerError, match="holds no ledger"):
            ledger.check_schema(connection)
        ledger.prepare(connection)
        ledger.prepare(connection)
        connection.execute(sa.text("UPDATE hadal_schema SET version = 99"))
        with pytest.raises(
            LedgerError, match=r"schema 99, and this Hadal writes and reads schema 1\. Use"
        ):
            ledger.prepare(connection)
    engine.dispose()
