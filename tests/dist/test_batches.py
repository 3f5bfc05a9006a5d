"""/v1/files and /v1/batches through the official client. Every custom_id appears once in the
output, even after `kill -9`. Tenants are separate, batches have their own price, and other requests
are served as before.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from openai import OpenAI

from tests.dist import gate
from tests.dist.keyed import AUDITOR, with_keys
from tests.dist.serving import Server, StartServer, metric
from tests.waiting import DEADLINE_S, join, wait_until

LIVE = pytest.mark.more("one batch stands in `make test`; tests/unit/gateway has each of it")
PRICES = "1/2/4"
OPTIONS = with_keys(
    *(f"sk-{name} name={name}" for name in ("alice", "bob", "erin", "frank")),
    "sk-carol name=carol dollars_per_day=0.001",
    "sk-dave name=dave tokens_per_minute=40",
)
FIELDS = {
    "ledger": {"prices": PRICES},
    "batches": {"max_lines": 40, "max_file_mb": 1, "max_running": 16},
}
ENDED = {"completed", "failed", "cancelled", "expired"}


def line(custom_id: str, question: str = "What is 12 + 30?", **more: Any) -> dict[str, Any]:
    body = {"model": "hadal-tiny", "messages": [{"role": "user", "content": question}], **more}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: OpenAI, lines: list[Any], name: str = "in.jsonl") -> str:
    raw = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=(name, raw.encode()), purpose="batch").id


def create(client: OpenAI, lines: list[Any], **more: Any) -> str:
    given = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, lines), **given).id


def wait_ended(client: OpenAI, batch_id: str) -> Any:
    def ended() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_until(ended, "the batch has ended")


def rows(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def client_of(server: Server, key: str = "sk-alice", max_retries: int = 0) -> OpenAI:
    url = f"{server.url}/v1"
    opened.append(OpenAI(base_url=url, api_key=key, max_retries=max_retries, timeout=DEADLINE_S))
    return opened[-1]


opened: list[OpenAI] = []
"""Clients of the running test."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


@pytest.fixture
def server(mortal: StartServer) -> Server:
    return mortal(*OPTIONS, **FIELDS)


@pytest.fixture
def twofold(borrow: StartServer) -> Server:
    """A server with two gateways that runs one batch line at a time."""
    fields = {"gateway": {"processes": 2}, "batches": {"max_running": 1}}
    return borrow(*OPTIONS, ledger={"prices": PRICES}, **fields)


def charges(folder: Path) -> dict[str, tuple[str, str, int]]:
    """Return generation -> (tenant, model, pico-dollars) from the ledger."""
    engine = sa.create_engine(f"sqlite:///{folder / 'ledger.sqlite'}")
    query = "SELECT request_id, tenant, model, income_pico_usd FROM hadal_requests"
    query += " ORDER BY completed_us"
    with engine.connect() as connection:
        found = {row[0]: (row[1], row[2], row[3]) for row in connection.execute(sa.text(query))}
    engine.dispose()
    return found


@pytest.mark.promise("[ledger] batch_prices, by default half of prices")
def test_a_batch_from_file_to_file_at_half_the_price(server: Server) -> None:
    client, folder = client_of(server), server.folder.parent
    lines = [line(f"r{n}", f"What is {n} + 30?", temperature=0) for n in range(12)]
    lines += [line("long", max_tokens=10**6), line("none", model="other"), line("s", stream=True)]
    batch = wait_ended(client, create(client, lines, metadata={"for": "test"}))
    assert batch.status == "completed"
    assert batch.metadata == {"for": "test"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (15, 12)
    assert batch.request_counts.failed == 3
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= batch.expires_at
    done = rows(client, batch.output_file_id)
    assert [row["custom_id"] for row in done] == [f"r{n}" for n in range(12)]
    for n, row in enumerate(done):
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        body = row["response"]["body"]
        assert str(n + 30) in body["choices"][0]["message"]["content"]
        assert row["response"]["request_id"] == body["id"]
    failed = {row["custom_id"]: row["response"] for row in rows(client, batch.error_file_id)}
    assert {name: found["status_code"] for name, found in failed.items()} == {
        "long": 400,
        "none": 404,
        "s": 400,
    }
    assert failed["none"]["body"]["error"]["code"] == "model_not_found"

    asked = {"model": "hadal-tiny", "temperature": 0, "messages": lines[0]["body"]["messages"]}
    alone = client.chat.completions.create(**asked)
    assert (
        alone.choices[0].message.content
        == done[0]["response"]["body"]["choices"][0]["message"]["content"]
    )
    usage = [row["response"]["body"]["usage"] for row in done]
    expected = sum(
        500_000 * one["prompt_cache_hit_tokens"]
        + 1_000_000 * one["prompt_cache_miss_tokens"]
        + 2_000_000 * one["completion_tokens"]
        for one in usage
    )
    ids = {row["response"]["request_id"] for row in done}

    def charged() -> Any:
        mine = {name: v for name, v in charges(folder).items() if name.rpartition("-")[0] in ids}
        return mine if len(mine) == len(ids) else None

    mine = wait_until(charged, "all are in the ledger")
    assert sum(charge for _, _, charge in mine.values()) == expected
    assert {tenant for tenant, _, _ in mine.values()} == {"alice"}
    assert {model for _, model, _ in mine.values()} == {"hadal-tiny/batch"}
    name, tier = "hadal_charged_dollars_total", 'tier="batch"'
    assert metric(server, name, tier, key=AUDITOR) >= expected / 1e12


@LIVE
def test_files_are_kept_listed_and_deleted(server: Server) -> None:
    client = client_of(server, "sk-bob")
    for file in client.files.list():  # Files of other tests.
        client.files.delete(file.id)
    ids = [upload(client, [line("a")], f"f{n}.jsonl") for n in range(5)]
    found = client.files.retrieve(ids[0])
    assert (found.filename, found.purpose, found.status) == ("f0.jsonl", "batch", "processed")
    assert found.bytes == len(json.dumps(line("a")))
    assert client.files.content(ids[0]).json() == line("a")
    assert [file.id for file in client.files.list(limit=2, purpose="batch")] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")][:5] == ids
    page = client.files.list(limit=3, order="asc")
    assert (len(page.data), page.has_more) == (3, True)
    assert client.files.delete(ids[2]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[2])
    assert ids[2] not in [file.id for file in client.files.list()]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("x", b"x" * (2 << 20)), purpose="batch")
    assert refused.value.status_code == 413


def test_tenants_see_their_own_alone(server: Server) -> None:
    alice, bob = client_of(server), client_of(server, "sk-bob")
    file_id = upload(alice, [line("a")])
    batch_id = create(alice, [line("a")])
    for call in (
        lambda: bob.files.retrieve(file_id),
        lambda: bob.files.content(file_id),
        lambda: bob.files.delete(file_id),
        lambda: bob.batches.retrieve(batch_id),
        lambda: bob.batches.cancel(batch_id),
        lambda: bob.files.list(after=file_id),
        lambda: bob.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert batch_id not in [batch.id for batch in bob.batches.list()]
    assert batch_id in [batch.id for batch in alice.batches.list(limit=1)]
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "sk-eve").files.list()
    output = wait_ended(alice, batch_id).output_file_id
    with pytest.raises(openai.NotFoundError):
        bob.files.content(output)


@LIVE
@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["no json"], "invalid_json_line"),
        ([{**line("a"), "url": "/v1/completions"}], "mismatched_endpoint"),
        ([{**line("a"), "method": "GET"}], "invalid_method"),
        ([line("a"), line("a")], "duplicate_custom_id"),
        ([line("")], "invalid_custom_id"),
        ([{**line("a"), "body": []}], "invalid_body"),
        ([line(str(n)) for n in range(41)], "too_many_requests"),
        (["", " "], "empty_file"),
    ],
)
def test_an_input_that_cannot_be_taken_fails_and_says_why(
    server: Server, lines: list[Any], code: str
) -> None:
    client = client_of(server)
    batch = wait_ended(client, create(client, lines))
    assert batch.status == "failed"
    assert code in {error.code for error in batch.errors.data}
    assert batch.output_file_id is None


@LIVE
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    client = client_of(server)
    good = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": "x"}
    good["input_file_id"] = upload(client, [line("a")])
    with pytest.raises(openai.APIStatusError) as refused:
        client.batches.create(**{**good, **fields})
    assert refused.value.param == param


@LIVE
def test_a_cancelled_batch_keeps_what_was_answered(server: Server) -> None:
    """The batch has more lines than run at once. Short lines finish; the gate holds the other ones
    until the batch is cancelled.
    """
    client = client_of(server)
    server.gate.hold(gate.DECODE, after=60)
    lines = [line(f"r{n}", ignore_eos=True, max_tokens=300 if n % 8 else 5) for n in range(40)]
    batch_id = create(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed, "one is done")
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    server.gate.open()
    batch = wait_ended(client, batch_id)
    assert batch.status == "cancelled"
    done = rows(client, batch.output_file_id)
    assert 1 <= len(done) == batch.request_counts.completed < 40
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


@LIVE
def test_others_are_served_before_a_batch_and_it_ends(server: Server) -> None:
    """tests/unit/roles/front/test_front.py tests how much a batch costs other requests."""
    client, bob = client_of(server), client_of(server, "sk-bob")

    def num_now(state: str = "") -> float:
        return metric(server, "hadal_generations_now", state, key=AUDITOR)

    def ask(n: int) -> None:
        asked: Any = [{"role": "user", "content": f"What is {n} + 1?"}]
        bob.chat.completions.create(model="hadal-tiny", messages=asked, max_tokens=2)

    def are_answered() -> bool:
        return all(one.done() for one in asking)

    server.gate.hold(gate.DECODE, after=5)
    lines = [line(f"r{n}", f"{n} + 30?", max_tokens=400, ignore_eos=True) for n in range(12)]
    batch_id = create(client, lines)
    wait_until(lambda: num_now('state="decoding"') >= len(lines), "its lines are decoded")
    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask, n) for n in range(5)]
        num = len(lines) + len(asking)
        wait_until(lambda: num_now('state="decoding"') >= num, "others are decoded beside them")
        wait_until(server.gate.stepping(gate.DECODE, are_answered), "others are answered")
    assert client.batches.retrieve(batch_id).request_counts.completed == 0
    server.gate.open()
    assert wait_ended(client, batch_id).request_counts.completed == len(lines)


@LIVE
def test_a_budget_is_kept_at_the_batch_price(server: Server) -> None:
    client, folder = client_of(server, "sk-carol"), server.folder.parent
    lines = [line(f"r{n}", f"What is {n} + 1?", max_tokens=40) for n in range(30)]
    batch_id = create(client, lines)

    def spent() -> int:
        return sum(charge for tenant, _, charge in charges(folder).values() if tenant == "carol")

    # A line costs 40 tokens at 2 micro-dollars and about 10 prompt tokens at 1. With at most 95
    # micro-dollars left, no other line fits.
    wait_until(lambda: spent() > 10**9 - 95 * 10**6, "the budget ends it, for today")
    client.batches.cancel(batch_id)
    assert 2 <= wait_ended(client, batch_id).request_counts.completed < 30
    assert spent() <= 10**9


@LIVE
def test_what_never_fits_is_an_error_and_the_rest_goes_on(twofold: Server) -> None:
    """One line of each tenant can never be admitted; the other line finishes. One of the lines that
    finish asks for more choices than there are prefill ranks.
    """
    dave, carol = (client_of(twofold, key, max_retries=10) for key in ("sk-dave", "sk-carol"))
    long = " and ".join(["one"] * 60)
    of_dave = create(dave, [line("long", long), line("short", "Hi")])
    of_carol = create(carol, [line("dear", max_tokens=3000), line("n", n=3, max_tokens=20)])
    for client, batch_id, never, fits in (
        (dave, of_dave, "long", "short"),
        (carol, of_carol, "dear", "n"),
    ):
        batch = wait_ended(client, batch_id)
        (failed,) = rows(client, batch.error_file_id)
        assert failed["custom_id"] == never
        assert failed["response"]["body"]["error"]["code"] == "request_too_large"
        (done,) = rows(client, batch.output_file_id)
        assert done["custom_id"] == fits
    assert len(done["response"]["body"]["choices"]) == 3


@LIVE
def test_any_gateway_takes_files_and_batches(twofold: Server) -> None:
    batches: list[Any] = []

    def ask(n: int) -> None:  # One connection each: the kernel chooses the gateway.
        # The second gateway replies 503 until it has received the keys.
        client = client_of(twofold, max_retries=10)
        batches.append((client, create(client, [line(f"{n}-{i}") for i in range(2)])))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert len(batches) == 8
    for client, batch_id in batches:
        assert wait_ended(client, batch_id).request_counts.completed == 2


def struck(server: Server, tenant: str, strike: Callable[[], Server]) -> None:
    """Call `strike` during a batch: each custom_id appears once in the output and is charged once.
    `strike` returns the server to ask afterwards.
    """
    client, folder = client_of(server, f"sk-{tenant}"), server.folder.parent
    names = [f"r{n}" for n in range(30)]
    lines = [line(name, f"What is {n} + 30?", max_tokens=60) for n, name in enumerate(names)]
    batch_id = create(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed > 3, "begun")
    client = client_of(strike(), f"sk-{tenant}")
    batch = wait_ended(client, batch_id)
    assert batch.status == "completed"
    done = rows(client, batch.output_file_id) + rows(client, batch.error_file_id)
    assert sorted(row["custom_id"] for row in done) == sorted(names)
    assert batch.request_counts.completed == 30
    # Each line in the output is charged once, and discarded work is not. Charges are written in
    # order, so those of a later batch come last.
    later = wait_ended(client, create(client, [line("later")]))
    done += rows(client, later.output_file_id)
    written = sorted(row["response"]["request_id"] for row in done)

    def charged() -> list[str]:
        found = charges(folder).items()
        return sorted(name.rpartition("-")[0] for name, (whose, _, _) in found if whose == tenant)

    wait_until(lambda: len(charged()) >= 31, "all are in the ledger")
    assert charged() == written


@pytest.mark.promise(
    "So after kill -9 of the gateway or of all processes, each custom_id is once in "
    "the output and is charged once"
)
@LIVE
def test_nothing_is_lost_or_done_twice_when_the_gateway_is_killed(server: Server) -> None:
    def strike() -> Server:
        server.wait_restarted("gateway", server.kill("gateway"))
        return server

    struck(server, "erin", strike)


@pytest.mark.promise(
    "So after kill -9 of the gateway or of all processes, each custom_id is once in "
    "the output and is charged once"
)
@LIVE
def test_nothing_is_lost_or_done_twice_when_all_are_killed(
    ending: StartServer, start_server: StartServer
) -> None:
    server = ending(*OPTIONS, **FIELDS)

    def strike() -> Server:
        os.kill(server.status().supervisor_pid, signal.SIGKILL)
        server.process.wait(DEADLINE_S)
        url = str(server.folder.parent / "ledger.sqlite")
        return start_server(*OPTIONS, **{**FIELDS, "ledger": {"url": url, "prices": PRICES}})

    struck(server, "frank", strike)
