"""Turns one choice's tokens into its text: pure, one object per choice, fed as tokens come.

Four stages, each of which may hold something back:

    tokens --bytes--> UTF-8 decoder --> sections ---------> control marks --> stop strings --> Piece
                      (half characters) (<think>, </think>) (taken out)       (starts of one)

Control marks steer a chat and are no text of its reply, be they tokens of their own or spelled out.
The final text depends on the tokens alone, never on how they were grouped. Knows no JSON, no HTTP
and no clock.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from hadal.core.messages.generation import Token
from hadal.gateway.text.chat import THINK_CLOSE, THINK_OPEN
from hadal.gateway.text.matcher import Matcher
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.repetition import Repetition
from hadal.gateway.text.tools import CallDelta, CallReader, Choosing, ToolFormat
from hadal.gateway.text.vocabulary import Vocabulary

new_decoder: Callable[[str], codecs.IncrementalDecoder] = codecs.getincrementaldecoder("utf-8")


class Section(Enum):
    """Where in the reply a token falls."""

    START = auto()
    """Not yet known: a reply may begin with "<think>"."""
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


@dataclass(frozen=True)
class Calls:
    """What a reply may call, and how the model writes it."""

    format: ToolFormat
    choosing: Choosing


@dataclass(frozen=True)
class TextReading:
    """How the text of a request's replies is read from their tokens."""

    sections: bool
    """Reasoning and answer are set apart, as in a chat."""
    thinks: bool = False
    """The prompt ends inside the reasoning."""
    has_thought: bool = False
    """The prompt has the beginning of the reasoning."""
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    """Number of first tokens in which no stop string counts, and no repetition."""
    logprobs: bool = False
    """Pieces have the tokens of their text."""
    token_ids: bool = False
    """Pieces have the ids of all tokens."""
    stop_repetition: bool = False
    """A text that goes round in circles ends, as one that reached its length."""
    calls: Calls | None = None
    """Tools that the reply may call; None: none are offered."""
    is_held: bool = False
    """The answer follows a grammar: what is spelled like a mark in it is none."""


class TokenText:
    """The text of one choice's tokens, from their bytes."""

    def __init__(self, vocabulary: Vocabulary, hidden: Container[int]) -> None:
        """`hidden`: ids without a text."""
        self._bytes = vocabulary.token_bytes
        self._hidden = hidden
        self._decoder = new_decoder("replace")

    def next(self, token: int) -> str:
        """Return the text that ends with a token; "" if it has none, or half a character."""
        if token in self._hidden or not 0 <= token < len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def is_blank(self, token: int) -> bool:
        """Return whether a token has no text but white space."""
        has_text = token not in self._hidden and 0 <= token < len(self._bytes)
        return not (has_text and self._bytes[token].strip())

    def rest(self) -> str:
        """Return the text of half a character, and begin anew."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


class ThinkMarks:
    """Marks around a reasoning: a token each where the vocabulary has one, else spelled out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.open_id = vocabulary.control_ids.get(THINK_OPEN)
        self.close_id = vocabulary.control_ids.get(THINK_CLOSE)
        self._start = ""
        """First text of a reply, as long as it may be a part of the opening mark."""
        self._close = Matcher((THINK_CLOSE,)) if self.close_id is None else None

    def opening(self, text: str) -> tuple[bool, str] | None:
        """Take the first text of a reply. Return whether a mark opens its reasoning, and the text
        without the mark; None if more text has to decide.
        """
        self._start += text
        if self.open_id is not None:
            text, self._start = self._start, ""
            return False, text
        if self._start != THINK_OPEN and THINK_OPEN.startswith(self._start):
            return None
        text, self._start = self._start, ""
        is_open = text.startswith(THINK_OPEN)
        return is_open, text.removeprefix(THINK_OPEN)

    def closing(self, text: str) -> tuple[str, bool, str]:
        """Take text of the reasoning. Return the part that may be shown, whether a mark closes the
        reasoning, and the text behind it.
        """
        if self._close is None:
            return text, False, ""
        shown, mark, rest = self._close.feed(text)
        return shown, mark is not None, rest

    def rest(self) -> str:
        """Return the held text: it was no mark."""
        rest, self._start = self._start, ""
        return rest if self._close is None else rest + self._close.flush()


class UnshownTokens:
    """Tokens of one section without shown text yet, for their log-probabilities."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Token]] = deque()
        """Each with the place in the section where its text starts."""
        self._num_chars = 0
        """Characters of this section that reached the stop strings."""
        self._num_shown = 0
        """Characters of this section that passed the stop strings."""

    def add(self, token: Token) -> None:
        """Take a token, before its text comes."""
        self._waiting.append((self._num_chars, token))

    def came(self, num_chars: int) -> None:
        """Count text that reached the stop strings."""
        self._num_chars += num_chars

    def show(self, num_chars: int, shown: list[Token]) -> None:
        """Count text that is shown, and move its tokens to `shown`."""
        self._num_shown += num_chars
        self._move(self._num_shown, shown)

    def end_section(self, shown: list[Token]) -> None:
        """Move the section's tokens to `shown`."""
        self._move(self._num_chars + 1, shown)
        self._num_chars = self._num_shown = 0

    def drop(self) -> None:
        """Forget all tokens: a stop string begins in the text of the first."""
        self._waiting.clear()

    def _move(self, before: int, shown: list[Token]) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] < before:
            shown.append(waiting.popleft()[1])


class CallSection:
    """The calls of one reply, in as many sections as it has."""

    def __init__(self, vocabulary: Vocabulary, calls: Calls) -> None:
        ids, format = vocabulary.control_ids, calls.format
        self.begins = ids[format.calls_begin], ids[format.call_begin]
        """Marks that begin calls wherever they come."""
        self._id_to_mark = {ids[mark]: mark for mark in format.marks}
        self._is_parallel = calls.choosing.is_parallel
        self._reader = CallReader(format)
        self._gap: list[Token] = []
        """Blanks before and behind calls: theirs, unless something is said behind them."""

    @property
    def num_calls(self) -> int:
        """Calls with a complete name."""
        return self._reader.num_calls

    @property
    def is_over(self) -> bool:
        """The section's end was read."""
        return self._reader.is_over

    @property
    def is_enough(self) -> bool:
        """The reply has the one call that it may have."""
        return not self._is_parallel and self._reader.num_ended > 0

    def begin(self) -> None:
        """Begin a section."""
        self._reader.is_over = False

    def is_between(self, token: int) -> bool:
        """Return whether a token stands between two calls."""
        return token not in self._id_to_mark and self._reader.is_between

    def take(self, token: int, text: TokenText) -> None:
        """Read a token of a call."""
        self._gap.clear()
        mark = self._id_to_mark.get(token)
        if mark is None:
            self._reader.text(text.next(token))
        else:
            self._reader.text(text.rest())
            self._reader.mark(mark)

    def hold(self, token: Token) -> None:
        """Keep a token between calls until the next one decides."""
        self._gap.append(token)

    def held(self) -> list[Token]:
        """Return the tokens between calls: they are content."""
        tokens, self._gap = self._gap, []
        return tokens

    def end(self, text: TokenText, finish: str) -> None:
        """End the present call as the reply ends."""
        self._reader.text(text.rest())
        self._reader.end(is_complete=finish == "stop", is_cut=finish == "length")

    def news(self) -> tuple[list[CallDelta], str]:
        """Return what came of calls since the last time, and what turned out to be plain text."""
        return self._reader.take()


class Assembler:
    """The text of one choice. `num_tokens` and `num_reasoning_tokens` count what was taken in."""

    def __init__(self, vocabulary: Vocabulary, reading: TextReading) -> None:
        sections = reading.sections
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish: str | None = None
        self._reading = reading
        self._text = TokenText(
            vocabulary, vocabulary.mark_ids if sections else vocabulary.hidden_ids
        )
        self._think = ThinkMarks(vocabulary)
        self._section = Section.CONTENT
        if sections:
            self._section = Section.REASONING if reading.thinks else Section.START
        self._calls = CallSection(vocabulary, reading.calls) if reading.calls is not None else None
        marks = (*sorted(vocabulary.marks | {THINK_OPEN, THINK_CLOSE}),) if sections else ()
        self._marks = Matcher(marks, is_nested=True)
        self._stop = Matcher(reading.stops) if reading.stops else None
        self._trim = sections and reading.thinks and not reading.has_thought
        """Newlines that follow a think mark are dropped until something else comes."""
        self._repetition = Repetition(reading.min_tokens) if reading.stop_repetition else None
        self._unshown = UnshownTokens() if reading.logprobs else None

    @property
    def period(self) -> int:
        """Tokens that the text repeated without end when it was ended for that; 0: it was not."""
        return self._repetition.period if self._repetition is not None else 0

    def push(self, tokens: Iterable[Token]) -> Piece:
        """Take tokens in. What comes after the finish is ignored."""
        piece = Piece()
        for token in tokens:
            if self.finish is None:
                self._take(token, piece)
        return piece

    def end(self, finish: str) -> Piece:
        """No more tokens come: show what was held back."""
        piece = Piece()
        if self.finish is None:
            self._end(finish, piece)
        return piece

    def _take(self, token: Token, piece: Piece) -> None:
        self.num_tokens += 1
        if self._reading.token_ids:
            piece.token_ids.append(token.token)
        if self._section is Section.REASONING:
            self.num_reasoning_tokens += 1
        if token.finish == "stop":  # A stop id: it has no text.
            self._end("stop", piece)
            return
        calls = self._calls
        if calls is not None and (self._section is Section.CALLS or token.token in calls.begins):
            self._take_call(token, calls, piece)
        else:
            self._take_text(token, piece)
        if (
            self._repetition is not None
            and self.finish is None
            and self._repetition.has_begun(token.token, self.num_tokens)
        ):
            self._end("length", piece)

    def _take_text(self, token: Token, piece: Piece) -> None:
        """A token that is no call's."""
        if self._unshown is not None:
            self._unshown.add(token)
        if self._section is Section.CONTENT:
            if text := self._text.next(token.token):
                self._filter(text, piece)
        elif not self._is_mark(token.token, piece) and (text := self._text.next(token.token)):
            self._split(text, piece)
        if token.finish is not None and self.finish is None:
            self._end(token.finish, piece)

    def _take_call(self, token: Token, calls: CallSection, piece: Piece) -> None:
        """A token of the section of calls, or one that begins it: what is said is said before it."""
        if self._section is not Section.CALLS:
            self._drain(piece)
            if self.finish is not None:
                return
            self._end_tokens(piece)
            self._section = Section.CALLS
            calls.begin()
        if calls.is_between(token.token):
            self._take_between(token, calls, piece)
            return
        calls.take(token.token, self._text)
        self._show_calls(calls, piece)
        if calls.is_over:
            self._section = Section.CONTENT
        if token.finish is not None or calls.is_enough:
            self._end(token.finish or "stop", piece)

    def _take_between(self, token: Token, calls: CallSection, piece: Piece) -> None:
        """A token of the section of calls that is in none: what is said there is content again."""
        calls.hold(token)
        if not self._text.is_blank(token.token):
            self._section = Section.CONTENT
            for each in calls.held():
                if self.finish is None:
                    self._take_text(each, piece)
        elif token.finish is not None:
            self._end(token.finish, piece)

    def _show_calls(self, calls: CallSection, piece: Piece) -> None:
        deltas, text = calls.news()
        # Of one token come deltas or text, or text and then the next call.
        self._add_content(self._without_marks(text), piece)
        piece.calls += deltas

    def _without_marks(self, text: str) -> str:
        """Return a whole text without control marks, also without those that a removal joins."""
        shown = ""
        mark: str | None = ""
        while text and mark is not None:
            shown, mark, text = self._marks.feed(text)
        return shown + self._marks.flush()

    def _is_mark(self, token: int, piece: Piece) -> bool:
        """Change sections at a think mark that is a token of its own."""
        if token == self._think.close_id and self._section is Section.REASONING:
            self._drain(piece)
            self._enter(Section.CONTENT, piece)
            return True
        if token == self._think.open_id and self._section is Section.START:
            self.num_reasoning_tokens += 1
            self._enter(Section.REASONING, piece)
            return True
        if token == self._think.close_id and self._section is Section.START:
            # The end of a reasoning that never began: what follows it is the answer.
            self._trim = True
        return False

    def _split(self, text: str, piece: Piece) -> None:
        """Tell the sections apart where their marks are spelled out."""
        if self._section is Section.START:
            opening = self._think.opening(text)
            if opening is None:
                return
            is_open, text = opening
            if is_open:
                self.num_reasoning_tokens = self.num_tokens
                self._enter(Section.REASONING, piece)
            else:
                self._section = Section.CONTENT
        if self._section is Section.REASONING:
            text, is_closed, rest = self._think.closing(text)
            self._filter(text, piece)
            if not is_closed or self.finish is not None:
                return
            self._flush(piece)
            self._enter(Section.CONTENT, piece)
            text = rest
        self._filter(text, piece)

    def _filter(self, text: str, piece: Piece) -> None:
        """Take control marks out."""
        if self._reading.is_held and self._section is Section.CONTENT:
            self._match_stops(text, piece)
            return
        while text and self.finish is None:
            shown, mark, text = self._marks.feed(text)
            self._match_stops(shown, piece)
            if mark is None:
                return

    def _match_stops(self, text: str, piece: Piece) -> None:
        """Withhold stop strings and what comes after."""
        if self._trim:
            text = text.lstrip("\n")
        if not text:
            return
        self._trim = False
        if self._unshown is not None:
            self._unshown.came(len(text))
        if self._stop is None or self.num_tokens <= self._reading.min_tokens:
            self._show(text, piece)
            return
        text, stop, _ = self._stop.feed(text)
        self._show(text, piece)
        if stop is not None:
            if self._unshown is not None:
                self._unshown.drop()
            piece.stop = stop
            self._finish("stop", piece)

    def _show(self, text: str, piece: Piece) -> None:
        if not text:
            return
        if self._section is Section.REASONING:
            piece.reasoning += text
        else:
            self._add_content(text, piece)
        if self._unshown is not None:
            self._unshown.show(len(text), self._tokens_of(piece))

    @staticmethod
    def _add_content(text: str, piece: Piece) -> None:
        if text and piece.calls:
            piece.late.append((len(piece.calls), text))
        piece.content += text

    def _tokens_of(self, piece: Piece) -> list[Token]:
        """Return the list of a piece that this section's tokens go to."""
        is_reasoning = self._section is Section.REASONING
        return piece.reasoning_tokens if is_reasoning else piece.content_tokens

    def _end_tokens(self, piece: Piece) -> None:
        if self._unshown is not None:
            self._unshown.end_section(self._tokens_of(piece))

    def _flush(self, piece: Piece) -> None:
        """Show what marks and stop strings hold back."""
        self._match_stops(self._marks.flush(), piece)
        if self.finish is None and self._stop is not None:
            self._show(self._stop.flush(), piece)

    def _drain(self, piece: Piece) -> None:
        """The section ends here: nothing is held back any longer."""
        if tail := self._text.rest():
            self._split(tail, piece)
        if text := self._think.rest():
            if self._section is Section.START:
                self._section = Section.CONTENT
            self._filter(text, piece)
        if self.finish is None:
            self._flush(piece)

    def _enter(self, section: Section, piece: Piece) -> None:
        """A think mark was read: its own token belongs to the reasoning."""
        if self.finish is not None:
            return
        self._section = Section.REASONING
        self._end_tokens(piece)
        self._section = section
        self._trim = True

    def _end(self, finish: str, piece: Piece) -> None:
        if self._section is Section.CALLS and self._calls is not None:
            self._calls.end(self._text, finish)
            self._show_calls(self._calls, piece)
            self._section = Section.CONTENT
        else:
            self._drain(piece)
        if self.finish is None:
            self._end_tokens(piece)
            self._finish(finish, piece)

    def _finish(self, finish: str, piece: Piece) -> None:
        if finish == "stop" and self._calls is not None and self._calls.num_calls:
            finish = "tool_calls"
        self.finish = piece.finish = finish
