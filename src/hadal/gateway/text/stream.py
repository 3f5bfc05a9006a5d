"""Turn one choice's tokens into its text: pure, one object per choice, fed as tokens arrive.

Each of the four stages may hold text back:

    tokens --bytes--> UTF-8 decoder --> sections ---------> control marks --> stop strings --> Piece
                      (half characters) (<think>, </think>) (taken out)       (starts of one)

Control marks steer a chat and are not text of its reply, whether single tokens or spelled out. The
final text depends only on the tokens, not on their grouping. Independent of JSON, HTTP and clocks.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from hadal.core.messages.generation import Token
from hadal.gateway.text.chat import THINK_CLOSE, THINK_OPEN
from hadal.gateway.text.dsml import Dsml
from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.dsml_reader import REMOVED, TAG, CallTag, TagReader, TagScanner
from hadal.gateway.text.matcher import Matcher
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.repetition import Repetition
from hadal.gateway.text.tools import CallDelta, CallFormat, CallReader, Choosing, ToolFormat
from hadal.gateway.text.vocabulary import Vocabulary

new_decoder: Callable[[str], codecs.IncrementalDecoder] = codecs.getincrementaldecoder("utf-8")


class Section(Enum):
    """Section of the reply that a token belongs to."""

    START = auto()
    """Not known yet: a reply may begin with "<think>"."""
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


@dataclass(frozen=True)
class Calls:
    """Tools that a reply may call, and the model's format of calls."""

    format: CallFormat
    choosing: Choosing


@dataclass(frozen=True)
class TextReading:
    """Options for reading the text of a request's replies from their tokens."""

    sections: bool
    """True: separate reasoning from the answer, as in a chat."""
    thinks: bool = False
    """True: the prompt ends inside the reasoning."""
    has_thought: bool = False
    """True: the prompt contains the beginning of the reasoning."""
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    """Number of first tokens in which stop strings and repetition do not end the reply."""
    logprobs: bool = False
    """True: pieces contain the tokens of their text."""
    token_ids: bool = False
    """True: pieces contain the ids of all tokens."""
    stop_repetition: bool = False
    """True: endless repetition ends the reply, with the finish "length"."""
    calls: Calls | None = None
    """Tools that the reply may call; None: none are offered."""
    is_held: bool = False
    """True: the answer follows a grammar; text in it that looks like a mark is content."""
    has_tags: bool = False
    """True: the model writes calls as tags in its text (DSML)."""

    @property
    def reads_tags(self) -> bool:
        """Return True if tags of calls are searched in the text."""
        is_offered = self.calls is not None and isinstance(self.calls.format, Dsml)
        return is_offered or (self.has_tags and not self.is_held)


class TokenText:
    """Decoder of one choice's tokens, from their bytes to text."""

    def __init__(
        self, vocabulary: Vocabulary, hidden: Container[int], tag_id: int | None = None
    ) -> None:
        """`hidden`: ids without text. `tag_id`: token with the text TAG."""
        self._bytes = vocabulary.token_bytes
        self._hidden = hidden
        self._tag_id = tag_id
        self._decoder = new_decoder("replace")

    def next(self, token: int) -> str:
        """Return the text completed by a token; "" if it has none, or ends within a character."""
        if token == self._tag_id:
            return self.rest() + TAG
        if token in self._hidden or not 0 <= token < len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def is_blank(self, token: int) -> bool:
        """Return True if a token has only white space, or no text."""
        has_text = token not in self._hidden and 0 <= token < len(self._bytes)
        return not (has_text and self._bytes[token].strip())

    def rest(self) -> str:
        """Return the text of an incomplete character, and reset."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


class ThinkMarks:
    """Marks around reasoning: single tokens if the vocabulary has them, else spelled out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.open_id = vocabulary.control_ids.get(THINK_OPEN)
        self.close_id = vocabulary.control_ids.get(THINK_CLOSE)
        self._start = ""
        """First text of a reply, while it may still become the opening mark."""
        self._close = Matcher((THINK_CLOSE,)) if self.close_id is None else None

    def opening(self, text: str) -> tuple[bool, str] | None:
        """Accept the first text of a reply. Return True if a mark opens its reasoning, and the text
        without the mark; None if more text is needed to decide.
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
        """Accept text of the reasoning. Return the part that may be shown, True if a mark closes
        the reasoning, and the text after it.
        """
        if self._close is None:
            return text, False, ""
        shown, mark, rest = self._close.feed(text)
        return shown, mark is not None, rest

    def rest(self) -> str:
        """Return the held text: it was not a mark."""
        rest, self._start = self._start, ""
        return rest if self._close is None else rest + self._close.flush()


class UnshownTokens:
    """Tokens of one section without shown text yet, kept for their log-probabilities."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Token]] = deque()
        """(position in the section where the token's text starts, token)."""
        self._num_chars = 0
        """Number of this section's characters that reached the search for stop strings."""
        self._num_shown = 0
        """Number of this section's characters that passed the search for stop strings."""

    def add(self, token: Token) -> None:
        """Add a token, before its text."""
        self._waiting.append((self._num_chars, token))

    def came(self, num_chars: int) -> None:
        """Count text that reached the search for stop strings."""
        self._num_chars += num_chars

    def show(self, num_chars: int, shown: list[Token]) -> None:
        """Count text that is shown, and move its tokens to `shown`."""
        self._num_shown += num_chars
        self._move(self._num_shown, shown)

    def end_section(self, shown: list[Token]) -> None:
        """Move the section's remaining tokens to `shown`."""
        self._move(self._num_chars + 1, shown)
        self._num_chars = self._num_shown = 0

    def drop(self, shown: list[Token] | None = None) -> None:
        """Drop the tokens of text that is not shown: it starts where a stop string or a tag starts.
        With `shown`, move the tokens before that to it.
        """
        if shown is not None:
            self._move(self._num_chars, shown)
        self._waiting.clear()

    def _move(self, before: int, shown: list[Token]) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] < before:
            shown.append(waiting.popleft()[1])


class CallSection:
    """Calls of one reply, in all its sections of calls."""

    def __init__(self, vocabulary: Vocabulary, format: ToolFormat, is_parallel: bool) -> None:
        ids = vocabulary.control_ids
        self.begins = format.opens(ids)
        """Marks that begin calls in any section."""
        self._id_to_mark = {ids[mark]: mark for mark in format.marks}
        self._is_parallel = is_parallel
        self._reader = CallReader(format)
        self._gap: list[Token] = []
        """Blank tokens around calls: dropped, unless more text follows them."""

    @property
    def num_calls(self) -> int:
        """Return the number of calls with a complete name."""
        return self._reader.num_calls

    @property
    def is_over(self) -> bool:
        """True from the end of a section of calls until the next one begins."""
        return self._reader.is_over

    @property
    def is_enough(self) -> bool:
        """True if only one call is allowed and the reply has it."""
        return not self._is_parallel and self._reader.num_ended > 0

    def begin(self) -> None:
        """Begin a section of calls."""
        self._reader.is_over = False

    def is_between(self, token: int) -> bool:
        """Return True if a token is not a mark, and no call is open."""
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
        """Hold a token between calls until the next token shows if it is content."""
        self._gap.append(token)

    def held(self) -> list[Token]:
        """Return the tokens held between calls: they are content."""
        tokens, self._gap = self._gap, []
        return tokens

    def end(self, text: TokenText, finish: str) -> None:
        """End the current call as the reply ends."""
        self._reader.text(text.rest())
        self._reader.end(is_complete=finish == "stop", is_cut=finish == "length")

    def news(self) -> tuple[list[CallDelta], str]:
        """Return new call deltas, and text that turned out not to be a call."""
        return self._reader.take()


class Assembler:
    """Text of one choice. `num_tokens` and `num_reasoning_tokens` count the accepted tokens."""

    def __init__(self, vocabulary: Vocabulary, reading: TextReading) -> None:
        sections = reading.sections
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish: str | None = None
        self._reading = reading
        tag_id = vocabulary.control_ids.get(MARK) if reading.reads_tags else None
        self._text = TokenText(
            vocabulary, vocabulary.mark_ids if sections else vocabulary.hidden_ids, tag_id
        )
        self._think = ThinkMarks(vocabulary)
        self._section = Section.CONTENT
        if sections:
            self._section = Section.REASONING if reading.thinks else Section.START
        calls = reading.calls
        self._tags: TagScanner | None = None
        """Finder of tags of calls; None: the model's marks of calls are tokens."""
        self._calls: CallSection | TagReader | None = None
        more: tuple[str, ...] = ()
        if reading.reads_tags:
            has_calls = calls is not None
            self._tags = TagScanner(is_token=tag_id is not None, holds_breaks=has_calls)
            if calls is not None:
                self._calls = TagReader(is_parallel=calls.choosing.is_parallel)
            more = REMOVED
        elif calls is not None:
            assert isinstance(calls.format, ToolFormat)
            self._calls = CallSection(vocabulary, calls.format, calls.choosing.is_parallel)
        named = vocabulary.marks | {THINK_OPEN, THINK_CLOSE, *more}
        self._marks = Matcher((*sorted(named),) if sections else (), is_nested=True)
        self._stop = Matcher(reading.stops) if reading.stops else None
        self._trim = sections and reading.thinks and not reading.has_thought
        """True: drop newlines after a think mark until other text follows."""
        self._repetition = Repetition(reading.min_tokens) if reading.stop_repetition else None
        self._unshown = UnshownTokens() if reading.logprobs else None

    @property
    def period(self) -> int:
        """Return the number of endlessly repeated tokens that ended the text; 0: none did."""
        return self._repetition.period if self._repetition is not None else 0

    def push(self, tokens: Iterable[Token]) -> Piece:
        """Accept tokens. Tokens after the finish are ignored."""
        piece = Piece()
        for token in tokens:
            if self.finish is None:
                self._take(token, piece)
        return piece

    def end(self, finish: str) -> Piece:
        """Show held text: no more tokens follow."""
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
        if self._tags is not None:
            self._take_tagged(token, self._tags, piece)
        elif isinstance(calls, CallSection) and (
            self._section is Section.CALLS or token.token in calls.begins
        ):
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
        """Accept a token outside of calls."""
        if self._unshown is not None:
            self._unshown.add(token)
        if self._section is Section.CONTENT:
            if text := self._text.next(token.token):
                self._filter(text, piece)
        elif not self._is_mark(token.token, piece) and (text := self._text.next(token.token)):
            self._split(text, piece)
        if token.finish is not None and self.finish is None:
            self._end(token.finish, piece)

    def _take_tagged(self, token: Token, tags: TagScanner, piece: Piece) -> None:
        """Accept a token of a text that may have tags of calls."""
        in_calls = self._section is Section.CALLS
        if self._unshown is not None and not in_calls:
            self._unshown.add(token)
        if in_calls or self._section is Section.CONTENT or not self._is_mark(token.token, piece):
            self._take_parts(tags.feed(self._text.next(token.token)), piece)
        if token.finish is not None and self.finish is None:
            self._end(token.finish, piece)

    def _take_parts(self, parts: Iterable[str | CallTag], piece: Piece) -> None:
        """Accept texts and tags, in calls and outside of them."""
        calls = self._calls
        for part in parts:
            if self.finish is not None:
                return
            if isinstance(calls, TagReader):
                if isinstance(part, CallTag) and part.opens_calls:
                    self._open_calls(piece)
                if self._section is Section.CALLS:
                    calls.take_part(part)
                    self._show_calls(calls, piece)
                    if calls.is_over:
                        self._section = Section.CONTENT
                    if calls.is_enough and self.finish is None:
                        self._end_here(piece)
                    continue
            if isinstance(part, str):  # A tag outside of calls is no text.
                self._split(part, piece)

    def _end_here(self, piece: Piece) -> None:
        """End the reply after its only call; text of the same token is not shown."""
        self._text.rest()
        if self._tags is not None:
            self._tags.flush()
        self._end("stop", piece)

    def _open_calls(self, piece: Piece) -> None:
        """Show earlier text, and begin a section of calls with a tag that has been read."""
        if self._section is Section.CALLS:
            return
        # Text that may begin a mark stays held: text after the calls might complete it.
        self._show_rest(piece, holds_marks=self._section is not Section.REASONING)
        if self.finish is None and self._unshown is not None:
            self._unshown.drop(self._tokens_of(piece))
            self._end_tokens(piece)
        if self.finish is None:
            self._section = Section.CALLS

    def _take_call(self, token: Token, calls: CallSection, piece: Piece) -> None:
        """Accept a token of a section of calls, or its first mark; earlier text is shown first."""
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
        """Accept a token between calls: text there is content again."""
        calls.hold(token)
        if not self._text.is_blank(token.token):
            self._section = Section.CONTENT
            for each in calls.held():
                if self.finish is None:
                    self._take_text(each, piece)
        elif token.finish is not None:
            self._end(token.finish, piece)

    def _show_calls(self, calls: CallSection | TagReader, piece: Piece) -> None:
        deltas, text = calls.news()
        # One token yields deltas, or text, or text followed by the next call.
        if isinstance(calls, TagReader):
            self._filter(text, piece)
        else:
            self._add_content(self._without_marks(text), piece)
        piece.calls += deltas

    def _without_marks(self, text: str) -> str:
        """Return the text without control marks, also without marks that a removal creates."""
        shown = ""
        mark: str | None = ""
        while text and mark is not None:
            shown, mark, text = self._marks.feed(text)
        return shown + self._marks.flush()

    def _is_mark(self, token: int, piece: Piece) -> bool:
        """Change sections if the token is a think mark. Return True if the section changed."""
        if token == self._think.close_id and self._section is Section.REASONING:
            self._drain(piece)
            self._enter(Section.CONTENT, piece)
            return True
        if token == self._think.open_id and self._section is Section.START:
            self.num_reasoning_tokens += 1
            self._enter(Section.REASONING, piece)
            return True
        if token == self._think.close_id and self._section is Section.START:
            # End of reasoning that never began: the answer follows.
            self._trim = True
        return False

    def _split(self, text: str, piece: Piece) -> None:
        """Separate the sections if their marks are spelled out."""
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
        """Remove control marks."""
        if self._reading.is_held and self._section is Section.CONTENT:
            self._match_stops(text, piece)
            return
        while text and self.finish is None:
            shown, mark, text = self._marks.feed(text)
            self._match_stops(shown, piece)
            if mark is None:
                return

    def _match_stops(self, text: str, piece: Piece) -> None:
        """Withhold stop strings and the text after them."""
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
        """Return the piece's token list for the current section."""
        is_reasoning = self._section is Section.REASONING
        return piece.reasoning_tokens if is_reasoning else piece.content_tokens

    def _end_tokens(self, piece: Piece) -> None:
        if self._unshown is not None:
            self._unshown.end_section(self._tokens_of(piece))

    def _flush(self, piece: Piece) -> None:
        """Show text held for marks and stop strings."""
        self._match_stops(self._marks.flush(), piece)
        if self.finish is None and self._stop is not None:
            self._show(self._stop.flush(), piece)

    def _drain(self, piece: Piece) -> None:
        """Show all held text: the section ends here."""
        tail = self._text.rest()
        if self._tags is not None:
            self._take_parts([*self._tags.feed(tail), *self._tags.flush()], piece)
        elif tail:
            self._split(tail, piece)
        self._show_rest(piece)

    def _show_rest(self, piece: Piece, *, holds_marks: bool = False) -> None:
        """Show the text held for stop strings and, without `holds_marks`, for marks."""
        if text := self._think.rest():
            if self._section is Section.START:
                self._section = Section.CONTENT
            self._filter(text, piece)
        if self.finish is None and not holds_marks:
            self._flush(piece)
        elif self.finish is None and self._stop is not None:
            self._show(self._stop.flush(), piece)

    def _enter(self, section: Section, piece: Piece) -> None:
        """Enter a section after a think mark; the mark's own token belongs to the reasoning."""
        if self.finish is not None:
            return
        self._section = Section.REASONING
        self._end_tokens(piece)
        self._section = section
        self._trim = True

    def _end(self, finish: str, piece: Piece) -> None:
        if self._section is Section.CALLS and isinstance(self._calls, CallSection):
            self._calls.end(self._text, finish)
            self._show_calls(self._calls, piece)
            self._section = Section.CONTENT
        elif self._section is Section.CALLS and isinstance(self._calls, TagReader):
            self._end_tagged(finish, self._calls, piece)
        else:
            self._drain(piece)
        if self.finish is None:
            self._end_tokens(piece)
            self._finish(finish, piece)

    def _end_tagged(self, finish: str, calls: TagReader, piece: Piece) -> None:
        """End the calls of a text with tags as the reply ends."""
        assert self._tags is not None
        for part in (*self._tags.feed(self._text.rest()), *self._tags.flush()):
            calls.take_part(part)
        calls.end(is_cut=finish == "length")
        self._show_calls(calls, piece)
        self._section = Section.CONTENT
        if self.finish is None:
            self._flush(piece)

    def _finish(self, finish: str, piece: Piece) -> None:
        if finish == "stop" and self._calls is not None and self._calls.num_calls:
            finish = "tool_calls"
        self.finish = piece.finish = finish
