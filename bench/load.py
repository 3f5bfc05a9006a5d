"""A served model under load: tokens per second, time to first token and between tokens, by concurrency.

    python -m bench.load [--quick] [--requests 500]

Prompts are held-out questions of the tasks that the shipped model learned; the model ends its answers itself.
Closed loop: a client sends its next request when the last one is answered. Requests are sent and measured as in
`hadal bench` (hadal.apps.bench.request), but over a cheaper transport, because the clients run on the same
cores as the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.checkpoints import SHIPPED
from bench.server import Address, serving
from bench.subject import ROOT
from bench.tables import parser_of, percentile, table_of
from evals.run import held_out_examples
from hadal.apps.bench.request import STREAMED, Sample, Target, client_for, measure
from hadal.apps.bench.values import tpot_s, ttft_s

CONCURRENCIES = (1, 8, 32, 64)
TIMEOUT_S = 600.0


class CheapTransport(httpx.AsyncBaseTransport):
    """HTTP/1.0 with one connection per request: an answer ends with its connection."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request with its whole body, and return its answer once the head has arrived."""
        url = request.url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 20)
        content = await request.aread()
        path = url.raw_path.decode()
        lines = [f"{request.method} {path} HTTP/1.0", *map(": ".join, request.headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = [line.split(": ", 1) for line in head[1:] if line]
        return httpx.Response(
            int(head[0].split(" ")[1]),
            headers=[(name, value) for name, value in fields],
            stream=_Pieces(reader, writer),
        )


class _Pieces(httpx.AsyncByteStream):
    """Body of an answer, in pieces as they arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._reader.read(65536):
            yield piece

    async def aclose(self) -> None:
        self._writer.close()


async def stream(address: Address, endpoint: str, body: Mapping[str, Any], key: str = "") -> Sample:
    """Send `body` as a streamed request and return its measurements; times are values of time.perf_counter().

    `endpoint`: chat or completions. `key`: its tenant's key; empty: none. Raises RuntimeError if the request fails.
    """
    url = f"http://{address[0]}:{address[1]}/v1"
    target = Target(url, "", key, endpoint, timeout_s=TIMEOUT_S)
    # A token's text may be empty, so tokens are counted by their ids.
    ids = {"return_token_ids": True} if endpoint == "completions" else {}
    async with client_for(target, CheapTransport()) as client:
        sample = Sample(time.perf_counter())
        await measure(client, target, {**body, **ids, **STREAMED}, sample, time.perf_counter)
    if sample.error:
        raise RuntimeError(f"a request failed: {sample.error}")
    return sample


def first_ms(samples: Sequence[Sample]) -> list[float]:
    """Return the times to the first token, ms; streams without a token have none."""
    return [1e3 * seconds for sample in samples if (seconds := ttft_s(sample)) is not None]


def token_ms(samples: Sequence[Sample]) -> list[float]:
    """Return each stream's mean time between tokens, ms; streams of one token have none."""
    return [1e3 * seconds for sample in samples if (seconds := tpot_s(sample)) is not None]


def spans(values_ms: Sequence[float], digits: int, share: float = 0.95) -> str:
    """Return the median and the percentile `share` of the values as table text."""
    return ", ".join(f"{percentile(values_ms, at):.{digits}f}" for at in (0.5, share))


def num_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of all output tokens."""
    return sum(sample.tokens_out or 0 for sample in samples)


def rate(samples: Sequence[Sample]) -> float:
    """Return tokens/s, from the first request to the last token."""
    last_s = max(sample.last_s or 0.0 for sample in samples)
    return num_tokens(samples) / (last_s - min(sample.sent_s for sample in samples))


def random_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy completion of `prompt` that runs to its full length."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


async def keep_asking(
    address: Address,
    model: str,
    shape: tuple[int, int],
    until_s: float,
    rng: random.Random,
    key: str = "",
) -> list[Sample]:
    """Send random streamed requests one after the other until `until_s` (time.perf_counter()). Return their
    measurements. `shape`: (prompt tokens, output tokens). `key`: a tenant's key; empty: none.
    """
    done = []
    while time.perf_counter() < until_s:
        prompt = [rng.randrange(20, 900) for _ in range(shape[0])]
        body = random_body(model, prompt, shape[1])
        done.append(await stream(address, "completions", body, key))
    return done


def bodies(num_requests: int) -> list[dict[str, Any]]:
    """Return chat requests of mixed lengths, the same in every run."""
    examples = held_out_examples(max(1, num_requests // 8), seed=11)
    return [
        {
            "model": SHIPPED.name,
            "messages": list(examples[i % len(examples)].messages),
            "seed": i,
            "temperature": 0.6,
        }
        for i in range(num_requests)
    ]


async def run_load(
    address: Address, requests: Sequence[dict[str, Any]], concurrency: int
) -> list[Sample]:
    """Send all chat requests, `concurrency` at a time. Raises RuntimeError if one fails."""
    waiting = iter(requests)
    results: list[Sample] = []

    async def client() -> None:
        for body in waiting:
            results.append(await stream(address, "chat", body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("load", __doc__, "32 requests, concurrency 1 and 32")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console = Console()
    table = table_of(
        "concurrency|requests|tokens/s out|ttft ms p50, p99|ms a token p50, p99",
        "hadal serve, hadal-tiny, chat requests",
        0,
    )
    with serving(checkout=options.checkout) as running:
        asyncio.run(run_load(running.address, bodies(16), 8))  # Warm-up.
        for concurrency in (1, 32) if options.quick else CONCURRENCIES:
            wanted = min(options.requests, 32 + options.requests * concurrency // 64)
            number = 32 if options.quick else wanted
            start_s = time.perf_counter()
            samples = asyncio.run(run_load(running.address, bodies(number), concurrency))
            seconds = time.perf_counter() - start_s
            table.add_row(
                str(concurrency),
                str(number),
                f"{num_tokens(samples) / seconds:,.0f}",
                spans(first_ms(samples), 0, 0.99),
                spans(token_ms(samples), 2, 0.99),
            )
            console.print(f"  [dim]concurrency {concurrency}: {seconds:.1f} s[/dim]")
    console.print(table)


if __name__ == "__main__":
    main()
