"""The store of files and batches in SQLite and in PostgreSQL. If two gateways change a batch at the
same instant, one succeeds and the other sees it. An answer and its cost are written together, once.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hadal.core.facts import RequestFact
from hadal.runtime.batches import (
    BATCH,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchesDown,
    BatchLine,
    BatchRow,
    BatchStore,
    FileRow,
)
from hadal.runtime.ledger.address import ledger_url
from tests.dist.postgres import postgres
from tests.waiting import DEADLINE_S, join

MEANWHILE_S = 0.2
"""Seconds for which the other store may try an operation that a lock may block."""
NUM_LINES = 4
ENDPOINT = "/v1/chat/completions"
LATE = b'"response":null,"error":{}'


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield ledger_url(str(tmp_path_factory.mktemp("store") / "batches.sqlite"))
        return
    with postgres() as server:
        yield ledger_url(server.url)


@pytest.fixture
def stores(url: str) -> Iterator[tuple[BatchStore, BatchStore]]:
    """Stores of two gateways."""
    one, other = BatchStore(url), BatchStore(url)
    yield one, other
    one.close()
    other.close()


def begun(store: BatchStore, status: str = IN_PROGRESS) -> BatchRow:
    """Return a new batch, already in the store."""
    batch = BatchRow(
        id=f"batch_{uuid.uuid4().hex}",
        tenant="alice",
        endpoint=ENDPOINT,
        input_file_id="file-1",
        metadata={},
        status=VALIDATING,
        created_s=1,
        expires_s=2,
        times={},
        errors=[],
        output_file_id=None,
        error_file_id=None,
        num_total=0,
        num_completed=0,
        num_failed=0,
    )
    store.add_batch(batch)
    if status == IN_PROGRESS:
        store.begin(batch, [BatchLine(n, f"r{n}", b"{}") for n in range(NUM_LINES)], 10)
    return now_of(store, batch)


def now_of(store: BatchStore, batch: BatchRow) -> BatchRow:
    found = store.batch(batch.tenant, batch.id)
    assert found is not None
    return found


def file_ids() -> tuple[str, str]:
    return f"file-{uuid.uuid4().hex}", f"file-{uuid.uuid4().hex}"


def fact_of(request_id: str) -> RequestFact:
    return RequestFact(request_id, "alice", "m/batch", 0, 3, 2, 7, "stop", 1.0, 2.0, 1.5, 1.75)


def just_before_it_changes(store: BatchStore, act: Callable[[], Any]) -> list[threading.Thread]:
    """Run `act` in a thread, once, when the store is about to change a batch that it has read.
    Return a list that then has this thread. The store waits MEANWHILE_S at most for `act`, because
    in SQLite the store's transaction blocks it.
    """
    threads: list[threading.Thread] = []

    @sa.event.listens_for(store._engine, "before_cursor_execute")
    def interrupt(connection: Any, cursor: Any, statement: str, *given: Any) -> None:
        if statement.startswith("UPDATE hadal_batches ") and not threads:
            threads.append(threading.Thread(target=act))
            threads[0].start()
            threads[0].join(MEANWHILE_S)

    return threads


@pytest.mark.parametrize("move", ["begin", "fail", "finalize", "expire"])
def test_no_move_overwrites_a_cancellation(
    stores: tuple[BatchStore, BatchStore], move: str
) -> None:
    mine, theirs = stores
    batch = begun(mine, IN_PROGRESS if move in ("finalize", "expire") else VALIDATING)
    said: list[BatchRow | None] = []
    theirs.batches("alice", "", 1)  # Connects now, not during the race.
    threads = just_before_it_changes(
        mine, lambda: said.append(theirs.cancel("alice", batch.id, 20))
    )
    if move == "begin":
        mine.begin(batch, [BatchLine(1, "r1", b"{}")], 21)
    elif move == "fail":
        mine.fail(batch, [{"code": "x"}], 21)
    elif move == "finalize":
        mine.finalize(batch, 21)
    else:
        mine.end(batch, EXPIRED, 21, file_ids(), LATE)
    join(*threads)
    assert threads, "it was in between"
    (answered,) = said
    assert answered is not None
    now = now_of(mine, batch)
    assert now.status == answered.status, "what the client was told is so"
    if now.status == CANCELLING:
        # Once cancelled, a batch must not change in any other way.
        assert (now.times[CANCELLING], now.output_file_id, now.error_file_id) == (20, None, None)
        assert now.times.keys() <= {IN_PROGRESS, CANCELLING}
        mine.finalize(now, 22)
        assert mine.end(now, COMPLETED, 22, file_ids(), b"") is None
        ended = mine.end(now, CANCELLED, 23, file_ids(), b"")
        assert ended is not None
        assert ended.status == CANCELLED
    else:
        assert now.status in (IN_PROGRESS, FAILED, FINALIZING, EXPIRED)


def test_gateways_at_once_leave_one_order_of_states(stores: tuple[BatchStore, BatchStore]) -> None:
    """The reply to the cancellation has the status that the batch then has, and the batch has times
    for exactly its states.
    """
    mine, theirs = stores
    dice = random.Random(5)
    seen: set[str] = set()
    for _ in range(30):
        batch = begun(mine)
        said: list[BatchRow | None] = []
        start = threading.Barrier(2)

        def cancel(batch_id: str = batch.id, said: Any = said, start: Any = start) -> None:
            start.wait(DEADLINE_S)
            said.append(theirs.cancel("alice", batch_id, 20))

        thread = threading.Thread(target=cancel)
        thread.start()
        start.wait(DEADLINE_S)
        threading.Event().wait(dice.random() * 0.004)
        mine.finalize(batch, 21)
        join(thread)
        (answered,) = said
        now = now_of(mine, batch)
        assert answered is not None
        assert answered.status == now.status
        assert set(now.times) == {IN_PROGRESS, now.status}
        seen.add(now.status)
    assert seen <= {CANCELLING, FINALIZING}


def test_an_answer_is_written_once_with_what_it_cost(
    stores: tuple[BatchStore, BatchStore],
) -> None:
    mine, theirs = stores
    batch = begun(mine)
    ids = [f"chatcmpl-{uuid.uuid4().hex}-0" for _ in range(2 * NUM_LINES)]
    written: list[str] = []

    def answer(store: BatchStore, own: list[str]) -> None:
        for number, request_id in enumerate(own):
            body = f'"response":"{request_id}"'.encode()
            if store.answer(batch.id, number, body, is_error=False, facts=[fact_of(request_id)]):
                written.append(request_id)

    thread = threading.Thread(target=answer, args=(theirs, ids[NUM_LINES:]))
    thread.start()
    answer(mine, ids[:NUM_LINES])
    join(thread)
    assert len(written) == NUM_LINES
    assert now_of(mine, batch).num_completed == NUM_LINES
    charges = {fact.request_id: fact for fact in mine.charges() if fact.request_id in ids}
    assert charges == {request_id: fact_of(request_id) for request_id in written}
    mine.finalize(batch, 30)
    ended = mine.end(batch, COMPLETED, 31, file_ids(), b"")
    assert ended is not None
    assert ended.output_file_id is not None
    output = b"".join(mine.contents(ended.output_file_id)).decode()
    assert all(request_id in output for request_id in written)
    assert not mine.answer(batch.id, 0, b"", is_error=False, facts=[fact_of("late")])
    theirs.drop_charges(written)
    assert not {fact.request_id for fact in mine.charges()} & {*ids, "late"}


def test_what_a_tenant_may_have_is_counted_where_it_is_written(
    stores: tuple[BatchStore, BatchStore],
) -> None:
    mine, _ = stores
    tenant = uuid.uuid4().hex

    def add(num_bytes: int) -> FileRow | None:
        row = FileRow(f"file-{uuid.uuid4().hex}", tenant, BATCH, "a\u00e9", 0, 1)
        return mine.add_file(row, iter([b"x" * num_bytes]), 100)

    assert add(60) is not None
    assert add(41) is None
    assert mine.num_bytes(tenant) == 60
    assert add(40) is not None
    assert add(1) is None


def test_uploads_at_one_instant_are_counted_together(
    stores: tuple[BatchStore, BatchStore],
) -> None:
    """One upload is counted but not yet committed when the other is written."""
    mine, theirs = stores
    tenant = uuid.uuid4().hex
    kept: list[FileRow | None] = []

    def add(store: BatchStore) -> None:
        row = FileRow(f"file-{uuid.uuid4().hex}", tenant, BATCH, "a", 0, 1)
        kept.append(store.add_file(row, iter([b"x" * 60]), 100))

    thread = threading.Thread(target=add, args=(theirs,))
    theirs.batches(tenant, "", 1)  # Connects now, not during the race.

    @sa.event.listens_for(mine._engine, "after_cursor_execute")
    def interrupt(connection: Any, cursor: Any, statement: str, *given: Any) -> None:
        if statement.startswith("SELECT coalesce(sum(") and not thread.ident:
            thread.start()
            thread.join(MEANWHILE_S)

    add(mine)
    join(thread)
    assert sum(row is not None for row in kept) == 1
    assert mine.num_bytes(tenant) == 60


def test_a_name_with_a_null_is_nobody_s(stores: tuple[BatchStore, BatchStore]) -> None:
    mine, _ = stores
    assert mine.file("alice", "a\0b") is None
    assert mine.batch("alice", "a\0b") is None
    assert mine.cancel("alice", "a\0b", 1) is None
    assert not mine.delete_file("alice", "a\0b")
    assert mine.batches("alice", "a\0b", 1) is None
    assert mine.files("alice", "a\0b", "", 1, is_ascending=True) == []


def test_a_store_that_comes_later_is_used_then(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folder.write_text("a file is in its place")
    store = BatchStore(ledger_url(str(folder / "batches.sqlite")))
    with pytest.raises(BatchesDown, match="files and batches"):
        store.batches("alice", "", 1)
    folder.unlink()
    assert store.batches("alice", "", 1) == []
    store.close()
