"""Batches in a whole gateway, over a store that fails as databases do: every line that is written
as answered is charged once, at any failure. The file endpoints enforce clients' limits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from hadal.core.config import BatchesConfig, Deployment, LedgerConfig
from hadal.core.facts import RequestFact
from hadal.core.messages.requests import Charged, Quota, Ticket
from hadal.gateway.desk import batches
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.reply import Reply
from hadal.gateway.desk.salts import EVERYONE
from hadal.gateway.desk.service import ServedModel, Service, Work
from hadal.gateway.edge import bodies
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.edge.intake import Patience
from hadal.policy.admission import NO_SPARE
from hadal.runtime.batches import (
    IN_PROGRESS,
    VALIDATING,
    BatchesDown,
    BatchRow,
    BatchStore,
    batches_url,
)
from hadal.runtime.ledger.address import ledger_url
from tests.waiting import DEADLINE_S, wait_for, wait_until

from .scenes import TEXT, error_of
from .serving import serving
from .test_accounting import List, counted
from .world import CHAT, World, spell, world

ENDED = ("completed", "failed", "cancelled", "expired")
NUM_LINES = 3
NUM_PUSHED_OUT = NUM_LINES * batches.MAX_TRIES


class _Failing(BatchStore):
    """Store with commits that can be delayed, or can succeed although the caller gets an error."""

    def __init__(self, path: Path) -> None:
        super().__init__(ledger_url(str(path)))
        self.num_unheard = 0
        """Number of next commits that succeed although the caller gets a connection error."""
        self.num_broken = 0
        """Number of next calls of `open_batches` that fail with an unexpected error."""
        self.is_writing = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def answer(
        self, batch_id: str, number: int, answer: bytes, *, is_error: bool, facts: Any = ()
    ) -> bool:
        self.is_writing.set()
        assert self.go.wait(DEADLINE_S)
        is_new = super().answer(batch_id, number, answer, is_error=is_error, facts=facts)
        if self.num_unheard:
            self.num_unheard -= 1
            raise BatchesDown("the connection broke after COMMIT was sent")
        return is_new

    def open_batches(self) -> list[BatchRow]:
        if self.num_broken:
            self.num_broken -= 1
            raise RuntimeError("nobody thought of this")
        return super().open_batches()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_AGAIN_S", 0.02)
    monkeypatch.setattr(batches, "_LOOK_S", 0.02)
    monkeypatch.setattr(bodies, "_DISCARD_DEADLINE_S", 0.1)  # Refused test clients send no more.


def store_in(folder: Path) -> BatchStore:
    return BatchStore(ledger_url(str(folder / "b.sqlite")))


@asynccontextmanager
async def life(
    model: ServedModel, store: BatchStore | Path, *, runs: bool = True, **options: Any
) -> AsyncIterator[tuple[World, List]]:
    """Yield a gateway as one run of its process has it, and the facts that its ledger received. The
    block's end is the process's end. `store`: the batch store, or the folder in which to open one.
    """
    store = store_in(store) if isinstance(store, Path) else store
    async with world(model, spell(model, TEXT), store=store, has_ledger=True, **options) as it:
        sink, gateway = List(), it.gateway
        deployment = Deployment(model="x", ledger=LedgerConfig(prices="1/2/4"))
        gateway.desk.accounting = Accounting(deployment, model.name, sink, dict, gateway.clock)
        assert it.worker is not None
        running = asyncio.create_task(it.worker.run() if runs else asyncio.sleep(0))
        try:
            yield it, sink
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if gateway.desk.accounting is not None:
            assert counted(gateway) == sum(fact.tokens_out for fact in sink.requests)


async def begin(it: World, bodies: Sequence[dict[str, Any]] = (CHAT,) * NUM_LINES) -> str:
    """Create a batch of these bodies and return its id."""
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    raw = "\n".join(json.dumps(one) for one in lines).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", raw)}}
    file = (await it.client.post("/v1/files", **form)).json()
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    reply = await it.client.post("/v1/batches", json={**asked, "input_file_id": file["id"]})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def reach(it: World, batch_id: str, statuses: Sequence[str] = ENDED) -> dict[str, Any]:
    """Wait until a batch has one of these statuses, and return the batch."""

    async def reached() -> dict[str, Any]:
        batch = (await it.client.get(f"/v1/batches/{batch_id}")).json()
        return dict(batch) if batch["status"] in statuses else {}

    return await wait_for(reached, f"the batch is {' or '.join(statuses)}")


async def rows_of(it: World, file_id: str) -> list[dict[str, Any]]:
    text = (await it.client.get(f"/v1/files/{file_id}/content")).text
    return [json.loads(row) for row in text.splitlines()]


async def end(it: World, batch_id: str) -> list[str]:
    """Wait until a batch has completed, and return the ids of its answers."""
    batch = await reach(it, batch_id)
    assert batch["status"] == "completed"
    rows = await rows_of(it, batch["output_file_id"])
    assert [row["custom_id"] for row in rows] == [f"r{n}" for n in range(NUM_LINES)]
    return [row["response"]["request_id"] for row in rows]


async def charged(sink: List, request_ids: Sequence[str]) -> None:
    """Wait until all of these requests are charged. Each must be charged once, and no others."""
    await wait_for(lambda: len(sink.requests) >= len(request_ids), "all are charged")
    assert sorted(asked_of(fact) for fact in sink.requests) == sorted(request_ids)
    assert all(fact.income_pico_usd > 0 for fact in sink.requests)
    assert {fact.model for fact in sink.requests} == {"small/batch"}


def asked_of(fact: RequestFact) -> str:
    return fact.request_id.rpartition("-")[0]


@pytest.mark.promise("Servers may share a ledger, but not the store of batches")
def test_servers_that_share_a_ledger_share_no_batches(tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger.sqlite")
    places = {batches_url("auto", ledger, port) for port in (8000, 8100)}
    assert len(places) == 2
    assert all(str(tmp_path) in place for place in places)
    assert batches_url("auto", "off", 8000) == ""


async def test_without_a_ledger_there_are_none(model: ServedModel) -> None:
    async with world(model, spell(model, TEXT)) as it:
        for path in ("/v1/files", "/v1/batches"):
            assert (await it.client.get(path)).status_code == 404


@pytest.mark.promise(
    "So after kill -9 of the gateway or of all processes, each custom_id is once in "
    "the output and is charged once"
)
async def test_an_answer_that_was_written_unheard_is_charged(
    model: ServedModel, tmp_path: Path
) -> None:
    store = _Failing(tmp_path / "b.sqlite")
    store.num_unheard = 2
    async with life(model, store) as (it, sink):
        await charged(sink, await end(it, await begin(it)))
        assert not store.num_unheard


async def test_a_write_that_outlives_its_line_is_charged(
    model: ServedModel, tmp_path: Path
) -> None:
    """The gateway's process ends while a thread writes. This process charges the lines that the
    write completes; the next process answers and charges the rest.
    """
    store = _Failing(tmp_path / "b.sqlite")
    store.go.clear()
    async with life(model, store) as (it, sink):
        batch_id = await begin(it)
        await asyncio.to_thread(store.is_writing.wait)
        # The write resumes in the same turn of the event loop in which the gateway ends.
        asyncio.get_running_loop().call_soon(store.go.set)
    first = sink.requests
    assert len(first) == 1
    sink.on_kept(list(first))
    async with life(model, tmp_path) as (it, later):
        request_ids = await end(it, batch_id)
        await wait_for(
            lambda: len({one.request_id for one in (*first, *later.requests)}) == NUM_LINES,
            "all lines are charged",
        )
    given = {fact.request_id: fact for fact in first}
    for fact in later.requests:
        assert given.setdefault(fact.request_id, fact) == fact, "else it were another charge"
    assert sorted(map(asked_of, given.values())) == sorted(request_ids)


@pytest.mark.promise(
    "So after kill -9 of the gateway or of all processes, each custom_id is once in "
    "the output and is charged once"
)
async def test_what_the_ledger_never_heard_is_charged_by_the_next_life(
    model: ServedModel, tmp_path: Path
) -> None:
    """Imitate `kill -9` between the commits of the two databases: facts stay until the ledger has them."""

    async with life(model, tmp_path) as (it, first):
        request_ids = await end(it, await begin(it))
        await charged(first, request_ids)
    async with life(model, tmp_path) as (it, second):
        await charged(second, request_ids)
        assert sorted(second.requests, key=asked_of) == sorted(first.requests, key=asked_of)
        second.on_kept(list(second.facts))
        assert it.worker is not None
        while await it.worker.call(it.worker.store.charges):
            await asyncio.sleep(0.01)
    async with life(model, tmp_path) as (it, third):
        await end(it, await begin(it))
        await charged(third, [asked_of(fact) for fact in third.requests])
        assert not {*map(asked_of, third.requests)} & {*request_ids}


async def test_what_nobody_thought_of_is_said_and_the_work_goes_on(
    model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _Failing(tmp_path / "b.sqlite")
    store.num_broken = 2
    async with life(model, store) as (it, sink):
        await wait_for(lambda: not store.num_broken, "it was broken twice")
        await charged(sink, await end(it, await begin(it)))
    assert caplog.text.count("nobody thought of this") >= 2


async def test_a_line_s_choices_are_let_in_together(model: ServedModel, tmp_path: Path) -> None:
    """Tokens per minute that the first choice uses up do not refuse the other choices."""
    async with life(model, tmp_path) as (it, _):
        reply = await it.chat()
        quota = 2 * reply.json()["usage"]["prompt_tokens"] + 2
        it.gateway.link.set_quotas(it.gateway.clock.unix_time(), (Quota(EVERYONE, quota),))
        batch = await reach(it, await begin(it, [CHAT | {"n": 2}]))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        (row,) = await rows_of(it, batch["output_file_id"])
        assert len(row["response"]["body"]["choices"]) == 2


async def test_a_second_batch_is_read_while_the_first_waits(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with life(model, tmp_path) as (it, _):
        reserve, is_full = it.gateway.link.reserve, True

        def check(*given: Any) -> Ticket:
            if is_full:
                raise ApiError(429, "No spare capacity.", code=NO_SPARE)
            return reserve(*given)

        monkeypatch.setattr(it.gateway.link, "reserve", check)
        first = await begin(it)
        await reach(it, first, ["in_progress"])
        second = await begin(it)
        await reach(it, second, ["in_progress"])
        assert (await reach(it, await begin(it, [])))["status"] == "failed"
        is_full = False
        await end(it, first)
        await end(it, second)


async def test_a_line_that_waits_behind_another_s_holds_up_no_cancelling(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with life(model, tmp_path, keys=("sk-alice", "sk-bob")) as (it, _):
        asked = []

        def check(tenant: str, *given: Any) -> None:
            asked.append(tenant)
            raise ApiError(429, "No spare capacity.", code=NO_SPARE)

        monkeypatch.setattr(it.gateway.link, "reserve", check)
        ids = []
        for key in ("sk-alice", "sk-bob"):
            it.client.headers["Authorization"] = f"Bearer {key}"
            ids.append(await begin(it))
            await reach(it, ids[-1], ["in_progress"])
        worker = it.worker
        assert worker is not None
        await wait_for(lambda: len(worker._stops.waits) == 2, "both wait")
        assert len({*asked}) == 1  # Bob's line waits behind Alice's.
        await it.client.post(f"/v1/batches/{ids[1]}/cancel")
        assert (await reach(it, ids[1]))["status"] == "cancelled"
        assert [*worker._stops.waits] == ids[:1]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_withdrawn_key_ends_its_batch(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """No line of the batch begins any more, whether the batch is the first in the queue or waits
    behind another one.
    """
    monkeypatch.setattr(batches, "WITHDRAWN_S", 0.1)
    async with life(model, tmp_path, keys=("sk-alice name=alice", "sk-bob name=bob")) as (it, _):
        host, worker, asked = it.gateway.link, it.worker, list[str]()
        assert worker is not None
        reserve, is_full = host.reserve, True

        def check(tenant: str, *given: Any) -> Ticket:
            asked.append(tenant)
            if is_full:
                raise ApiError(429, "No spare capacity.", code=NO_SPARE)
            return reserve(tenant, *given)

        monkeypatch.setattr(host, "reserve", check)
        tenants = ("bob", "alice") if waits else ("alice",)
        for at, tenant in enumerate(tenants):
            it.client.headers["Authorization"] = f"Bearer sk-{tenant}"
            batch_id = await begin(it)
            await wait_for(lambda n=at: len(worker._stops.waits) > n and asked, "it waits")
        it.gateway.tenancy.take(Keys(("sk-bob name=bob",)))
        while (row := await worker.call(worker.store.batch, "alice", batch_id)).status not in ENDED:
            await asyncio.sleep(0.01)
            is_full = is_full and waits
        assert (row.status, row.num_completed, row.num_failed) == ("cancelled", 0, 0)


async def test_a_batch_outlives_the_exchange_of_its_key(model: ServedModel, tmp_path: Path) -> None:
    """No line begins while the tenant's key is missing. All lines begin once its new key is there."""
    async with life(model, tmp_path, keys=("sk-alice name=alice", "sk-bob name=bob")) as (it, _):
        it.gateway.tenancy.take(Keys(("sk-bob name=bob",)))
        it.client.headers["Authorization"] = "Bearer sk-bob"
        other = await begin(it)
        it.gateway.tenancy.take(Keys(("sk-alice name=alice", "sk-bob name=bob")))
        it.client.headers["Authorization"] = "Bearer sk-alice"
        it.units.go.clear()
        batch_id = await begin(it)
        it.gateway.tenancy.take(Keys(("sk-bob name=bob",)))
        it.units.go.set()
        it.client.headers["Authorization"] = "Bearer sk-bob"
        assert (await reach(it, other))["status"] == "completed"
        assert it.worker is not None
        row = await it.worker.call(it.worker.store.batch, "alice", batch_id)
        assert row is not None
        assert row.status in (VALIDATING, IN_PROGRESS)
        it.gateway.tenancy.take(Keys(("sk-new name=alice", "sk-bob name=bob")))
        it.client.headers["Authorization"] = "Bearer sk-new"
        counts = (await reach(it, batch_id))["request_counts"]
        assert counts == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}


async def test_a_line_is_priced_by_the_quota_of_its_moment(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daily budget that is set while lines wait applies to those lines."""
    async with life(model, tmp_path, keys=("sk-alice name=alice",)) as (it, _):
        most = []

        def check(tenant: str, generations: object, most_pico_usd: tuple[int, ...]) -> Ticket:
            most.append(sum(most_pico_usd))
            raise ApiError(429, "No spare capacity.", code=NO_SPARE)

        monkeypatch.setattr(it.gateway.link, "reserve", check)
        it.client.headers["Authorization"] = "Bearer sk-alice"
        await begin(it)
        await wait_for(lambda: most, "a line asks for room")
        it.gateway.tenancy.take(Keys(("sk-alice name=alice dollars_per_day=1",)))
        await wait_for(lambda: most[-1], "its price counts")
        assert not most[0]


async def test_what_a_failed_try_could_cost_is_free_again(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with life(model, tmp_path) as (it, sink):
        said: list[Charged] = []
        assert it.gateway.desk.accounting is not None
        it.gateway.desk.accounting._on_charged = said.append
        send_whole, num_tries = Reply.send_whole, 0

        async def failing(reply: Reply, send: Any) -> Any:
            nonlocal num_tries
            num_tries += 1
            if num_tries <= NUM_PUSHED_OUT:
                await send_whole(
                    reply, discard
                )  # Tokens that reach no line's answer are not counted.
                raise ApiError(503, "A unit went away.", code="no_units")
            return await send_whole(reply, send)

        async def discard(message: Message) -> None:
            pass

        monkeypatch.setattr(Reply, "send_whole", failing)
        request_ids = await end(it, await begin(it))
        await charged(sink, request_ids)
        free = [one for one in said if not one.pico_usd]
        assert len(free) == NUM_PUSHED_OUT
        assert num_tries == NUM_LINES + NUM_PUSHED_OUT, "load ends no line, however often"
        paid = {one.request_id for one in said if one.pico_usd}
        assert len(paid) == NUM_LINES
        assert not paid & {one.request_id for one in free}


async def test_without_a_ledger_tokens_of_lines_are_counted_as_they_come(
    model: ServedModel, tmp_path: Path
) -> None:
    async with life(model, tmp_path) as (it, _):
        it.gateway.desk.accounting = None
        await end(it, await begin(it))
        usage = (await it.chat()).json()["usage"]
        assert counted(it.gateway) == (NUM_LINES + 1) * usage["completion_tokens"] > 0


async def test_an_input_that_is_deleted_first_is_named(model: ServedModel, tmp_path: Path) -> None:
    async with life(model, tmp_path, runs=False) as (it, _):
        batch_id = await begin(it)
        batch = (await it.client.get(f"/v1/batches/{batch_id}")).json()
        await it.client.delete(f"/v1/files/{batch['input_file_id']}")
    async with life(model, tmp_path) as (it, _):
        batch = await reach(it, batch_id)
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == ["file_not_found"]


@pytest.mark.parametrize("at", ["its reading", "its facts"])
async def test_a_fault_in_one_line_is_that_line_s_alone(
    model: ServedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    def fail(is_faulty: bool) -> None:
        if is_faulty:
            raise RuntimeError("nobody thought of this")

    async with life(model, tmp_path) as (it, _):
        chat = Service.chat

        async def faulty(service: Service, body: bytes, *given: Any) -> Work:
            fail(at == "its reading" and b"seed" in body)
            return await chat(service, body, *given)

        facts = it.gateway.desk.accounting.facts

        def faulty_facts(work: Work, *given: Any, **more: Any) -> list[RequestFact]:
            fail(at == "its facts" and work.choices[0].generation.sampling.seed == 1)
            return facts(work, *given, **more)

        monkeypatch.setattr(it.gateway.desk.accounting, "facts", faulty_facts)
        monkeypatch.setattr(Service, "chat", faulty)
        batch = await reach(it, await begin(it, [CHAT, CHAT | {"seed": 1}, CHAT]))
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (row,) = await rows_of(it, batch["error_file_id"])
        assert row["custom_id"] == "r1"
        assert row["response"]["status_code"] == 500
    assert "nobody thought of this" in caplog.text


@pytest.mark.promise(
    "While the store is down, /v1/files and /v1/batches answer 503 and running lines "
    "wait until it works again."
)
async def test_a_store_that_is_down_at_the_start_is_waited_for(
    model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    folder.write_text("a file is in its place")
    store = BatchStore(ledger_url(str(folder / "b.sqlite")))
    async with life(model, store) as (it, _):
        for reply in (
            await it.client.get("/v1/files"),
            await it.client.post("/files", data={"purpose": "batch"}, files={"file": b"{}"}),
            await it.client.get("/v1/batches/batch_1"),
        ):
            error = error_of(reply, 503, "no_batches")
            assert "database" in error["message"]
            assert int(reply.headers["retry-after"]) >= 1
        chat = await it.chat()
        assert chat.status_code == 200
        folder.unlink()
        request_ids = await end(it, await begin(it))
        assert len(request_ids) == NUM_LINES
    assert caplog.text.count("batches are paused") == 1, "once for as long as it lasts"


async def test_each_path_says_all_its_methods(model: ServedModel, tmp_path: Path) -> None:
    async with life(model, tmp_path, runs=False) as (it, _):
        for path, methods in (
            ("/v1/files", {"GET", "HEAD", "POST"}),
            ("/files/file-1", {"DELETE", "GET", "HEAD"}),
            ("/v1/batches/batch_1/cancel", {"POST"}),
            ("/v1/responses/resp_1", {"DELETE", "GET", "HEAD"}),
        ):
            reply = await it.client.put(path)
            error_of(reply, 405, "method_not_allowed")
            assert set(reply.headers["allow"].split(", ")) == methods
        assert (await it.client.head("/v1/files")).status_code == 200


async def test_a_form_s_other_fields_are_refused_by_name(
    model: ServedModel, tmp_path: Path
) -> None:
    async with life(model, tmp_path, runs=False) as (it, _):
        data = {"purpose": "batch", "expires_after[seconds]": "3600"}
        reply = await it.client.post("/v1/files", data=data, files={"file": b"{}"})
        assert error_of(reply, 400)["param"] == "expires_after[seconds]"
        assert (await it.client.get("/v1/files")).json()["data"] == []


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (BatchesConfig(max_file_mb=1), "file_too_large"),
        (BatchesConfig(max_tenant_mb=1), "files_too_large"),
    ],
)
def test_an_upload_is_refused_as_soon_as_it_is_too_long(
    model: ServedModel, tmp_path: Path, config: BatchesConfig, code: str
) -> None:
    """The upload has no Content-Length, and its end never arrives."""
    store = store_in(tmp_path)
    with serving(model, spell(model, TEXT), store=store, batches=config) as it:
        with socket.create_connection(it.address, DEADLINE_S) as client:
            upload(client, 5)
            reply = read_all(client)
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert code.encode() in reply
        listed = httpx.get(f"{it.url}/v1/files", timeout=DEADLINE_S).json()
        assert listed["data"] == []


def test_uploads_at_once_have_one_limit_together(model: ServedModel, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    config = BatchesConfig(max_file_mb=2, max_tenant_mb=2)
    with serving(model, spell(model, TEXT), store=store, batches=config) as it:
        with socket.create_connection(it.address, DEADLINE_S) as first:
            upload(first, 6)
            arriving = it.world.pages._arriving  # type: ignore[union-attr]
            wait_until(lambda: sum(arriving.values()) > 6 << 18, "all of the first is there")
            with socket.create_connection(it.address, DEADLINE_S) as second:
                upload(second, 3)
                reply = read_all(second)
            assert reply.startswith(b"HTTP/1.1 413 ")
            assert b"files_too_large" in reply
        with socket.create_connection(it.address, DEADLINE_S) as third:
            upload(third, 6)
            third.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(b"\r\n--x--\r\n"), b"\r\n--x--\r\n"))
            assert third.recv(65536).startswith(b"HTTP/1.1 200 "), (
                "what was given up is not counted"
            )


def upload(client: socket.socket, num_pieces: int) -> None:
    """Send `num_pieces` pieces of 256 KiB of a file, without its end."""
    client.sendall(
        b"POST /v1/files HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    for data in (FORM, *[b"y" * (1 << 18)] * num_pieces):
        client.sendall(b"%x\r\n%s\r\n" % (len(data), data))


def read_all(client: socket.socket) -> bytes:
    reply = b""
    while more := client.recv(65536):
        reply += more
    return reply


def test_a_file_that_nobody_reads_is_given_up(
    model: ServedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "hadal.access")
    store = store_in(tmp_path)
    with serving(model, spell(model, TEXT), store=store) as it:
        url, raw = f"{it.url}/v1/files", b"z" * (24 << 20)
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": raw}}
        file = httpx.post(url, timeout=DEADLINE_S, **form).json()
        whole = httpx.get(f"{url}/{file['id']}/content", timeout=DEADLINE_S)
        assert int(whole.headers["content-length"]) == len(raw)
        assert whole.content == raw
        caplog.clear()
        monkeypatch.setattr(it.world.gateway.intake, "patience", Patience(send_s=0.3))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(it.address)
            path = f"/v1/files/{file['id']}/content"
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            wait_until(lambda: f"GET {path} 499" in caplog.text, "it is given up")
