"""Reply in terms common to every API: usage, outcome of each choice, and the protocol of a format.

Only `Usage.fields` has the field names of one format, that of OpenAI's older APIs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hadal.gateway.api.shapes import CacheExplanation
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.piece import Piece

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of one HTTP request. A prompt counts once for all its choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int = 0
    explanations: tuple[CacheExplanation, ...] = ()
    """Reasons for which each prompt was not found whole, if they were requested."""

    @property
    def explained(self) -> dict[str, Any]:
        """Return the field with the explanations that every API adds to its usage."""
        return {"cache_explanation": self.explanations} if self.explanations else {}

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_cache_hit_tokens": self.num_cached_tokens,
            "prompt_cache_miss_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            **self.explained,
        }


@dataclass
class Outcome:
    """Finished choice."""

    index: int
    piece: Piece
    """Complete output of the choice."""
    reasoned: bool
    prefix: str = ""
    """Text of the prompt, if it is echoed without its log-probabilities."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt, if they were requested."""


@dataclass(frozen=True)
class Head:
    """Fields repeated in every chunk of a reply, and options of its format."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    omits_reasoning: bool = False
    has_usage_so_far: bool = False
    """True: with `include_usage`, each chunk has the usage so far, not only the last one."""


class ReplyFormat(Protocol):
    """JSON and events of one endpoint.

    begin, opening of every choice, chunks ..., then end or failure      a stream
    whole                                                                a reply in one piece
    """

    keep_alive: bytes
    """Event that keeps an idle stream alive."""

    def begin(self, usage: Usage) -> bytes:
        """Return the events before all choices."""
        ...

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        """Return the chunk that opens a choice; empty if there is none. `prompt_ids`: tokens of its
        prompt, if they were requested.
        """
        ...

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """Return the events for a piece. `usage`: the whole request's usage so far."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        ...

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...


def failure(error: ApiError) -> bytes:
    """Return the event that ends a stream of OpenAI's APIs with an error."""
    return b"data: " + error.body + b"\n\n"
