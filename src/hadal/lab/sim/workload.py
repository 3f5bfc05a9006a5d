"""Requests as columns: when they come, how long they are, and what of their text was there before.

Nothing reads the text, so there is none. A block's name (kv/names) says "this text, from the first
token on, under this model, of this tenant", and two names are equal exactly if all of that is.
Whoever makes up the requests knows when it is, so a name is made of where the block stands instead
of a hash of what it holds:

    system prompt   (model, prompt) + position      equal in all sessions that begin with it
    a conversation  session + position              its text only grows: position i always holds the same tokens
    an answer       (session, turn) + position      where reasoning came first, which the next turn leaves out
    a trace's part  the trace's own number + position in it

    turn k      | system prompt | message 1 | answer 1 | message 2 | reasoning, answer 2 |
    turn k + 1  | system prompt | message 1 | answer 1 | message 2 | answer 2 | message 3 |
                 ---- the same tokens, as long as turn k's prompt ---> from here on others

As with hashes, a block that has the end of the system prompt in it belongs to the session, only
full blocks have names, and the last token of a text, which was drawn but never computed, fills
none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.messages.base import BLOCK_TOKENS

V3, R1 = 0, 1
MODEL_NAMES = ("deepseek-chat", "deepseek-reasoner")
"""The models' names as the API calls them, by model number."""
NO_PREFIX = -1

_OF_PREFIX, _OF_PART = 1 << 62, 1 << 63
_TURN_BITS = 12
MAX_TURNS = (1 << _TURN_BITS) - 1
"""Most turns of a session, so that each turn's answer has numbers of its own."""
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trace says of its prompts' texts: numbers of parts, all equally long, equal if the
    text so far is.
    """

    tokens_part: int
    first: Ints
    """Where each request's numbers begin in `numbers`, and one entry more."""
    numbers: Ints


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they arrive; every column has one entry for each."""

    arrival_s: Floats
    session: Ints
    turn: Ints
    """Turn within the session, from 0."""
    tokens_in: Ints
    """Tokens of the whole prompt, cached or not."""
    tokens_out: Ints
    """Generated and billed, reasoning included."""
    tokens_reasoning: Ints
    """Those of them that the next turn's prompt leaves out."""
    prefix: Ints
    """Number of the system prompt it begins with, or NO_PREFIX."""
    prefix_tokens: Ints
    tokens_seen: Ints
    """First tokens of the prompt whose KV was computed before: for the last turn of its session, or
    for anybody with this system prompt. What a cache that forgets nothing would have, but for what
    is no full block.
    """
    idle_s: Floats
    """Time since the session's last request came; inf if this is the first."""
    tenant: Ints
    model: Ints
    """V3 or R1."""
    parts: Parts | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def tokens_findable(self) -> Ints:
        """What a cache could have of each prompt: full blocks, and never the prompt's last
        token.
        """
        return np.asarray(
            np.minimum(self.tokens_in - 1, self.tokens_seen) // BLOCK_TOKENS * BLOCK_TOKENS
        )

    @property
    def kv_length_mean(self) -> float:
        """Tokens in the cache when an output token is made, mean over all output tokens."""
        weights = self.tokens_out / self.tokens_out.sum()
        return float(weights @ (self.tokens_in + self.tokens_out / 2))

    def chain(self, index: int, *, with_output: bool = False) -> bytes:
        """Names of a prompt's full blocks, in order, as core/cache has them; `with_output`: and of
        what its answer fills behind it.
        """
        num_prompt = int(self.tokens_in[index]) // BLOCK_TOKENS
        num_blocks = num_prompt
        if with_output:
            num_blocks = max(
                num_prompt, int(self.tokens_in[index] + self.tokens_out[index] - 1) // BLOCK_TOKENS
            )
        session, turn = int(self.session[index]) + 1 << _TURN_BITS, int(self.turn[index]) + 1
        names = np.empty((num_blocks, 2), dtype=">u8")
        names[:, 1] = np.arange(num_blocks)
        if self.parts is not None:
            self._name_parts(index, names[:num_prompt], self.parts)
            names[num_prompt:, 0] = session | turn
            return names.tobytes()
        names[:, 0] = session
        if self.prefix[index] != NO_PREFIX:
            shared = _OF_PREFIX | int(self.model[index]) << 32 | int(self.prefix[index])
            names[: min(num_prompt, int(self.prefix_tokens[index]) // BLOCK_TOKENS), 0] = shared
        if self.tokens_reasoning[index]:
            names[num_prompt:, 0] = session | turn
        return names.tobytes()

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Workload:
        """These requests only, in the order of `rows`: indices, or a mask."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.intp)
        columns = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name != "parts"
        }
        return replace(
            self, **columns, parts=None if self.parts is None else _take_parts(self.parts, rows)
        )

    def sample(self, scale: int) -> Workload:
        """One session in `scale`, whole, chosen by a hash of its number: with a cache that is as
        much smaller it finds what all of them find (spatially hashed sampling: Waldspurger et al.,
        "SHARDS", FAST 2015).
        """
        if scale < 1:
            raise ValueError(
                f"scale is {scale}; one session in so many stays, so it is at least 1."
            )
        return self.take(_hash(self.session) <= np.uint64(((1 << 64) - 1) // scale))

    @staticmethod
    def _name_parts(index: int, names: NDArray[np.uint64], parts: Parts) -> None:
        per_part = parts.tokens_part // BLOCK_TOKENS
        own = parts.numbers[parts.first[index] : parts.first[index + 1]]
        position = names[:, 1].astype(np.int64)
        names[:, 0] = own[position // per_part].astype(np.uint64) | np.uint64(_OF_PART)


def concatenate(workloads: list[Workload]) -> Workload:
    """All their requests, by arrival; ties in the order given. None of them may have parts."""
    columns: dict[str, Any] = {
        field.name: np.concatenate([getattr(workload, field.name) for workload in workloads])
        for field in fields(Workload)
        if field.name != "parts"
    }
    return Workload(**columns).take(np.argsort(columns["arrival_s"], kind="stable"))


def _take_parts(parts: Parts, rows: NDArray[np.intp]) -> Parts:
    counts = np.diff(parts.first)[rows]
    first = np.concatenate(([0], np.cumsum(counts)))
    at = np.arange(first[-1]) + np.repeat(parts.first[rows] - first[:-1], counts)
    return Parts(parts.tokens_part, first.astype(np.int64), parts.numbers[at])


def _hash(numbers: Ints) -> NDArray[np.uint64]:
    """Spread over 64 bits (SplitMix64's finaliser: Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = numbers.astype(np.uint64) + np.uint64(_GOLDEN)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(_MIX_1)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(_MIX_2)
    return mixed ^ mixed >> np.uint64(31)
