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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from hadal.core.messages.generation import Token
from hadal.core.plans import Score
from hadal.gateway.text.chat import THINK_CLOSE, THINK_OPEN
from hadal.gateway.text.tools import CallDelta, CallReader, Choosing, ToolFormat
from hadal.gateway.text.vocabulary import Vocabulary

# Find the first of several strings in a text that arrives in pieces, and hold back what may be the
# start of one.
#
#     text so far   "The answer is 4.\n\nQue"     patterns  "\n\nQuestion", "</s>"
#     given out     "The answer is 4."
#     held back                     "\n\nQue"     until the next piece decides
#
# Which pattern matches, and where, depends on the text alone and not on how it was cut: the match
# that ends first wins, and of those that end together the one that starts first.


_NESTED_CHARS = 256
"""Held back at most, where starts stand within starts: so long a text of nothing else is no
accident of a model.
"""


class Matcher:
    """Feed it text; it returns what is safe to show."""

    __slots__ = ("_firsts", "_held", "_is_nested", "_patterns")

    def __init__(self, patterns: tuple[str, ...], *, is_nested: bool = False) -> None:
        """`patterns` are not empty. `is_nested`: matches are taken out, and what stands around one
        may match then.
        """
        self._patterns = patterns
        self._is_nested = is_nested
        self._firsts = frozenset(pattern[0] for pattern in patterns)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Return the text that may be shown, the pattern that matched, and what is to be fed next.

        That is what follows the match; nested, what stands before it as well. After a match the
        matcher is empty.
        """
        if not self._held and self._firsts.isdisjoint(
            text
        ):  # Most texts; a vocabulary may have hundreds of patterns.
            return text, None, ""
        # What is held back holds no match, so a match ends within the new text.
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for pattern in self._patterns:
            start = text.find(pattern)
            if start >= 0 and (best is None or (start + len(pattern), start) < best[:2]):
                best = (start + len(pattern), start, pattern)
        if best is not None:
            end, start, pattern = best
            self._held = ""
            if self._is_nested:
                return "", pattern, text[:start] + text[end:]
            return text[:start], pattern, text[end:]
        keep = self._start_of_match(text)
        while self._is_nested and len(text) - keep < _NESTED_CHARS:
            before = self._start_of_match(text[:keep])
            if before == keep:
                break
            keep = before
        self._held = text[keep:]
        return text[:keep], None, ""

    def flush(self) -> str:
        """The end: what was held back was no match."""
        held, self._held = self._held, ""
        return held

    def _start_of_match(self, text: str) -> int:
        """Where the longest end of `text` begins that a pattern begins with; len(text) if there is
        none.
        """
        first = len(text)
        for pattern in self._patterns:
            start = text.find(pattern[0], max(0, len(text) - len(pattern) + 1), first)
            while start >= 0:
                if pattern.startswith(text[start:]):
                    first = start
                    break
                start = text.find(pattern[0], start + 1, first)
        return first


# Tell a generation that goes round in circles from one that only repeats something a while: tokens
# in, period out.
#
# Conservative: counting, tables, and a word that is asked for a hundred times go through. A text in
# which the same 64 tokens or fewer came at least 16 times in a row, over at least 512 tokens, with
# nothing between, is a loop.


MAX_PERIOD = 64
MIN_TOKENS = 512
MIN_TIMES = 16
WINDOW = MAX_PERIOD * MIN_TIMES
"""Number of last tokens that matter."""


def repeated_period(tokens: Sequence[int]) -> int:
    """How many tokens are repeated without end at the end of `tokens`; 0 if none are."""
    size = len(tokens)
    for period in range(1, MAX_PERIOD + 1):
        run = max(MIN_TOKENS, period * MIN_TIMES)
        if size < run:
            break
        if tokens[-1] != tokens[-1 - period]:
            continue
        if tokens[size - run + period :] == tokens[size - run : size - period]:
            return period
    return 0


new_decoder: Callable[[str], codecs.IncrementalDecoder] = codecs.getincrementaldecoder("utf-8")
_LOOK_TOKENS = 64
"""A repetition is looked for after every so many tokens of a text, however they come."""


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


class Assembler:
    """The text of one choice. `num_tokens` and `num_reasoning_tokens` count what was taken in."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        sections: bool,
        thinks: bool = False,
        has_thought: bool = False,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        logprobs: bool = False,
        token_ids: bool = False,
        stop_repetition: bool = False,
        calls: Calls | None = None,
        is_held: bool = False,
    ) -> None:
        """`sections`: set reasoning apart (chat). `thinks`: the prompt ends inside the reasoning;
        `has_thought`: of which it has some.
        `calls`: set calls of tools apart; None: none are offered. `is_held`: the content follows a
        grammar, so that what is spelled like a mark in it is none.

        `stop_repetition`: a text that goes round in circles ends, as one that
        reached its length. Stop strings count only in what comes after `min_tokens` tokens.
        """
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish: str | None = None
        self._bytes = vocabulary.token_bytes
        self._hidden = vocabulary.mark_ids if sections else vocabulary.hidden_ids
        self._decoder = new_decoder("replace")
        # A think mark is a token of its own where the vocabulary has one; elsewhere it is spelled
        # out.
        self._open_id = vocabulary.control_ids.get(THINK_OPEN)
        self._close_id = vocabulary.control_ids.get(THINK_CLOSE)
        self._section = Section.CONTENT
        if sections:
            self._section = Section.REASONING if thinks else Section.START
        self._calls = calls
        self._is_held = is_held
        self._reader: CallReader | None = None
        """From the first mark of calls on."""
        self._gap: list[Token] = []
        """Blanks before and behind calls: theirs, unless something is said behind them."""
        self._id_to_mark: dict[int, str] = {}
        self._begins: tuple[int, ...] = ()
        """Marks that begin calls wherever they come."""
        if calls is not None:
            ids, format = vocabulary.control_ids, calls.format
            self._id_to_mark = {ids[mark]: mark for mark in format.marks}
            self._begins = ids[format.calls_begin], ids[format.call_begin]
        self._start = ""
        self._close = Matcher((THINK_CLOSE,) if self._close_id is None else ())
        marks = (*sorted(vocabulary.marks | {THINK_OPEN, THINK_CLOSE}),) if sections else ()
        self._marks = Matcher(marks, is_nested=True)
        self._stop = Matcher(stops)
        self._min_tokens = min_tokens if stops else 0
        self._at_least = min_tokens
        self._trim = sections and thinks and not has_thought
        """Newlines that follow a think mark are dropped until something else comes."""
        self._logprobs = logprobs
        self._token_ids = token_ids
        self.period = 0
        """Tokens that the text repeated without end when it was ended for that; 0: it was not."""
        self._recent: list[int] | None = [] if stop_repetition else None
        """The last tokens, as far as a repetition is looked for in them."""
        self._num_chars = 0
        self._num_shown = 0
        """Characters of this section that reached the stop strings, and that passed them."""
        self._waiting: deque[tuple[int, Token]] = deque()
        """Tokens whose text is not shown yet, each with the place in the section where its text
        starts.
        """

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
        if self._token_ids:
            piece.token_ids.append(token.token)
        if self._section is Section.REASONING:
            self.num_reasoning_tokens += 1
        if token.finish == "stop":  # A stop id: it has no text.
            self._end("stop", piece)
            return
        if self._section is Section.CALLS or token.token in self._begins:
            self._take_call(token, piece)
        else:
            self._take_text(token, piece)
        if self._recent is not None and self.finish is None:
            self._look_for_repetition(self._recent, token.token, piece)

    def _take_text(self, token: Token, piece: Piece) -> None:
        """A token that is no call's."""
        i = token.token
        if self._logprobs:
            self._waiting.append((self._num_chars, token))
        if self._section is not Section.CONTENT and self._is_mark(i, piece):
            pass
        elif i not in self._hidden and 0 <= i < len(self._bytes):
            text = self._decoder.decode(self._bytes[i])
            if text:
                self._split(text, piece)
        if token.finish is not None and self.finish is None:
            self._end(token.finish, piece)

    def _take_call(self, token: Token, piece: Piece) -> None:
        """A token of the section of calls, or one that begins it: what is said is said before it."""
        assert self._calls is not None
        if self._section is not Section.CALLS:
            self._drain(piece)
            if self.finish is None:
                self._show_tokens(self._num_chars + 1, piece)
                self._num_chars = self._num_shown = 0
                self._section = Section.CALLS
                self._reader = self._reader or CallReader(self._calls.format)
                self._reader.is_over = False
        if self.finish is not None or self._reader is None:
            return
        i = token.token
        mark = self._id_to_mark.get(i)
        if mark is None and self._reader.is_between:
            self._take_between(token, piece)
            return
        self._gap.clear()
        if mark is not None:
            self._reader.text(self._decoder.decode(b"", final=True))
            self._decoder.reset()
            self._reader.mark(mark)
        elif i not in self._hidden and 0 <= i < len(self._bytes):
            self._reader.text(self._decoder.decode(self._bytes[i]))
        self._show_calls(piece)
        if self._reader.is_over:
            self._section = Section.CONTENT
        is_enough = not self._calls.choosing.is_parallel and self._reader.num_ended
        if token.finish is not None or is_enough:
            self._end(token.finish or "stop", piece)

    def _take_between(self, token: Token, piece: Piece) -> None:
        """A token of the section of calls that is in none: what is said there is content again."""
        i = token.token
        self._gap.append(token)
        if i not in self._hidden and 0 <= i < len(self._bytes) and self._bytes[i].strip():
            tokens, self._gap = self._gap, []
            self._section = Section.CONTENT
            for each in tokens:
                if self.finish is None:
                    self._take_text(each, piece)
        elif token.finish is not None:
            self._end(token.finish, piece)

    def _show_calls(self, piece: Piece) -> None:
        if self._reader is not None:
            deltas, text = self._reader.take()
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

    def _look_for_repetition(self, recent: list[int], token: int, piece: Piece) -> None:
        recent.append(token)
        if self.num_tokens % _LOOK_TOKENS or self.num_tokens <= self._at_least:
            return
        del recent[:-WINDOW]
        self.period = repeated_period(recent)
        if self.period:
            self._end("length", piece)

    def _is_mark(self, token: int, piece: Piece) -> bool:
        """Change sections at a think mark that is a token of its own."""
        if token == self._close_id and self._section is Section.REASONING:
            self._drain(piece)
            self._enter(Section.CONTENT, piece)
            return True
        if token == self._open_id and self._section is Section.START:
            self.num_reasoning_tokens += 1
            self._enter(Section.REASONING, piece)
            return True
        if token == self._close_id and self._section is Section.START:
            self._trim = (
                True  # The end of a reasoning that never began: what follows it is the answer.
            )
        return False

    def _split(self, text: str, piece: Piece) -> None:
        """Tell the sections apart where their marks are spelled out."""
        if self._section is Section.START:
            self._start += text
            if (
                self._open_id is None
                and self._start != THINK_OPEN
                and THINK_OPEN.startswith(self._start)
            ):
                return
            text, self._start = self._start, ""
            if self._open_id is None and text.startswith(THINK_OPEN):
                self.num_reasoning_tokens = self.num_tokens
                self._enter(Section.REASONING, piece)
                text = text[len(THINK_OPEN) :]
            else:
                self._section = Section.CONTENT
        if self._section is Section.REASONING:
            text, mark, rest = self._close.feed(text)
            self._filter(text, piece)
            if mark is None or self.finish is not None:
                return
            self._flush_marks(piece)
            if self.finish is None:
                self._flush_stop(piece)
            self._enter(Section.CONTENT, piece)
            text = rest
        self._filter(text, piece)

    def _filter(self, text: str, piece: Piece) -> None:
        """Take control marks out."""
        if self._is_held and self._section is Section.CONTENT:
            self._match_stops(text, piece)
            return
        while text and self.finish is None:
            shown, mark, text = self._marks.feed(text)
            self._match_stops(shown, piece)
            if mark is None:
                return

    def _flush_marks(self, piece: Piece) -> None:
        self._match_stops(self._marks.flush(), piece)

    def _match_stops(self, text: str, piece: Piece) -> None:
        """Withhold stop strings and what comes after."""
        if self._trim:
            text = text.lstrip("\n")
        if not text:
            return
        self._trim = False
        self._num_chars += len(text)
        if self.num_tokens <= self._min_tokens:
            self._show(text, piece)
            return
        text, stop, _ = self._stop.feed(text)
        self._show(text, piece)
        if stop is not None:
            self._waiting.clear()
            piece.stop = stop
            self._finish("stop", piece)

    def _show(self, text: str, piece: Piece) -> None:
        if not text:
            return
        self._num_shown += len(text)
        if self._section is Section.REASONING:
            piece.reasoning += text
        else:
            self._add_content(text, piece)
        if self._waiting:
            self._show_tokens(self._num_shown, piece)

    @staticmethod
    def _add_content(text: str, piece: Piece) -> None:
        if text and piece.calls:
            piece.late.append((len(piece.calls), text))
        piece.content += text

    def _show_tokens(self, before: int, piece: Piece) -> None:
        shown = (
            piece.reasoning_tokens if self._section is Section.REASONING else piece.content_tokens
        )
        while self._waiting and self._waiting[0][0] < before:
            shown.append(self._waiting.popleft()[1])

    def _flush_stop(self, piece: Piece) -> None:
        self._show(self._stop.flush(), piece)

    def _drain(self, piece: Piece) -> None:
        """The section ends here: nothing is held back any longer."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        if tail:
            self._split(tail, piece)
        if self._section is Section.START and self._start:
            text, self._start = self._start, ""
            self._section = Section.CONTENT
            self._filter(text, piece)
        if self.finish is None:
            self._filter(self._close.flush(), piece)
        if self.finish is None:
            self._flush_marks(piece)
        if self.finish is None:
            self._flush_stop(piece)

    def _enter(self, section: Section, piece: Piece) -> None:
        """A think mark was read: its own token belongs to the reasoning."""
        if self.finish is not None:
            return
        self._section = Section.REASONING
        self._show_tokens(self._num_chars + 1, piece)
        self._section = section
        self._trim = True
        self._num_chars = self._num_shown = 0

    def _end(self, finish: str, piece: Piece) -> None:
        if self._section is Section.CALLS and self._reader is not None:
            self._reader.text(self._decoder.decode(b"", final=True))
            self._reader.end(is_complete=finish == "stop", is_cut=finish == "length")
            self._show_calls(piece)
            self._section = Section.CONTENT
        else:
            self._drain(piece)
        if self.finish is None:
            self._show_tokens(self._num_chars + 1, piece)
            self._finish(finish, piece)

    def _finish(self, finish: str, piece: Piece) -> None:
        if finish == "stop" and self._reader is not None and self._reader.num_calls:
            finish = "tool_calls"
        self.finish = piece.finish = finish
