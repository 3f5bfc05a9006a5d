"""A prefill and a decode unit in this process: they exchange real messages and compute nothing.

An output token is a function of the request and the token's index, so a retry continues where the
stream stopped. The prefill unit's cache is the set of block names of all earlier prompts; nothing
is evicted. FakeUnits is also the wire: the front's host sends to it and receives from it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hadal.core.cache import split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Generation, Token
from hadal.core.messages.units import (
    Cancel,
    Decode,
    FrontUp,
    KvLease,
    Prefill,
    PrefillDone,
    Pulled,
    Release,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import Draw, Score
from tests.columns import Row, tokens_message
from tests.waiting import wait_for

NUM_BLOCKS = 1000
MAX_REQUESTS = 64

UNIT_TIMEOUT_S = 1e6
"""`unit_timeout_s` for fronts in tests: so long that silent fake units never count as frozen."""

Script = Callable[[Generation, int], int]
"""(generation, index in the output) -> token."""


@dataclass
class Running:
    generation: Generation
    output: list[int]


class FakeUnits:
    """Fake units with `step_s` seconds between steps. They do nothing while `go` is cleared. They
    send no heartbeats: fronts of tests wait as long as a test does (`UNIT_TIMEOUT_S`).
    """

    def __init__(self, script: Script, step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.tokens_step = 1
        """Tokens that each decode step draws per request."""
        self.held_at = sys.maxsize
        """Number of output tokens at which decode stops computing a request (see `hold`)."""
        self.prefilling: dict[tuple[str, int], Generation] = {}
        self.leased: set[tuple[str, int]] = set()
        self.decoding: dict[tuple[str, int], Running] = {}
        self.submitted: list[Generation] = []
        self.cancelled: list[str] = []
        self.names: set[bytes] = set()
        """Names of blocks that were prefilled."""
        self.go = asyncio.Event()
        self.go.set()
        self._inbox: list[AnyMessage] = []
        self._ready = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Number of requests that hold resources in either unit."""
        return len(self.prefilling) + len(self.leased) + len(self.decoding)

    # ---- the wire, as the host sees it ----
    def send(self, to: str, message: AnyMessage) -> None:
        if isinstance(message, FrontUp):
            self._say(UnitUp(to, to.partition("-")[0], f"{to}-epoch", NUM_BLOCKS, MAX_REQUESTS))
        elif isinstance(message, Prefill):
            self.submitted.append(message.generation)
            self.prefilling[_key(message.generation)] = message.generation
        elif isinstance(message, Decode):
            generation = message.generation
            self.decoding[_key(generation)] = Running(generation, list(generation.output))
            self._say(Pulled(to, generation.request_id, generation.attempt))
        elif isinstance(message, Release):
            self.leased.discard((message.request_id, message.attempt))
        elif isinstance(message, Cancel):
            self.cancelled.append(message.request_id)
            key = (message.request_id, message.attempt)
            self.prefilling.pop(key, None)
            self.leased.discard(key)
            self.decoding.pop(key, None)

    @property
    def has_said(self) -> bool:
        """True if a message of the units has not been received yet."""
        return bool(self._inbox)

    async def receive_async(self) -> list[AnyMessage]:
        await self._ready.wait()
        self._ready.clear()
        messages, self._inbox = self._inbox, []
        return messages

    def tell(self, message: AnyMessage) -> None:
        """Send a message to the front as if another process had sent it."""
        self._say(message)

    def _say(self, message: AnyMessage) -> None:
        self._inbox.append(message)
        self._ready.set()

    # ---- the units at work ----
    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self.go.wait()
            self._prefill()
            self._decode()

    async def hold(self, num_tokens: int) -> None:
        """Wait until a request has `num_tokens` output tokens; none gets more until `let_go`."""
        self.held_at = num_tokens

        def are_there() -> bool:
            return any(len(running.output) >= num_tokens for running in self.decoding.values())

        await wait_for(are_there, f"{num_tokens} tokens are drawn")

    def let_go(self) -> None:
        """Continue the decoding of held requests."""
        self.held_at = sys.maxsize

    def _prefill(self) -> None:
        for key, generation in list(self.prefilling.items()):
            del self.prefilling[key]
            token = self._token(generation, len(generation.output))
            lease = None
            if token.finish is None:
                self.leased.add(key)
                num_tokens = len(generation.prompt) + len(generation.output)
                lease = KvLease("pool", (1,), (0,), num_tokens)
            is_scored = generation.sampling.num_prompt_logprobs >= 0
            scores = (Score(-0.5, 1, ()),) * (len(generation.prompt) - 1 if is_scored else 0)
            cached = 0 if is_scored else self._cached(generation)
            self._say(PrefillDone("prefill-0", token, lease, cached, scores=scores))

    def _cached(self, generation: Generation) -> int:
        """Return the number of cached positions, and put the prompt's blocks into the cache. Only
        whole blocks count, and the last position never does.
        """
        num_tokens = len(generation.prompt) + len(generation.output)
        names = list(split(generation.chain))
        found = list(
            itertools.takewhile(self.names.__contains__, names[: (num_tokens - 1) // BLOCK_TOKENS])
        )
        self.names.update(names)
        return len(found) * BLOCK_TOKENS

    def _decode(self) -> None:
        rows: list[Row] = []
        draws: dict[int, Draw] = {}
        for _ in range(self.tokens_step):
            for key, running in list(self.decoding.items()):
                if len(running.output) >= self.held_at:
                    continue
                token = self._token(running.generation, len(running.output))
                running.output.append(token.token)
                if token.logprob is not None:
                    draws[len(rows)] = Draw(token.logprob, token.top)
                rows.append((running.generation.attempt_id, token.index, token.token, token.finish))
                if token.finish is not None:
                    del self.decoding[key]
        if rows:
            self._say(tokens_message("decode-0", rows, draws))
            self._say(
                UnitReport(
                    "decode-0",
                    "decode-0-epoch",
                    NUM_BLOCKS,
                    3,
                    len(self.decoding),
                    MAX_REQUESTS,
                    0,
                    1,
                    2.5,
                    0.25,
                )
            )

    def _token(self, generation: Generation, index: int) -> Token:
        value = self.script(generation, index)
        finish = None
        if value in generation.stop_ids and index + 1 > generation.min_tokens:
            finish = "stop"
        elif index + 1 >= generation.max_tokens:
            finish = "length"
        wanted = generation.sampling.num_logprobs
        top = tuple((value + rank, -0.25 - rank) for rank in range(max(wanted, 0)))
        return Token(
            generation.request_id,
            generation.attempt,
            index,
            value,
            finish,
            -0.25 if wanted >= 0 else None,
            top,
        )


def _key(generation: Generation) -> tuple[str, int]:
    return generation.request_id, generation.attempt
