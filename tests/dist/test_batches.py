"""/v1/files and /v1/batches through the official client: every custom_id once in the output, also over
`kill -9`; tenants apart; their own price; and others served as without.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from openai import OpenAI

from tests.dist.conftest import Server, StartServer, starting
from tests.dist.serving import metric
from tests.waiting import wait_until

KEYS = ("sk-alice name=alice", "sk-bob name=bob")
PRICES = "1/2/4"
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


def wait_ended(client: OpenAI, batch_id: str, timeout_s: float = 90.0) -> Any:
    def ended() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_until(ended, "the batch has ended")


def rows(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def client_of(server: Server, key: str = "sk-alice", max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=max_retries, timeout=60)


def start_with_keys(
    start: StartServer, folder: Path, keys: tuple[str, ...] = KEYS, **more: Any
) -> Server:
    path = folder / "keys.txt"
    path.write_text("\n".join(keys) + "\n")
    path.chmod(0o600)
    ledger = {"url": str(folder / "ledger.sqlite"), "prices": PRICES}
    return start("--api-keys-file", str(path), ledger=ledger, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with starting() as start:
        yield start_with_keys(start, folder, batches={"max_lines": 40, "max_file_mb": 1})


def charges(folder: Path) -> dict[str, tuple[str, str, int]]:
    """Generation -> tenant, model, pico-dollars, as the ledger has them."""
    engine = sa.create_engine(f"sqlite:///{folder / 'ledger.sqlite'}")
    query = "SELECT request_id, tenant, model, income_pico_usd FROM hadal_requests"
    with engine.connect() as connection:
        found = {row[0]: (row[1], row[2], row[3]) for row in connection.execute(sa.text(query))}
    engine.dispose()
    return found


def test_a_batch_from_file_to_file_at_half_the_price(server: Server, folder: Path) -> None:
    client = client_of(server)
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
    assert metric(server, "hadal_charged_dollars_total", 'tier="batch"') >= expected / 1e12


def test_files_are_kept_listed_and_deleted(server: Server) -> None:
    client = client_of(server, "sk-bob")
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


def test_a_cancelled_batch_keeps_what_was_answered(server: Server) -> None:
    client = client_of(server)
    lines = [line(f"r{n}", ignore_eos=True, max_tokens=300) for n in range(40)]
    batch_id = create(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed, "one is done")
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = wait_ended(client, batch_id)
    assert batch.status == "cancelled"
    done = rows(client, batch.output_file_id)
    assert 1 <= len(done) == batch.request_counts.completed < 40
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_others_are_served_as_without_and_the_batch_ends(server: Server) -> None:
    client, bob = client_of(server), client_of(server, "sk-bob")

    def first_tokens(num: int) -> list[float]:
        times = []
        for n in range(num):
            start_s = time.monotonic()
            asked = [{"role": "user", "content": f"What is {n} + {time.time_ns() % 1000}?"}]
            stream = bob.chat.completions.create(model="hadal-tiny", messages=asked, stream=True)
            next(iter(stream))
            times.append(time.monotonic() - start_s)
            stream.close()
            time.sleep(0.1)
        return sorted(times)

    first_tokens(5)
    alone = first_tokens(40)
    lines = [
        line(f"r{n}", f"What is {n} + 30?", max_tokens=150, ignore_eos=True) for n in range(40)
    ]
    batch_id = create(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed, "it runs")
    beside = first_tokens(40)
    during = client.batches.retrieve(batch_id)
    assert during.status == "in_progress", "it ran all the while"
    assert during.request_counts.completed >= 2
    p95_alone, p95_beside = alone[37], beside[37]
    print(f"TTFT p95 alone {p95_alone * 1e3:.0f} ms, beside a batch {p95_beside * 1e3:.0f} ms")
    batch = wait_ended(client, batch_id, 180.0)
    assert batch.request_counts.completed == 40
    assert p95_beside <= 1.5 * p95_alone + 0.15


@pytest.mark.parametrize("who", ["gateway", "supervisor"])
def test_nothing_is_lost_or_done_twice_when_somebody_is_killed(
    who: str, tmp_path: Path, start_server: StartServer
) -> None:
    server = start_with_keys(start_server, tmp_path)
    client = client_of(server)
    names = [f"r{n}" for n in range(30)]
    lines = [line(name, f"What is {n} + 30?", max_tokens=60) for n, name in enumerate(names)]
    batch_id = create(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed > 3, "begun")
    if who == "gateway":
        old = server.kill("gateway")
        server.wait_restarted("gateway", old)
    else:
        server.status()
        pid = server.status().supervisor_pid
        os.kill(pid, signal.SIGKILL)
        server.process.wait(30)
        server = start_with_keys(start_server, tmp_path)
        client = client_of(server)
    batch = wait_ended(client, batch_id)
    assert batch.status == "completed"
    done = rows(client, batch.output_file_id) + rows(client, batch.error_file_id)
    assert sorted(row["custom_id"] for row in done) == sorted(names)
    assert batch.request_counts.completed == 30
    # What stands in the output is charged, each line once, and nothing that was thrown away is.
    written = sorted(row["response"]["request_id"] for row in done)
    wait_until(lambda: len(charges(tmp_path)) >= 30, "all are in the ledger")
    time.sleep(2.5)  # Two more looks at what is left to be charged.
    assert sorted(name.rpartition("-")[0] for name in charges(tmp_path)) == written


def test_a_budget_is_kept_at_the_batch_price(tmp_path: Path, start_server: StartServer) -> None:
    keys = ("sk-alice name=alice dollars_per_day=0.001", KEYS[1])
    server = start_with_keys(start_server, tmp_path, keys)
    client = client_of(server)
    lines = [line(f"r{n}", f"What is {n} + 1?", max_tokens=40) for n in range(30)]
    batch_id = create(client, lines)
    seen = -1
    while (now := client.batches.retrieve(batch_id).request_counts.completed) > seen:
        seen = now
        time.sleep(4)
    assert 2 <= seen < 30, "the budget ends it, for today"
    spent = sum(charge for _, _, charge in charges(tmp_path).values())
    assert 0 < spent <= 10**9
    client.batches.cancel(batch_id)
    assert wait_ended(client, batch_id).request_counts.completed == seen


def test_what_never_fits_is_an_error_and_the_rest_goes_on(
    tmp_path: Path, start_server: StartServer
) -> None:
    """A line asks for more choices than there are prefill ranks; two can never be let in."""
    keys = ("sk-alice name=alice dollars_per_day=0.001", "sk-bob name=bob tokens_per_minute=40")
    server = start_with_keys(start_server, tmp_path, keys, batches={"max_running": 1})
    bob, alice = client_of(server, "sk-bob"), client_of(server)
    long = " and ".join(["one"] * 60)
    of_bob = create(bob, [line("long", long), line("short", "Hi")])
    of_alice = create(alice, [line("dear", max_tokens=3000), line("n", n=3, max_tokens=20)])
    for client, batch_id, never, fits in (
        (bob, of_bob, "long", "short"),
        (alice, of_alice, "dear", "n"),
    ):
        batch = wait_ended(client, batch_id)
        (failed,) = rows(client, batch.error_file_id)
        assert failed["custom_id"] == never
        assert failed["response"]["body"]["error"]["code"] == "request_too_large"
        (done,) = rows(client, batch.output_file_id)
        assert done["custom_id"] == fits
    assert len(done["response"]["body"]["choices"]) == 3


def test_any_gateway_takes_files_and_batches(tmp_path: Path, start_server: StartServer) -> None:
    server = start_with_keys(start_server, tmp_path, gateway={"processes": 2})
    batches: list[Any] = []

    def ask(n: int) -> None:  # A connection each: the kernel chooses the gateway.
        # The second gateway says 503 until it has heard of the keys.
        client = client_of(server, max_retries=10)
        batches.append((client, create(client, [line(f"{n}-{i}") for i in range(2)])))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(batches) == 8
    for client, batch_id in batches:
        assert wait_ended(client, batch_id).request_counts.completed == 2


def test_without_a_ledger_there_are_none(start_server: StartServer) -> None:
    server = start_server()
    assert httpx.get(f"{server.url}/v1/files", timeout=10).status_code == 404
