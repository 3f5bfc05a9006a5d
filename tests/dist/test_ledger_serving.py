"""Facts that a running server writes: `hadal report` prints what its clients received, to the
token, however their requests ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dist import gate
from tests.dist.cached import settle
from tests.dist.pool import OUTPUT_TOKENS
from tests.dist.served import fork
from tests.dist.serving import Server, StartServer, metric
from tests.unit.runtime.ledger.test_outbox import left_in
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_for, wait_until

WHOLE = {"ignore_eos": True, "temperature": 0}
NUM_LONG = 4
DECODING = 'state="decoding"'
MORE_TOKENS = 100
"""Maximum number of tokens generated beyond those after which a client disconnects. They are
generated before the server notices it, or are not yet sent as text.
"""


def report(path: Path, *arguments: str) -> dict[str, Any]:
    """Return the output of `hadal report --json` for this ledger."""
    with tempfile.TemporaryFile() as said:
        command = ["report", "--ledger", str(path), "--json", *arguments]
        done = fork(command, os.environ, said.fileno())
        code = done.wait(DEADLINE_S)
        said.seek(0)
        printed = said.read().decode()
    assert code == 0, printed
    fields = json.loads(printed)
    assert isinstance(fields, dict)
    return fields


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path, timeout=DEADLINE_S)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def wait_for_rows(path: Path, number: int) -> None:
    """Wait for this number of facts; they are written shortly after their replies."""
    wait_until(
        lambda: rows(path, "SELECT count(*) FROM hadal_requests")[0][0] >= number,
        f"{number} facts",
    )


async def ask(client: httpx.AsyncClient, model: str, stream: bool, **fields: Any) -> dict[str, Any]:
    """Send a completion; return its usage as the client receives it."""
    body = {"model": model, "stream": stream, **WHOLE, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = await client.post("/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    if not stream:
        usage = reply.json()["usage"]
    else:
        chunks = [
            json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
        ]
        usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    assert isinstance(usage, dict)
    return usage


def leave_in_the_middle(server: Server, model: str, after: int) -> tuple[str, int]:
    """Disconnect once `after` tokens are received; the gate holds the request MORE_TOKENS tokens later.
    Return the reply's id, and the number of tokens received.
    """
    settle(server)  # Otherwise the gate could count a step of an earlier request.
    server.gate.hold(gate.DECODE, after + MORE_TOKENS - 1)  # Prefill makes the first token.
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": model,
            "prompt": "once upon a time",
            "stream": True,
            "max_tokens": 3000,
            "logprobs": 0,
            "ignore_eos": True,
            "seed": after,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    data = b""
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while num_tokens_in(data) < after:
            data += connection.recv(65_536)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(65_536):
            data += more
    server.gate.open()
    return chunks_in(data)[0]["id"], num_tokens_in(data)


def chunks_in(data: bytes) -> list[dict[str, Any]]:
    """Return the completely received events."""
    events = [part.partition(b"\n\n") for part in data.split(b"data: ")[1:]]
    return [json.loads(event) for event, end, _ in events if end and event.endswith(b"}")]


def num_tokens_in(data: bytes) -> int:
    return sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks_in(data))


@pytest.mark.promise(
    "Each generation (text request, or one choice of it) has one fact, written when "
    "its HTTP request has ended, however it ended."
)
def test_the_report_is_what_clients_saw(start_server: StartServer, folder: Path) -> None:
    """Covers streams, whole replies, several choices, cache hits, disconnects, and a decode unit
    killed under its streams.
    """
    path = folder / "l.sqlite"
    server = start_server(ledger={"url": str(path), "prices": "1/2/3", "gpu_hour_usd": 0.5})
    model = server.model

    async def busy() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            asked = [
                ask(
                    client,
                    model,
                    index % 2 == 0,
                    prompt=f"{index % 3} " * 100,
                    max_tokens=5 + index,
                    n=1 + index % 2,
                )
                for index in range(12)
            ]
            usages = list(await asyncio.gather(*asked))
            usages += [await ask(client, model, True, prompt="0 " * 100, max_tokens=3)]
            server.gate.hold(gate.DECODE, 5)
            long = [
                asyncio.create_task(ask(client, model, True, prompt=f"tell {index}", max_tokens=40))
                for index in range(NUM_LONG)
            ]
            await wait_for(
                lambda: metric(server, "hadal_generations_now", DECODING) == NUM_LONG,
                "all long requests are decoded",
            )
            old_pid = server.kill("decode-0")
            server.gate.open()
            usages += await asyncio.gather(*long)
            await asyncio.to_thread(server.wait_restarted, "decode-0", old_pid)
            assert (
                await client.post("/v1/completions", json={"model": model, "prompt": 3.5})
            ).status_code == 400
            return usages

    usages = asyncio.run(busy())
    left = {leave_in_the_middle(server, model, after): after for after in (3, 20, 60)}
    num_rows = 12 + 6 + 1 + NUM_LONG + 3
    wait_for_rows(path, num_rows)

    of_cancelled = "FROM hadal_requests WHERE \"end\" = 'cancelled'"
    id_to_billed = dict(rows(path, f"SELECT request_id, tokens_out {of_cancelled}"))
    assert set(id_to_billed) == {f"{request_id}-0" for request_id, _ in left}
    for (request_id, num_seen), after in left.items():
        billed = id_to_billed[f"{request_id}-0"]
        assert after <= num_seen <= billed <= after + MORE_TOKENS
    cancelled = rows(path, f"SELECT sum(tokens_hit), sum(tokens_miss) {of_cancelled}")[0]
    expected = {
        "requests": num_rows,
        "requests_finished": num_rows - 3,
        "requests_cancelled": 3,
        "tokens_hit": sum(usage["prompt_cache_hit_tokens"] for usage in usages) + cancelled[0],
        "tokens_miss": sum(usage["prompt_cache_miss_tokens"] for usage in usages) + cancelled[1],
        "tokens_out": sum(usage["completion_tokens"] for usage in usages)
        + sum(id_to_billed.values()),
    }
    fields = report(path)
    assert {name: fields[name] for name in expected} == expected
    assert metric(server, OUTPUT_TOKENS) == expected["tokens_out"]
    assert expected["tokens_hit"] > 0
    assert fields["retries"] >= NUM_LONG, "each of the long streams lost its unit"
    hit, miss, out = (expected[f"tokens_{kind}"] for kind in ("hit", "miss", "out"))
    assert fields["income_micro_usd"] == hit + 2 * miss + 3 * out
    assert [line["model"] for line in report(path, "--by", "model")["models"]] == [model]

    assert server.stop() == 0
    units = rows(path, "SELECT unit, count(*) FROM hadal_nodes GROUP BY unit ORDER BY unit")
    assert units == [("decode-0", 2), ("prefill-0", 1)], (
        "the killed unit's second life is an interval of its own"
    )
    assert rows(path, "SELECT DISTINCT num_ranks, ranks_per_node, gpu FROM hadal_nodes") == [
        (1, 8, "cpu")
    ]
    fields = report(path)
    assert fields["requests"] == num_rows
    assert fields["nodes_peak"] == 0.25
    node_hours = fields["prefill_node_hours"] + fields["decode_node_hours"]
    assert fields["cost_usd"] == pytest.approx(node_hours * 8 * 0.5, abs=1e-6)
    assert fields["prefill_tokens_per_s_node"] == pytest.approx(
        (hit + miss) / (3600 * fields["prefill_node_hours"])
    )
    assert not list(folder.glob("*.outbox"))


@pytest.mark.promise("facts wait in the outbox, a SQLite file that all gateways share")
@pytest.mark.more("tests of the writer hold it for databases that are down or hang")
@pytest.mark.slow("the lock is waited for, and a gateway starts anew")
def test_a_database_that_hangs_and_a_gateway_that_dies(
    start_server: StartServer, folder: Path
) -> None:
    """Another process holds the ledger's lock: clients are answered, facts wait on disk, and the
    gateway's death loses no fact. tests/unit/runtime/ledger asserts that `add` never waits.
    """
    path = folder / "l.sqlite"
    server = start_server(ledger={"url": str(path)})
    model = server.model

    async def few(number: int) -> int:
        async with httpx.AsyncClient(base_url=server.url) as client:
            usages = [
                await ask(client, model, True, prompt=f"tell {index}", max_tokens=8)
                for index in range(number)
            ]
        return sum(usage["completion_tokens"] for usage in usages)

    num_tokens = asyncio.run(few(3))
    wait_for_rows(path, 3)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        num_tokens += asyncio.run(few(5))
        wait_until(
            lambda: metric(server, "hadal_ledger_waiting") == 0, "the facts are in the outbox"
        )
        assert metric(server, "hadal_ledger_down") == 1
        assert left_in(folder / "l.sqlite.outbox")
        old_pid = server.kill("gateway")
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    server.wait_restarted("gateway", old_pid)
    wait_for_rows(path, 8)
    assert report(path)["tokens_out"] == num_tokens
    wait_until(lambda: not left_in(folder / "l.sqlite.outbox"), "what waited is written")
    num_tokens += asyncio.run(few(1))
    wait_for_rows(path, 9)
    assert report(path)["tokens_out"] == num_tokens


@pytest.mark.more("a server without a ledger, of which nearly all tests are")
def test_without_a_ledger_nothing_is_written(start_server: StartServer, folder: Path) -> None:
    server = start_server(
        ledger={"url": "off"}, environment={"XDG_STATE_HOME": str(folder), "HADAL_LEDGER": ""}
    )

    async def one() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            await ask(client, server.model, False, prompt="hi", max_tokens=3)

    asyncio.run(one())
    assert server.stop() == 0
    assert list(folder.iterdir()) == []


@pytest.mark.more("tests of the store refuse such a file")
def test_a_file_of_something_else_ends_the_start_with_a_reason(
    start_server: StartServer, folder: Path
) -> None:
    path = folder / "notes.txt"
    path.write_text("these are notes " * 100)
    server = start_server(wait=False, ledger={"url": str(path)})
    assert server.process.wait(DEADLINE_S) == 2
    assert "it is not a SQLite file. Give the ledger another path." in server.log()
    assert path.read_text() == "these are notes " * 100
