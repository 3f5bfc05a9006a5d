"""Streamed request to a server with OpenAI's API, with the times at which text arrived.

    sample = Sample(due_s=0.0)
    await measure(client, target, target.body(prompt, 100, is_streamed=True), sample, now)

`Sample` has the measurements, even if the request failed. Depends on the API's streams only, not on
the schedule of requests or the making of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from httpx_sse import EventSource, SSEError

from hadal.core.errors import HadalError

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Body fields that request a streamed answer with its token usage at the end."""


class BenchError(HadalError):
    """Error: the server cannot be measured; the text says why."""


@dataclass(slots=True)
class Sample:
    """Times (seconds of the caller's clock) and counts of one request."""

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    """Time of the last piece with text."""
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Times between consecutive pieces of text."""
    num_pieces: int = 0
    tokens_in: int | None = None
    """Prompt tokens as the server reports them; None if it does not."""
    tokens_out: int | None = None
    tokens_cached: int | None = None
    error: str = ""
    """Kind of the error; empty if there is none, or if the request has not ended."""


@dataclass(frozen=True)
class Target:
    """Server and model to measure, and how to reach it."""

    url: str
    """Base URL, including /v1."""
    model: str
    api_key: str = ""
    endpoint: str = "chat"
    """"chat" or "completions"."""
    ignores_eos: bool = False
    timeout_s: float = 120.0

    @property
    def path(self) -> str:
        """Path of the endpoint after /v1."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, prompt: str, tokens_out: int, *, is_streamed: bool) -> dict[str, Any]:
        """Return the JSON body of a request with this prompt."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": tokens_out}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if is_streamed:
            fields |= STREAMED
        return fields | ({"ignore_eos": True} if self.ignores_eos else {})


def client_for(
    target: Target, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Return a client without a limit on connections. `transport`: replaces httpx's, for tests."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        transport=transport,
        headers=headers,
        timeout=httpx.Timeout(target.timeout_s, connect=min(10.0, target.timeout_s)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "text", "token_ids")
"""Fields of a streamed piece that contain tokens."""


async def measure(
    client: httpx.AsyncClient,
    target: Target,
    body: dict[str, Any],
    sample: Sample,
    now: Callable[[], float],
) -> None:
    """Send a streamed body and store its times and usage in `sample`. Raises only CancelledError."""
    sample.sent_s = now()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            client.stream("POST", target.url + target.path, json=body) as reply,
        ):
            if reply.status_code != 200:
                sample.error = _refusal(reply.status_code, await reply.aread())
            else:
                await _follow(reply, sample, now)
    except (TimeoutError, httpx.TimeoutException):
        sample.error = f"the reply was not complete within {target.timeout_s:g} s"
    except httpx.ConnectError:
        sample.error = "no connection"
    except (httpx.HTTPError, httpx.StreamError):
        sample.error = "the connection broke"
    sample.end_s = now()


async def _follow(reply: httpx.Response, sample: Sample, now: Callable[[], float]) -> None:
    """Read a stream to its end, and store times and usage in `sample`."""
    is_done = False
    try:
        async with aclosing(EventSource(reply).aiter_sse()) as events:
            async for event in events:
                if event.data == "[DONE]":
                    is_done = True
                    break
                chunk = msgspec.json.decode(event.data)
                if "error" in chunk:
                    sample.error = f"error in the stream: {_code(chunk['error'])}"
                    return
                _take_chunk(chunk, sample, now())
    except (SSEError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        sample.error = "the stream does not follow OpenAI's API"
        return
    if not is_done:
        sample.error = "the stream ended early"
    elif sample.first_s is None:
        sample.error = "no text received"


def _take_chunk(chunk: dict[str, Any], sample: Sample, now_s: float) -> None:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in _TEXTS):
            if sample.last_s is None:
                sample.first_s = now_s
            else:
                sample.gaps_s.append(now_s - sample.last_s)
            sample.last_s = now_s
            sample.num_pieces += 1
    if usage := chunk.get("usage"):
        sample.tokens_in, sample.tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        sample.tokens_cached = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {_code(msgspec.json.decode(body)['error'])}".strip()
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(status)


def _code(error: Any) -> str:
    """Return an error's code, or else its type, cut to 60 characters."""
    if not isinstance(error, dict):
        return "error"
    return str(error.get("code") or error.get("type") or "error")[:60]
