"""Test a ledger in a file: it is made when needed, errors are classified, and a reader sees one
instant and blocks no writer.
"""

import sqlite3
from pathlib import Path

import pytest

from hadal.core.facts import PackedFacts, RequestFact
from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.ledger.store import FactsRefused, Store, StoreDown
from hadal.stats.ledger import LedgerError

ALWAYS = (0, 2**60)


def fact(request_id: str, tokens_hit: int = 1) -> RequestFact:
    return RequestFact(request_id, "t", "m", tokens_hit, 2, 0, 0, "504", 1.0, 2.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(ledger_url(str(tmp_path / "state" / "l.sqlite")))


def test_it_is_made_when_it_is_first_written(store: Store, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger at"):
        store.read(*ALWAYS)
    assert list(tmp_path.iterdir()) == [], "reading makes nothing"
    store.prepare()
    assert store.write(PackedFacts((fact("a"),))).num_new == 1
    assert store.read(*ALWAYS).last_completed_us == 2_000_000
    mode = (
        sqlite3.connect(tmp_path / "state" / "l.sqlite").execute("PRAGMA journal_mode").fetchone()
    )
    assert mode == ("wal",)
    store.close()


@pytest.mark.promise(
    "No request waits for it. A fact counts as kept when that commit, or its commit "
    "in the outbox, is durable."
)
def test_every_commit_is_flushed(store: Store) -> None:
    store.prepare()
    with store._begin() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


@pytest.mark.promise("Any number of servers may write one ledger.")
def test_a_reader_holds_up_no_writer(store: Store, tmp_path: Path) -> None:
    store.prepare()
    reader = Store(ledger_url(str(tmp_path / "state" / "l.sqlite")))
    with reader._begin(is_reading=True) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM hadal_requests").scalar() == 0
        assert store.write(PackedFacts((fact("a"),))).num_new == 1
        assert connection.exec_driver_sql("SELECT count(*) FROM hadal_requests").scalar() == 0, (
            "one instant"
        )
    reader.close()
    store.close()


def test_a_fact_it_cannot_hold_is_refused_with_all_that_came_with_it(store: Store) -> None:
    store.prepare()
    with pytest.raises(FactsRefused):
        store.write(PackedFacts((fact("a"), fact("big", 2**63))))
    assert list(store.read(*ALWAYS).tally) == []
    store.close()


def test_a_locked_database_is_down_for_now(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.runtime.ledger.store.BUSY_S", 0.01)
    quick = Store(ledger_url(str(tmp_path / "state" / "l.sqlite")))
    quick.prepare()
    other = sqlite3.connect(tmp_path / "state" / "l.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match="locked"):
        quick.write(PackedFacts((fact("a"),)))
    other.execute("ROLLBACK")
    assert quick.write(PackedFacts((fact("a"),))).num_new == 1
    other.close()
    quick.close()


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing of a database" * 100)
    store = Store(ledger_url(str(path)))
    for use in (store.prepare, lambda: store.read(*ALWAYS)):
        with pytest.raises(LedgerError, match="not a SQLite file"):
            use()
    assert path.read_text() == "nothing of a database" * 100
    store.close()


def test_another_schema_says_where(store: Store, tmp_path: Path) -> None:
    store.prepare()
    store.close()
    with sqlite3.connect(tmp_path / "state" / "l.sqlite") as other:
        other.execute("UPDATE hadal_schema SET version = 7")
    other.close()
    for use in (store.prepare, lambda: store.read(*ALWAYS)):
        with pytest.raises(LedgerError, match=r"l\.sqlite: it is a ledger of schema 7"):
            use()
    store.close()


def test_a_folder_that_cannot_be_made_is_down_for_now(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreDown):
        Store(ledger_url(str(tmp_path / "file" / "l.sqlite"))).prepare()


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_file_that_is_taken_away_is_made_again(
    store: Store, tmp_path: Path, is_kept: bool
) -> None:
    """The store stops writing to a removed file, which no reader would find. A moved file has all that
    was written until then.
    """
    store.prepare()
    store.write(PackedFacts((fact("a"),)))
    path, elsewhere = tmp_path / "state" / "l.sqlite", tmp_path / "old.sqlite"
    if is_kept:
        path.rename(elsewhere)
    else:
        for one in path.parent.iterdir():
            one.unlink()
    assert store.write(PackedFacts((fact("b"),))).num_new == 1
    reader = Store(ledger_url(str(path)))
    assert [counts.num_requests for _, counts in reader.read(*ALWAYS).tally] == [1]
    reader.close()
    if is_kept:
        old = Store(ledger_url(str(elsewhere)))
        assert [counts.num_requests for _, counts in old.read(*ALWAYS).tally] == [1]
        old.close()
    store.close()
