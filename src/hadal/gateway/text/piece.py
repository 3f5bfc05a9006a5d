"""New output of a reply: text, calls, log-probabilities and the finish, from a few tokens.

Values only; gateway/text/stream makes them, and the APIs' formats write them. Independent of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hadal.core.messages.generation import Token
from hadal.core.plans import Score
from hadal.gateway.text.tools import CallDelta


@dataclass(frozen=True)
class ScoredPrompt:
    """Prompt and its log-probabilities, in OpenAI's form if `is_echoed`, vLLM's if `is_listed`."""

    text: str
    ids: tuple[int, ...]
    is_echoed: bool
    is_listed: bool
    scores: tuple[Score, ...] = ()
    """Scores of the prompt's tokens, from the second token on."""


@dataclass(slots=True)
class Piece:
    """New text to show, and the tokens for its log-probabilities."""

    reasoning: str = ""
    content: str = ""
    reasoning_tokens: list[Token] = field(default_factory=list)
    content_tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    """Finish reason, on the last piece: "stop", "length" or "tool_calls"."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of all received tokens, the stop id too; only if requested."""
    calls: list[CallDelta] = field(default_factory=list)
    late: list[tuple[int, str]] = field(default_factory=list)
    """Parts of the content after calls: (number of preceding `calls`, text)."""
    stop: str | None = None
    """The stop string that ended the reply."""
    prompt: ScoredPrompt | None = None
    """Scored prompt, which precedes the rest of the piece."""

    def add(self, other: Piece) -> None:
        """Append the piece that follows."""
        if self.calls and (early := other.early):
            self.late.append((len(self.calls), early))
        self.late += [(num_calls + len(self.calls), text) for num_calls, text in other.late]
        self.reasoning += other.reasoning
        self.content += other.content
        self.reasoning_tokens += other.reasoning_tokens
        self.content_tokens += other.content_tokens
        self.token_ids += other.token_ids
        self.calls += other.calls
        self.prompt = self.prompt or other.prompt
        self.finish = self.finish or other.finish
        self.stop = self.stop or other.stop

    @property
    def early(self) -> str:
        """Return the content before all calls."""
        return self.content[: len(self.content) - sum(len(text) for _, text in self.late)]

    def __bool__(self) -> bool:
        return bool(
            self.reasoning
            or self.content
            or self.calls
            or self.finish
            or self.prompt
            or self.reasoning_tokens
            or self.content_tokens
        )
