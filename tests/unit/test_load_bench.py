"""The client of the benches: answers are read to their end, timed and counted; refusals raise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import pytest

from bench.load import first_ms, num_tokens, rate, stream, token_ms
from bench.server import Address
from bench.tables import percentile
from hadal.apps.bench.request import Sample

PIECES = (
    {"choices": [{"text": "", "token_ids": [7]}]},
    {"choices": [{"text": "a", "token_ids": [8, 9]}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_cache_hit_tokens": 2},
    },
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENTS = b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in PIECES)
END = b"data: [DONE]\n\n"
T = TypeVar("T")


def asked(answer: bytes, ask: Callable[[Address], asyncio.Future[T]]) -> tuple[T, bytes]:
    """Return the client's result and the head of its request, with a server that sends this answer."""

    async def run() -> tuple[T, bytes]:
        heads = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await ask((host, port)), heads[0]

    return asyncio.run(run())


def one(address: Address) -> asyncio.Future[Sample]:
    return asyncio.ensure_future(stream(address, "completions", {"prompt": [1]}, "a-key"))


def test_a_stream_is_timed_and_counted() -> None:
    sample, head = asked(HEAD + EVENTS + END, one)
    assert head.startswith(b"POST /v1/completions HTTP/1.0\r\n")
    assert b"authorization: bearer a-key" in head.lower()
    assert (sample.tokens_in, sample.tokens_out, sample.tokens_cached) == (5, 3, 2)
    assert sample.num_pieces == 2, "a token without text is one, too"
    assert num_tokens([sample, sample]) == 6
    assert len(first_ms([sample])) == len(token_ms([sample])) == 1
    assert rate([sample]) > 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 429 No\r\n\r\n{"error": {"code": "busy"}}', "429 busy"),
        (HEAD + EVENTS, "the stream ended early"),
    ],
)
def test_a_failed_request_is_raised(answer: bytes, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        asked(answer, one)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
