"""Find the messages of a chat in its rendered prompt; a position then has a message.

A template may trim texts, move system messages to the front, and write headers and tools between
messages. So each message is searched by its text, in order. Text between two messages belongs to
the later one, as its header; it belongs to the tools if it names one of them. If the template
rewrites a message, it is not found, and its text counts as the header of the next message.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hadal.gateway.text.asks import Turn

TOOLS, REPLY = "tools", "reply"
"""Roles of parts of a prompt that are no message: the list of tools, and the reply's beginning."""
_EFFORT = 32
"""Messages that may be searched in vain; then the search ends."""
_DISTINCT_CHARS = 16
"""Least length of a text that is searched everywhere, since headers are unlikely to contain it."""
_NEAR_CHARS = 1 << 18
"""Longest distance to a short message: a list of tools may stand before it."""
_CALL_CHARS = 1 << 12
"""Longest distance between a call's name and the text before it, besides its turn's reasoning."""
_ESCAPED = 6
"""Most characters that a template writes for one of a message: JSON's escapes."""
_GAP_CHARS = 256
"""Longest distance between a call's name and its arguments."""
_NUM_NAMES = 3
"""Tool names to search for; one of them shows the place of the list of tools."""


@dataclass(frozen=True)
class PromptPart:
    """Part of a prompt: a message, or TOOLS or REPLY."""

    role: str
    index: int | None = None
    """Number of the message in the chat, system messages included; None: no message."""


@dataclass(frozen=True)
class Places:
    """Consecutive parts of a prompt. `ends`: position after each part, the last one excepted."""

    ends: tuple[int, ...] = ()
    parts: tuple[PromptPart, ...] = ()

    def at(self, position: int) -> PromptPart | None:
        """Return the part at a position; None if the prompt has no parts, as a plain text."""
        return self.parts[bisect_right(self.ends, position)] if self.parts else None


class _TurnSpan(NamedTuple):
    """Characters of one message's text. `is_open`: the message may continue behind `end`."""

    start: int
    end: int
    number: int
    """Number of the message in the chat."""
    is_open: bool = False


def places_of(text: str, turns: Sequence[Turn], tool_names: Sequence[str] = ()) -> Places:
    """Return the parts of a rendered chat; positions are bytes of its UTF-8 text."""
    names = [name for name in tool_names if name][:_NUM_NAMES]
    ends: list[int] = []
    parts: list[PromptPart] = []
    before = 0
    is_open = False
    for span in sorted(_spans(text, turns), key=lambda span: span.start):
        if names and any(text.find(name, before, span.start) >= 0 for name in names):
            ends.append(span.start)
            parts.append(PromptPart(TOOLS))
        elif is_open:
            ends[-1] = max(before, span.start)
        before, is_open = max(before, span.end), span.is_open
        ends.append(before)
        parts.append(PromptPart(turns[span.number].role, span.number))
    if names and any(text.find(name, before) >= 0 for name in names):
        return Places(_in_bytes(text, ends), (*parts, PromptPart(TOOLS)))
    return Places(_in_bytes(text, ends), (*parts, PromptPart(REPLY)))


def _spans(text: str, turns: Sequence[Turn]) -> Iterator[_TurnSpan]:
    """Yield the found texts of messages. The search ends when it has cost too much in vain."""
    position, missed, effort = 0, 0, _EFFORT * len(text)
    for index, turn in enumerate(turns):
        span = _span_of(text, turn, index, position, missed)
        if span is None:
            missed += _ESCAPED * turn.num_chars
            effort -= len(text)
            if effort < 0:
                return
            continue
        position, missed = max(position, span.end), 0
        yield span


def _span_of(text: str, turn: Turn, index: int, position: int, missed: int) -> _TurnSpan | None:
    """Return the text of a message from its content to its last call; None if it is not found.
    `missed`: characters that messages which were not found may have behind `position`.
    """
    content = turn.content.strip()
    start = _find(text, content, position, turn.role) if content else -1
    span = _TurnSpan(start, start + len(content), index) if start >= 0 else None
    for call in turn.calls:
        after = span.end if span is not None else position
        most = after + missed + len(turn.reasoning) + _CALL_CHARS
        said = call.arguments
        start = text.find(call.name, after, most + len(call.name))
        if start < 0:
            continue
        end = start + len(call.name)
        at = text.find(said, end, end + _GAP_CHARS + len(said)) if said else -1
        is_open = at < 0  # The template writes the arguments in a form of its own.
        first = span.start if span is not None else start
        span = _TurnSpan(first, end if is_open else at + len(said), index, is_open)
    return span


def _find(text: str, content: str, position: int, role: str) -> int:
    """Return where a content stands, -1 if nowhere. A short one must stand as whole words and near,
    as headers may contain it; a long one may also stand before `position`.
    """
    if len(content) >= _DISTINCT_CHARS:
        start = text.find(content, position)
        return start if start >= 0 else text.find(content, 0, position)
    if content == role:
        return -1
    before = r"(?<!\w)" if content[0].isalnum() else ""
    behind = r"(?!\w)" if content[-1].isalnum() else ""
    pattern = re.compile(before + re.escape(content) + behind)
    found = pattern.search(text, position, position + _NEAR_CHARS)
    return found.start() if found is not None else -1


def _in_bytes(text: str, ends: Iterable[int]) -> tuple[int, ...]:
    """Return character positions, in rising order, as positions in the UTF-8 text."""
    if text.isascii():
        return tuple(ends)
    found: list[int] = []
    before = num_bytes = 0
    for end in ends:
        num_bytes += len(text[before:end].encode("utf-8", "surrogatepass"))
        found.append(num_bytes)
        before = end
    return tuple(found)
