"""A server's metrics count exactly the output tokens that its ledger has, however its requests end."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.dist import gate
from tests.dist.pool import OUTPUT_TOKENS, check_tokens
from tests.dist.serving import Server, StartServer, metric
from tests.dist.test_batches import create, line, wait_ended
from tests.waiting import DEADLINE_S, wait_for

LIMITS = {"max_running": 8, "max_queued": 2, "max_retries": 0, "request_timeout_s": 60.0}
TEXT: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 12, "ignore_eos": True}
STREAM: dict[str, Any] = {"stream": True}
STOP = {"stop": ["a", "e"]}
SCORED = {"prompt": ["one", "and more"], "echo": True, "logprobs": 1, "max_tokens": 0}
ENDING = (
    *(TEXT, TEXT | STREAM, TEXT | {"n": 3}, TEXT | STREAM | {"n": 3}),
    *(TEXT | STOP, TEXT | STREAM | STOP | {"n": 2}, SCORED, SCORED | STREAM),
    *(TEXT | {"max_tokens": 1}, TEXT | {"max_tokens": 0}),
)
"""Requests that end normally."""
LONG = TEXT | {"max_tokens": 400}
HELD = (LONG, LONG | STREAM, LONG | {"n": 2}, LONG | STREAM | {"n": 2, "stop": ["zz"]})
NUM_HELD = 6
"""Number of choices in HELD."""
NUM_CROWD = 16
NUM_STEPS = 8

Ask = Callable[[dict[str, Any]], "asyncio.Task[httpx.Response]"]


@pytest.fixture
def server(mortal: StartServer) -> Server:
    return mortal("--gateways", "2", decode={"drafts": 2}, limits=LIMITS)


@pytest.fixture
def batches(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=DEADLINE_S) as client:
        yield client


async def decoding(server: Server, num_choices: int) -> None:
    """Wait until at least `num_choices` choices are in decode."""
    await wait_for(
        lambda: metric(server, "hadal_generations_now", 'state="decoding"') >= num_choices,
        f"{num_choices} choices are decoded",
    )


async def held(server: Server, ask: Ask) -> list[asyncio.Task[httpx.Response]]:
    """Return requests held after at least NUM_STEPS steps, with their tokens so far counted."""
    before = metric(server, OUTPUT_TOKENS)
    server.gate.hold(gate.DECODE)
    tasks = [ask(fields) for fields in HELD]
    await decoding(server, NUM_HELD)
    least = before + NUM_HELD * (NUM_STEPS + 1)
    are_counted = server.gate.stepping(gate.DECODE, lambda: metric(server, OUTPUT_TOKENS) >= least)
    await wait_for(are_counted, "tokens of running requests are counted")
    return tasks


async def end_in_every_way(server: Server, batches: OpenAI) -> None:
    """End requests in every way (normal end, disconnect, time-out, refusal, loss of their unit)
    while a batch runs.
    """
    # Every request has its own connection, so that it may reach either gateway.
    async with httpx.AsyncClient(
        base_url=server.url,
        timeout=DEADLINE_S,
        headers={"connection": "close"},
        limits=httpx.Limits(max_connections=None),
    ) as client:

        def ask(fields: dict[str, Any]) -> asyncio.Task[httpx.Response]:
            body = {"model": "hadal-tiny", **fields}
            return asyncio.create_task(client.post("/v1/completions", json=body))

        for fields in ENDING:
            await ask(fields)

        left = await held(server, ask)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        server.gate.open()

        await asyncio.wait(await held(server, ask))  # Waits until they time out.
        server.gate.open()

        server.gate.hold(gate.DECODE)
        crowd = [ask(TEXT | {"stream": n % 2 == 0}) for n in range(NUM_CROWD)]
        await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        server.gate.open()
        assert 429 in {task.result().status_code for task in (await asyncio.wait(crowd))[0]}

        server.gate.hold(gate.DECODE, NUM_STEPS)
        lost = [ask(LONG | STREAM | {"n": 2}) for _ in range(2)]
        await decoding(server, 4)
        lines = [line(f"r{n}", max_tokens=30, n=1 + n % 2) for n in range(8)]
        batch_id = await asyncio.to_thread(create, batches, lines)
        await decoding(server, 5)
        old_pid = server.kill("decode-0")
        server.gate.open()
        await asyncio.wait(lost)
        await asyncio.to_thread(server.wait_restarted, "decode-0", old_pid)
        await asyncio.to_thread(wait_ended, batches, batch_id)


@pytest.mark.promise("hadal_output_tokens_total equals the ledger's output tokens, to the token")
@pytest.mark.more("requests time out after a minute; unit tests hold each end in `make test`")
@pytest.mark.slow("requests time out, and a unit is started again")
def test_metric_and_ledger_agree_to_the_token(server: Server, batches: OpenAI) -> None:
    asyncio.run(end_in_every_way(server, batches))
    num_tokens = check_tokens(server)
    with closing(sqlite3.connect(server.folder.parent / "ledger.sqlite")) as ledger:
        query = 'SELECT "end", SUM(tokens_out) FROM hadal_requests GROUP BY "end"'
        end_to_tokens = dict(ledger.execute(query))
    assert end_to_tokens["429"] == 0
    for end in ("length", "stop", "cancelled", "504", "503"):
        assert end_to_tokens[end] > 0, f"requests that end so have tokens: {end_to_tokens}"
    in_front = httpx.get(f"{server.url}/status").json()["snapshot"]["totals"]["tokens_out"]
    print(f"{end_to_tokens}: {num_tokens} in all; {in_front} tokens came from units")
