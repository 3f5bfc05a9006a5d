"""A repeatable load on a live server: prompts of chosen tasks, sent by clients in a closed loop.

Prompts of one task use some experts far more than others, so an expert balancer has something to even out. Depends on
the API and the tasks, not on units. The clients share the cores with the server, so they do not stream.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from bench.server import samples_of
from evals.run import held_out_examples
from evals.tasks import Example
from hadal.gateway.text.asks import Turn
from hadal.gateway.text.chat import ChatFormat, read_chat_format
from hadal.gateway.text.vocabulary import read_vocabulary
from hadal.runtime.resolve import model_folder

LONGEST = 3300
"""Maximum number of tokens of a prompt: with an answer it fits hadal-tiny's context of 4096."""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Ask:
    """One greedy request."""

    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False


def task_prompts(task: str, lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Return held-out chats of one task. Earlier turns of the same task pad each chat to about its
    length in `lengths`.
    """
    folder = model_folder("")
    chat = read_chat_format(folder, read_vocabulary(folder))
    rng = random.Random(seed)
    examples = held_out_examples(max(32, len(lengths)), seed, (task,))
    return [
        _chat_of(chat, rng, examples, examples[number % len(examples)], min(length, LONGEST))
        for number, length in enumerate(lengths)
    ]


def _chat_of(
    chat: ChatFormat, rng: random.Random, past: list[Example], last: Example, length: int
) -> tuple[int, ...]:
    turns = [Turn(m["role"], m["content"]) for m in last.messages]
    ids = chat.prompt(turns, max_tokens=LONGEST).ids
    if len(ids) < length:
        turns = [turn for turn in turns if turn.role != "system"]
    while len(ids) < length:
        # Several turns at once: rendering a long chat anew for every turn would be slow.
        for example in rng.choices(past, k=1 + (length - len(ids)) // 80):
            turns[:0] = [
                Turn("user", example.messages[-1]["content"]),
                Turn("assistant", example.answer),
            ]
        longer = chat.prompt(turns, max_tokens=2 * LONGEST).ids
        if len(longer) > LONGEST:
            break
        ids = longer
    return ids


def lognormal_lengths(num: int, median: float, sigma: float, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [
        min(LONGEST, max(16, round(median * rng.lognormvariate(0.0, sigma)))) for _ in range(num)
    ]


@dataclass
class ClosedLoop:
    """Clients that run inside an `async with` block: each sends its share of `asks` over and over, one
    at a time. Leaving the block drops open requests.
    """

    http: httpx.AsyncClient
    model: str
    asks: Sequence[Ask]
    """Requests to send. May be replaced during the run; new requests are then taken from it."""
    num_clients: int
    on_answer: Callable[[Ask, tuple[int, ...]], None] = lambda ask, tokens: None
    num_answers: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of answered requests."""
    num_output_tokens: int = 0
    _clients: list[asyncio.Task[None]] = field(default_factory=list)
    _is_ending: bool = False

    async def __aenter__(self) -> ClosedLoop:
        self._clients = [
            asyncio.create_task(self._client(number)) for number in range(self.num_clients)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.cancel()
        ends = await asyncio.gather(*self._clients, return_exceptions=True)
        if error is None:
            self._raise(ends)

    async def finish(self) -> None:
        """Send nothing more and wait for open requests. Raises the error that ended a client."""
        self._is_ending = True
        self._raise(await asyncio.gather(*self._clients, return_exceptions=True))

    def check(self) -> None:
        """Raise the error of a client that has ended. Without this check its share of the load
        would be missing unnoticed.
        """
        self._raise(
            [
                client.exception()
                for client in self._clients
                if client.done() and not client.cancelled()
            ]
        )

    @staticmethod
    def _raise(ends: Sequence[BaseException | None]) -> None:
        for end in ends:
            if end is not None and not isinstance(end, asyncio.CancelledError):
                raise end

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._is_ending:
            ask = self.asks[(number + turn * self.num_clients) % len(self.asks)]
            turn += 1
            tokens = await self.ask(ask)
            self.num_answers += 1
            self.num_prompt_tokens += len(ask.prompt)
            self.num_output_tokens += len(tokens)
            self.on_answer(ask, tokens)

    async def ask(self, ask: Ask) -> tuple[int, ...]:
        """Send one request and return the token ids of its answer. Raises RuntimeError if it was
        refused or failed.
        """
        body = {
            "model": self.model,
            "prompt": list(ask.prompt),
            "temperature": 0,
            "max_tokens": ask.max_tokens,
            "ignore_eos": ask.ignore_eos,
            "return_token_ids": True,
        }
        reply = await self.http.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise RuntimeError(
                f"a request was answered with {reply.status_code}: {reply.text[:300]}"
            )
        return tuple(reply.json()["choices"][0]["token_ids"])


def http_client(url: str, num_clients: int) -> httpx.AsyncClient:
    """Return a client with connections for `num_clients` and for 8 readers of /metrics."""
    limits = httpx.Limits(
        max_connections=num_clients + 8, max_keepalive_connections=num_clients + 8
    )
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


async def read_metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return every sample of /metrics by its full name, labels included."""
    return samples_of((await http.get("/metrics")).text)


def balance_of(metrics: dict[str, float], unit: str) -> dict[str, float]:
    """Return objective -> value of its gauge, for one unit."""
    head = "hadal_balance{"
    found = {}
    for name, value in metrics.items():
        if name.startswith(head) and f'unit="{unit}"' in name:
            found[name.split('objective="', 1)[1].split('"', 1)[0]] = value
    return found
