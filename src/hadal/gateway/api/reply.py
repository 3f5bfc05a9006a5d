"""A reply as every API writes one: its usage, the outcome of each choice, and the protocol of a format.

Knows no single API's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.piece import Piece

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True)
class Usage:
    """Tokens of one HTTP request, over all its choices; a prompt counts once however many choices
    it has.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_cache_hit_tokens": self.num_cached_tokens,
            "prompt_cache_miss_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


@dataclass
class Outcome:
    """A finished choice."""

    index: int
    piece: Piece
    """All of it."""
    reasoned: bool
    prefix: str = ""
    """The prompt's text, where it is echoed."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's tokens, where they were asked for."""


@dataclass(frozen=True)
class Head:
    """What every chunk of a reply repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    omits_reasoning: bool = False
    has_usage_so_far: bool = False
    """Each chunk has the usage so far, besides the last one."""


class ReplyFormat(Protocol):
    """One endpoint's JSON, and its events.

    begin, opening of every choice, chunks ..., then end or failure      a stream
    whole                                                                a reply in one piece
    """

    keep_alive: bytes
    """What a stream says while there is nothing to say."""

    def begin(self, usage: Usage) -> bytes:
        """What comes before all choices."""
        ...

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        """The chunk that opens a choice; empty where there is none. `prompt_ids`: tokens of its
        prompt, where they were asked for.
        """
        ...

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """What some tokens brought. `usage`: that of the whole request so far."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What follows the last chunk."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        ...

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...


def failure(error: ApiError) -> bytes:
    """How a stream of OpenAI's says that it cannot go on."""
    return b"data: " + error.body + b"\n\n"
