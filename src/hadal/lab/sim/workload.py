"""Requests as columns: arrival times, lengths, and the previously computed part of each prompt.

There is no text, because nothing reads it. A block's name (kv/names) stands for "this text, from
the first token on, under this model, of this tenant"; two names are equal exactly if all of these
are. The generator of the requests defines which texts are equal, so it makes a name from the
block's position instead of hashing its content:

    system prompt   (model, prompt) + position      equal in all sessions that begin with it
    a conversation  session + position              its text only grows: position i always holds the same tokens
    an answer       (session, turn) + position      after reasoning, which the next turn's prompt leaves out
    a trace's part  the trace's own number + position in it

    turn k      | system prompt | message 1 | answer 1 | message 2 | reasoning, answer 2 |
    turn k + 1  | system prompt | message 1 | answer 1 | message 2 | answer 2 | message 3 |
                 ---- the same tokens, as long as turn k's prompt ---> different from here on

As with hashes, the block that contains the end of the system prompt belongs to the session, and
only full blocks have names. The last token of a text does not fill a block: it was drawn but never
computed.
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
"""Names of the models in the API, by model number."""
NO_PREFIX = -1

_OF_PREFIX, _OF_PART = 1 << 62, 1 << 63
_TURN_BITS = 12
MAX_TURNS = (1 << _TURN_BITS) - 1
"""Maximum number of turns of a session; with more, answers of two turns could share a number."""
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Parts:
    """Prompt parts of a trace, all equally long. Two parts have equal numbers if their prompts are
    equal up to the parts' ends.
    """

    tokens_part: int
    """Tokens of a part."""
    first: Ints
    """Start of each request in `numbers` [N + 1]; the last entry is the end."""
    numbers: Ints
    """Numbers of all parts, request after request."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of arrival; every column has one entry per request."""

    arrival_s: Floats
    session: Ints
    turn: Ints
    """Turn within the session, from 0."""
    tokens_in: Ints
    """Tokens of the whole prompt, cached or not."""
    tokens_out: Ints
    """Generated and billed tokens, reasoning included."""
    tokens_reasoning: Ints
    """Reasoning tokens of the output; the next turn's prompt leaves them out."""
    prefix: Ints
    """Number of the system prompt at the start of the prompt, or NO_PREFIX."""
    prefix_tokens: Ints
    tokens_seen: Ints
    """Leading prompt tokens with KV computed before: by the previous turn of the session, or by any
    request with this system prompt or, in a trace, with these parts. Hits of an infinite cache, if
    it could hold partial blocks.
    """
    idle_s: Floats
    """Time since the session's previous request arrived, or in a trace since the last use of the
    deepest known part; inf if there is none.
    """
    tenant: Ints
    model: Ints
    """V3 or R1."""
    parts: Parts | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def tokens_findable(self) -> Ints:
        """Tokens that an infinite cache could hit: full blocks, without a prompt's last token."""
        return np.asarray(
            np.minimum(self.tokens_in - 1, self.tokens_seen) // BLOCK_TOKENS * BLOCK_TOKENS
        )

    @property
    def kv_length_mean(self) -> float:
        """Tokens in the request's KV cache per output token, mean over all output tokens."""
        weights = self.tokens_out / self.tokens_out.sum()
        return float(weights @ (self.tokens_in + self.tokens_out / 2))

    def chain(self, index: int, *, with_output: bool = False) -> bytes:
        """Return the names of a prompt's full blocks, in order, in the format of core/cache.
        `with_output`: also of the blocks that its answer fills.
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
        """Return the requests at `rows` (indices, or a mask), in that order."""
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
        """Return one session in `scale`, with all its requests, chosen by a hash of its number.
        With a cache smaller by `scale` it has the hit rate of all sessions (spatially hashed
        sampling: Waldspurger et al., "SHARDS", FAST 2015). Raises ValueError for a scale below 1.
        """
        if scale < 1:
            raise ValueError(
                f"scale is {scale}; it must be at least 1, because one session in `scale` is kept."
            )
        return self.take(_hash(self.session) <= np.uint64(((1 << 64) - 1) // scale))

    @staticmethod
    def _name_parts(index: int, names: NDArray[np.uint64], parts: Parts) -> None:
        per_part = parts.tokens_part // BLOCK_TOKENS
        own = parts.numbers[parts.first[index] : parts.first[index + 1]]
        position = names[:, 1].astype(np.int64)
        names[:, 0] = own[position // per_part].astype(np.uint64) | np.uint64(_OF_PART)


def concatenate(workloads: list[Workload]) -> Workload:
    """Return all requests by arrival, ties in the order of the list. No workload may have parts."""
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
    """Hash numbers to 64 bits (SplitMix64's finaliser: Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = numbers.astype(np.uint64) + np.uint64(_GOLDEN)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(_MIX_1)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(_MIX_2)
    return mixed ^ mixed >> np.uint64(31)
