"""Test the outbox, a file of facts that are not in the ledger yet: each append is complete or absent,
all writers share the file, and the next writer reads the facts of a dead one.
"""

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from hadal.core.facts import NodesFact, PackedFacts, RequestFact
from hadal.runtime.ledger.outbox import BATCH_ROWS, LedgerOutbox


def facts(*ids: str) -> PackedFacts:
    nodes = NodesFact("u", ids[0], "decode", 1, 8, 1.0, 2.0)
    return PackedFacts(
        tuple(RequestFact(one, "t", "m", 1, 2, 0, 0, "504", 1.0, 2.0) for one in ids), (nodes,)
    )


def left_in(path: Path) -> list[str]:
    """Return the requests with facts in the outbox, as the next process reads them."""
    outbox = LedgerOutbox(path)
    there = held(outbox)[1] if outbox.may_hold else []
    outbox.close()
    return there


def held(outbox: LedgerOutbox) -> tuple[list[int], list[str]]:
    """Return (row ids, request ids) of the outbox."""
    batches = list(outbox.waiting())
    names = [one.request_id for _, packed in batches for one in packed.requests]
    return [one for ids, _ in batches for one in ids], names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "l.outbox"


def test_what_is_kept_is_read_in_order(path: Path) -> None:
    outbox = LedgerOutbox(path)
    assert not outbox.may_hold
    assert not path.parent.exists(), "no file before there is something to keep"
    assert all(outbox.append(batch) for batch in (facts("a"), facts("b", "c")))
    assert outbox.may_hold
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    ids, names = held(outbox)
    assert (len(ids), names) == (2, ["a", "b", "c"])
    outbox.remove(ids)
    assert held(outbox) == ([], [])
    assert outbox.append(facts("d"))
    assert held(outbox)[1] == ["d"]
    outbox.close()
    assert left_in(path) == ["d"]


def test_many_are_read_in_batches(path: Path) -> None:
    outbox = LedgerOutbox(path)
    for index in range(2 * BATCH_ROWS + 1):
        outbox.append(facts(f"r{index}"))
    sizes = []
    for ids, packed in outbox.waiting():
        sizes.append(len(ids))
        assert len(packed.requests) == len(packed.nodes) == len(ids)
        outbox.remove(ids)
    assert sizes == [BATCH_ROWS, BATCH_ROWS, 1]
    assert held(outbox) == ([], [])
    outbox.close()


def test_it_has_a_limit_and_room_comes_back(path: Path) -> None:
    outbox = LedgerOutbox(path, max_bytes=65536)
    kept = 0
    while outbox.append(facts(f"r{kept}", "x" * 1000)):
        kept += 1
    assert kept > 10
    ids, _ = held(outbox)
    assert len(ids) == kept
    assert path.stat().st_size <= 65536
    outbox.remove(ids)
    assert path.stat().st_size < 32768, "the disk has its room again"
    assert outbox.append(facts("again"))
    outbox.close()


@pytest.mark.promise("facts wait in the outbox, a SQLite file that all gateways share")
def test_writers_share_it(path: Path) -> None:
    first, second = LedgerOutbox(path), LedgerOutbox(path)
    first.append(facts("a"))
    second.append(facts("b"))
    first.append(facts("c"))
    ids, names = held(second)
    assert names == ["a", "b", "c"]
    second.remove(ids[:2])
    first.append(facts("d"))
    assert held(first)[1] == ["c", "d"]
    first.close()
    second.close()


def test_what_comes_while_it_is_read_waits_for_the_next_look(path: Path) -> None:
    outbox = LedgerOutbox(path)
    outbox.append(facts("a"))
    looking = outbox.waiting()
    assert next(looking)[1] == facts("a")
    outbox.append(facts("b"))
    assert list(looking) == []
    assert held(outbox)[1] == ["a", "b"]
    outbox.close()


def test_another_that_writes_is_waited_for_and_not_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.runtime.ledger.outbox.BUSY_S", 0.05)
    outbox = LedgerOutbox(path)
    outbox.append(facts("a"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        outbox.append(facts("b"))
    other.execute("ROLLBACK")
    other.close()
    assert outbox.append(facts("c"))
    outbox.close()
    assert left_in(path) == ["a", "c"]


def test_one_that_looks_on_takes_no_lock_from_another_of_its_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.runtime.ledger.outbox.BUSY_S", 0.05)
    writer = LedgerOutbox(path)
    writer.append(facts("a"))
    writing = writer._connected()
    writing.execute("BEGIN IMMEDIATE")
    looking = LedgerOutbox(path)
    with contextlib.suppress(sqlite3.OperationalError):
        held(looking)
    looking.close()
    other = f"import sqlite3; sqlite3.connect({str(path)!r}, 0.1).execute('BEGIN IMMEDIATE')"
    done = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, timeout=180
    )
    assert "database is locked" in done.stderr
    writing.execute("ROLLBACK")
    writer.close()


@pytest.mark.parametrize("body", [b"\xff", b""])
def test_facts_that_cannot_be_read_keep_no_others_out(path: Path, body: bytes) -> None:
    outbox = LedgerOutbox(path)
    for name in "abc":
        outbox.append(facts(name))
    other = sqlite3.connect(path)
    other.execute("UPDATE waiting SET facts = ? WHERE id = 2", (body,))
    other.commit()
    assert held(outbox)[1] == ["a", "c"]
    assert other.execute("SELECT facts FROM damaged").fetchall() == [(body,)], (
        "what cannot be read is not thrown away"
    )
    other.close()
    outbox.close()


def test_a_file_of_something_else_is_kept_aside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)
    outbox = LedgerOutbox(path)
    assert outbox.append(facts("a"))
    outbox.close()
    assert left_in(path) == ["a"]
    assert path.with_name("l.outbox.damaged").read_bytes() == b"no database" * 1000
    assert "renamed to l.outbox.damaged" in caplog.text


def test_a_file_that_rots_under_its_writer_is_kept_aside(path: Path) -> None:
    outbox = LedgerOutbox(path)
    outbox.append(facts("a"))
    with path.open("r+b") as file:
        file.write(b"\0" * 8192)
    with pytest.raises(sqlite3.DatabaseError):
        outbox.append(facts("b"))
    assert outbox.append(facts("c"))
    outbox.close()
    assert left_in(path) == ["c"]


def test_what_is_kept_outlives_its_file(path: Path) -> None:
    """No fact is lost if the outbox file is deleted while the database is down."""
    outbox = LedgerOutbox(path)
    outbox.append(facts("a"))
    path.unlink()
    assert outbox.append(facts("b"))
    assert held(outbox)[1] == ["a", "b"]
    outbox.close()
    assert left_in(path) == ["a", "b"]


def test_a_disk_that_is_full_keeps_nothing_and_says_so(path: Path) -> None:
    outbox = LedgerOutbox(path)
    outbox.append(facts("a"))
    path.parent.chmod(0o500)  # No journal can be made there, except by root.
    try:
        outbox.append(facts("b"))
    except sqlite3.OperationalError:
        assert held(outbox)[1] == ["a"]
    finally:
        path.parent.chmod(0o700)
    outbox.close()
