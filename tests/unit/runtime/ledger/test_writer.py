"""Test facts on their way into the ledger: callers never wait, nothing is lost while there is room,
and lost facts are counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hadal.core.facts import Fact, NodesFact, PackedFacts, RequestFact
from hadal.runtime.ledger.address import ledger_url, outbox_of
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import FactsRefused, Store, StoreDown
from hadal.runtime.ledger.writer import LedgerWriter
from hadal.stats.ledger import LedgerError, Written
from tests.unit.runtime.ledger.test_outbox import left_in
from tests.waiting import DEADLINE_S, join, wait_until

NEVER_S = (1000.0, 1000.0)
SOON_S = (0.001, 0.01)


def fact(request_id: str, tokens_in: int = 1) -> RequestFact:
    return RequestFact(request_id, "t", "m", 0, tokens_in, 0, 0, "504", 1.0, 2.0)


NODES = NodesFact("u", "e", "decode", 1, 8, 1.0, 2.0)


class FakeStore(Store):
    """Store that can be down, refuse facts, or block until `go` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ledger_url(str(folder / "l.sqlite")))
        self.is_down = False
        self.poison = ""
        self.go = threading.Event()
        self.go.set()
        self.tried = threading.Event()

    def prepare(self) -> None:
        if self.is_down:
            raise StoreDown("it is down")
        super().prepare()

    def write(self, facts: PackedFacts) -> Written:
        self.tried.set()
        assert self.go.wait(DEADLINE_S)
        if self.is_down:
            raise StoreDown("it is down")
        if any(one.request_id == self.poison for one in facts.requests):
            raise FactsRefused("it does not like one of them")
        return super().write(facts)

    def ids(self) -> set[str]:
        with self._begin() as connection:
            return {
                one
                for (one,) in connection.exec_driver_sql("SELECT request_id FROM hadal_requests")
            }


class Kept:
    """Facts that the writer reported as durable; tests wait for them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, facts: Sequence[Fact]) -> None:
        with self._changed:
            self.ids += [one.request_id for one in facts if isinstance(one, RequestFact)]
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ids) >= number, DEADLINE_S), self.ids


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def writer_of(
    store: FakeStore, kept: Kept, retry_s: tuple[float, float] = SOON_S, **more: int
) -> LedgerWriter:
    room = {"max_bytes": more.pop("outbox_bytes")} if "outbox_bytes" in more else {}
    outbox = LedgerOutbox(outbox_of(ledger_url(store.place)), **room)
    return LedgerWriter(store, outbox, on_kept=kept, linger_s=0.0, retry_s=retry_s, **more)


def test_all_of_it_is_written_and_told(store: FakeStore, tmp_path: Path) -> None:
    kept = Kept()
    writer = writer_of(store, kept)
    writer.start()
    for index in range(5000):
        writer.add(fact(f"r{index}"))
    writer.add(NODES)
    writer.close(DEADLINE_S)
    assert kept.ids == [f"r{index}" for index in range(5000)]
    assert store.ids() == set(kept.ids)
    assert writer.counts.num_written == writer.counts.num_added == 5000
    assert (writer.counts.num_lost, writer.counts.num_waiting, writer.counts.is_down) == (
        0,
        0,
        False,
    )
    store.close()
    assert not left_in(tmp_path / "l.sqlite.outbox")


@pytest.mark.promise(
    "No request waits for it. A fact counts as kept when that commit, or its commit "
    "in the outbox, is durable."
)
def test_a_fact_is_told_kept_only_when_it_is(store: FakeStore) -> None:
    kept = Kept()
    writer = writer_of(store, kept)
    writer.start()
    store.go.clear()
    writer.add(fact("a"))
    assert store.tried.wait(DEADLINE_S)
    writer.add(fact("b"))
    assert kept.ids == []
    assert writer.counts.num_waiting == 2
    store.go.set()
    kept.wait_for(2)
    writer.close(DEADLINE_S)


@pytest.mark.promise(
    "A fact that arrives twice counts once. A different fact with the id of a stored "
    "one is refused, logged and counted"
)
def test_twice_and_otherwise(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = writer_of(store, Kept())
    writer.start()
    for one in (fact("a"), fact("b"), fact("a"), fact("b", tokens_in=7)):
        writer.add(one)
    writer.close(DEADLINE_S)
    counts = writer.counts
    assert (counts.num_written, counts.num_same, counts.num_refused) == (2, 1, 1)
    assert "with different values, which are kept: b" in caplog.text


@pytest.mark.promise("facts wait in the outbox, a SQLite file that all gateways share")
def test_while_the_database_is_down_facts_wait_on_disk(
    store: FakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Facts in the outbox count as durable, and are in the database as soon as it works again."""
    kept = Kept()
    writer = writer_of(store, kept)
    store.is_down = True
    writer.start()
    for index in range(20):
        writer.add(fact(f"r{index}"))
        kept.wait_for(index + 1)
    assert writer.counts.is_down
    assert writer.counts.num_delayed == 20
    assert left_in(tmp_path / "l.sqlite.outbox")
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "one line"
    store.is_down = False
    writer.add(fact("last"))
    kept.wait_for(21)
    writer.close(DEADLINE_S)
    assert store.ids() == set(kept.ids)
    assert writer.counts.num_written == 21
    assert not writer.counts.is_down
    assert not left_in(tmp_path / "l.sqlite.outbox")
    store.close()


def test_what_a_dead_writer_left_is_written_by_the_next(store: FakeStore, tmp_path: Path) -> None:
    kept = Kept()
    first = writer_of(store, kept, NEVER_S)
    store.is_down = True
    first.start()
    first.add(fact("a"))
    first.add(NODES)
    kept.wait_for(1)
    first.close(DEADLINE_S)
    assert left_in(tmp_path / "l.sqlite.outbox")
    store.is_down = False
    second = writer_of(store, Kept())
    second.start()
    second.add(fact("b"))
    second.close(DEADLINE_S)
    assert store.ids() == {"a", "b"}
    assert store.read(0, 2**60).nodes == [NODES]
    assert not left_in(tmp_path / "l.sqlite.outbox")
    store.close()


def test_with_nothing_new_the_outbox_is_emptied_all_the_same(
    store: FakeStore, tmp_path: Path
) -> None:
    kept = Kept()
    writer = writer_of(store, kept)
    store.is_down = True
    writer.start()
    writer.add(fact("a"))
    kept.wait_for(1)
    store.is_down = False
    wait_until(lambda: not left_in(tmp_path / "l.sqlite.outbox"), "the outbox is empty")
    assert store.ids() == {"a"}
    writer.close(DEADLINE_S)


def test_with_the_outbox_full_too_facts_wait_in_memory(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    writer = writer_of(store, kept, outbox_bytes=1)
    store.is_down = True
    writer.start()
    names = [f"r{index} {'x' * 1000}" for index in range(50)]  # 50 kB; the outbox takes 32 kB.
    for name in names:
        writer.add(fact(name))
    wait_until(lambda: "queued in memory" in caplog.text, "the outbox is full")
    assert writer.counts.num_waiting > 0
    store.is_down = False
    kept.wait_for(50)
    writer.close(DEADLINE_S)
    assert store.ids() == set(names)
    assert writer.counts.num_lost == 0
    store.close()


def test_what_there_is_no_room_for_is_counted_and_bills_give_way_last(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    writer = writer_of(store, kept, max_waiting=10)
    writer.start()
    store.go.clear()
    writer.add(fact("first"))
    assert store.tried.wait(DEADLINE_S)
    for index in range(20):
        writer.add(fact(f"free{index}", tokens_in=0))
    assert writer.counts.num_waiting == 5
    for index in range(20):
        writer.add(fact(f"billed{index}"))
        writer.add(fact(f"free too{index}", tokens_in=0))
    assert writer.counts.num_waiting == 10
    store.go.set()
    writer.close(DEADLINE_S)
    assert store.ids() == {
        "first",
        *(f"free{index}" for index in range(4)),
        *(f"billed{index}" for index in range(5)),
    }
    counts = writer.counts
    assert counts.num_lost == 51
    assert counts.num_added == counts.num_written + counts.num_lost
    assert caplog.text.count("further facts are lost until") == 1, "a line for each spell"
    store.close()


def test_one_fact_that_will_never_do_keeps_no_other_out(store: FakeStore) -> None:
    writer = writer_of(store, Kept())
    store.poison = "b"
    writer.start()
    for one in (fact("a"), fact("b"), fact("c"), NODES):
        writer.add(one)
    writer.close(DEADLINE_S)
    assert store.ids() == {"a", "c"}
    assert writer.counts.num_refused == 1
    assert store.read(0, 2**60).nodes == [NODES]
    store.close()


def test_a_ledger_of_something_else_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "l.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="not a SQLite file"):
        writer_of(FakeStore(tmp_path), Kept()).start()


def test_a_database_that_hangs_holds_nobody_up_at_the_end(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(store, Kept())
    writer.start()
    store.go.clear()
    writer.add(fact("a"))
    assert store.tried.wait(DEADLINE_S)
    writer.close(0.05)
    assert "lost 1 facts" in caplog.text
    store.go.set()


def test_at_the_end_a_database_that_was_down_is_not_waited_for(
    store: FakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The database may hang, and closing must not take long: facts are first written to the outbox."""
    kept = Kept()
    path = outbox_of(ledger_url(store.place))
    writer = LedgerWriter(store, LedgerOutbox(path), on_kept=kept, linger_s=1000.0, retry_s=NEVER_S)
    store.is_down = True
    writer.start()
    store.is_down = False
    store.go.clear()
    writer.add(fact("a"))
    closing = threading.Thread(target=writer.close, args=(DEADLINE_S,))
    closing.start()
    kept.wait_for(1)
    assert len(left_in(path)) == 1
    assert "lost" not in caplog.text
    store.go.set()
    join(closing)


def test_an_outbox_that_cannot_be_read_keeps_no_fact_out(
    store: FakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "l.sqlite.outbox").mkdir()
    kept = Kept()
    writer = writer_of(store, kept, NEVER_S)
    writer.start()
    writer.add(fact("a"))
    kept.wait_for(1)
    writer.close(DEADLINE_S)
    assert store.ids() == {"a"}
    assert "cannot be read" in caplog.text
    store.close()


def test_tables_that_are_gone_are_made_again(store: FakeStore) -> None:
    kept = Kept()
    writer = writer_of(store, kept)
    writer.start()
    writer.add(fact("a"))
    kept.wait_for(1)
    other = Store(ledger_url(store.place))
    with other._begin() as connection:
        for table in ("requests", "nodes", "tallies", "schema"):
            connection.exec_driver_sql(f"DROP TABLE hadal_{table}")
    other.close()
    writer.add(fact("b"))
    kept.wait_for(2)
    writer.close(DEADLINE_S)
    assert store.ids() == {"b"}
    store.close()


def test_a_fact_that_no_file_takes_ends_nothing(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The fact's id has a lone surrogate, as Python reads it from a folder's name that is not UTF-8."""
    caplog.set_level(logging.CRITICAL)  # pytest-xdist cannot send a log with such a name.
    kept = Kept()
    writer = writer_of(store, kept)
    store.is_down = True
    writer.start()
    writer.add(fact("\udc80"))
    store.is_down = False
    kept.wait_for(1)
    writer.add(fact("a"))
    kept.wait_for(2)
    writer.close(DEADLINE_S)
    assert store.ids() == {"a"}
    assert writer.counts.num_refused == 1
    store.close()
