"""Reply as a sequence of parts: reasoning, texts and tool calls, in their order of arrival.

The Messages and Responses APIs answer in such parts, streamed or whole. This file turns the pieces
of a reply into parts, which do not depend on how the reply was cut into pieces; each API's
formatter names the parts and writes them.

    pieces   "Let me"  " see."  "It is"  weather(  {"city":  "Oslo"}  )
    changes  BEGUN GROWN  GROWN  ENDED BEGUN GROWN  ENDED BEGUN GROWN  GROWN  ENDED
    parts    REASONING           TEXT               CALL
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from hadal.gateway.text.piece import Piece
from hadal.gateway.text.tools import CallDelta


class PartKind(Enum):
    """Kind of a part."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class PartStage(Enum):
    """Change of a part."""

    BEGUN = auto()
    GROWN = auto()
    ENDED = auto()


@dataclass
class ReplyPart:
    """One part. `texts` add up to its text; for a call, to its arguments."""

    index: int
    kind: PartKind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the part's text so far."""
        return "".join(self.texts)


@dataclass(frozen=True)
class PartChange:
    """Change of a part. `text`: added text, for GROWN."""

    stage: PartStage
    part: ReplyPart
    text: str = ""


class PartFold:
    """Parts of one reply so far. The last is open until another begins or `end` is called."""

    def __init__(self) -> None:
        self.parts: list[ReplyPart] = []
        self._is_open = False

    def take(self, piece: Piece) -> list[PartChange]:
        """Add a piece, and return the changes of parts."""
        changes: list[PartChange] = []
        for kind, text, call in _in_order(piece):
            if call is not None and call.id:
                self._begin(ReplyPart(len(self.parts), kind, call.id, call.name), changes)
            elif not self._is_open or self.parts[-1].kind is not kind:
                self._begin(ReplyPart(len(self.parts), kind), changes)
            if text:
                self.parts[-1].texts.append(text)
                changes.append(PartChange(PartStage.GROWN, self.parts[-1], text))
        return changes

    def end(self) -> list[PartChange]:
        """Close the open part, and return the changes."""
        changes: list[PartChange] = []
        self._close(changes)
        return changes

    def _begin(self, part: ReplyPart, changes: list[PartChange]) -> None:
        self._close(changes)
        self.parts.append(part)
        self._is_open = True
        changes.append(PartChange(PartStage.BEGUN, part))

    def _close(self, changes: list[PartChange]) -> None:
        if self._is_open:
            changes.append(PartChange(PartStage.ENDED, self.parts[-1]))
        self._is_open = False


def parts_of(piece: Piece) -> list[ReplyPart]:
    """Return the parts of a whole reply."""
    fold = PartFold()
    fold.take(piece)
    return fold.parts


def _in_order(piece: Piece) -> Iterator[tuple[PartKind, str, CallDelta | None]]:
    """Yield reasoning, then text, then calls with the texts between and after them."""
    if piece.reasoning:
        yield PartKind.REASONING, piece.reasoning, None
    if early := piece.early:
        yield PartKind.TEXT, early, None
    begin = 0
    for num_calls, text in itertools.chain(piece.late, [(len(piece.calls), "")]):
        for call in piece.calls[begin:num_calls]:
            yield PartKind.CALL, call.arguments, call
        begin = num_calls
        if text:
            yield PartKind.TEXT, text, None
