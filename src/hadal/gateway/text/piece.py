"""What some tokens brought to a reply, as APIs' formats write it: text, calls, log-probabilities and the
finish.

Values only; gateway/text/stream makes them. Knows no JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hadal.core.messages.generation import Token
from hadal.core.plans import Score
from hadal.gateway.text.tools import CallDelta


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt with how likely its tokens are. Each form of that is asked for by itself."""

    text: str
    ids: tuple[int, ...]
    is_echoed: bool
    is_told: bool
    scores: tuple[Score, ...] = ()
    """Of its tokens from the second on."""


@dataclass(slots=True)
class Piece:
    """What some tokens brought: text to show, and the tokens whose log-probabilities go with it."""

    reasoning: str = ""
    content: str = ""
    reasoning_tokens: list[Token] = field(default_factory=list)
    content_tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    """Set on the last piece: "stop", "length" or "tool_calls"."""
    token_ids: list[int] = field(default_factory=list)
    """Every token taken in, the stop id too; only where they were asked for."""
    calls: list[CallDelta] = field(default_factory=list)
    late: list[tuple[int, str]] = field(default_factory=list)
    """Which of the content came behind calls: behind how many of `calls`, and the text."""
    stop: str | None = None
    """The stop string that ended the reply."""
    prompt: ScoredPrompt | None = None
    """It comes first."""

    def add(self, other: Piece) -> None:
        """Append what came next."""
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
        """The content before all calls."""
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
