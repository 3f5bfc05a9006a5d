"""Queries to a server before a load: model, tokens per word, and whether it accepts ignore_eos.

Reads the token usage of two small requests. Does not depend on the load that follows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from hadal.apps.bench.lengths import BenchAsk
from hadal.apps.bench.request import BenchError, Target
from hadal.apps.bench.texts import TOKENS_PER_WORD, WORDS, Texts

_TRIED = (1, 3)
"""Repetitions of the whole word list in the first and in the second prompt."""


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """Return the first model that a server lists. Raises BenchError."""
    reply = await _asked(client, url, "GET", "/models")
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url}/models lists no model; name one with --model.") from None


@dataclass(frozen=True)
class Calibration:
    """Results of the two small requests, and the requests of a load made with them."""

    target: Target
    texts: Texts
    notes: tuple[str, ...]

    def body(self, ask: BenchAsk, number: int) -> dict[str, Any]:
        """Return the streamed body of the request with this number."""
        prompt = self.texts.prompt(ask, number)
        return self.target.body(prompt, ask.tokens_out, is_streamed=True)


async def calibrate(client: httpx.AsyncClient, target: Target, texts: Texts) -> Calibration:
    """Measure the tokens per word and the tokens that a template adds, and find out whether answers
    can be forced to their full length. Raises BenchError if a request fails.
    """
    notes, counts = [], []
    going_on = replace(target, ignores_eos=True)
    reply = await _try(client, going_on, texts, _TRIED[0])
    if reply.status_code in (400, 422):
        notes.append(
            "The server does not support ignore_eos: the model may end an answer before the"
            " requested length."
        )
        reply = await _try(client, target, texts, _TRIED[0])
    else:
        target = going_on
    for size in _TRIED:
        reply = reply if size == _TRIED[0] else await _try(client, target, texts, size)
        if reply.status_code != 200:
            raise BenchError(
                f"{target.url}{target.path} answered {reply.status_code}: {_message(reply)}"
            )
        try:
            counts.append(int(reply.json()["usage"]["prompt_tokens"]))
        except (ValueError, LookupError, TypeError):
            break
    if len(counts) == 2 and counts[1] > counts[0]:
        per_word = (counts[1] - counts[0]) / (len(WORDS) * (_TRIED[1] - _TRIED[0]))
        around = counts[0] - per_word * len(WORDS) * _TRIED[0]
        texts = replace(texts, tokens_per_word=per_word, tokens_around=max(0.0, around))
    else:
        notes.append(
            "The server does not report the tokens of a prompt: lengths are estimates, at"
            f" {TOKENS_PER_WORD:g} tokens per word."
        )
    return Calibration(target, texts, tuple(notes))


async def _try(
    client: httpx.AsyncClient, target: Target, texts: Texts, size: int
) -> httpx.Response:
    words = np.random.default_rng([texts.seed, 3]).permutation(WORDS * size)
    body = target.body(" ".join(words), 1, is_streamed=False)
    return await _asked(client, target.url, "POST", target.path, body)


async def _asked(
    client: httpx.AsyncClient, url: str, method: str, path: str, body: Any = None
) -> httpx.Response:
    try:
        async with asyncio.timeout(client.timeout.read):
            reply = await client.request(method, url + path, json=body)
    except TimeoutError:
        raise BenchError(
            f"{url}{path} did not answer in time; for a longer limit, use --timeout."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(
            f"{url} cannot be reached ({str(error) or type(error).__name__}). Start a"
            " server with `hadal serve`, or check the URL."
        ) from error
    if reply.status_code in (401, 403, 404) or reply.status_code >= 500:
        raise BenchError(f"{url}{path} answered {reply.status_code}: {_message(reply)}")
    return reply


def _message(reply: httpx.Response) -> str:
    if reply.status_code == 401:
        return "it needs a valid API key: set --api-key or HADAL_API_KEY"
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return reply.text[:200] or "nothing"
