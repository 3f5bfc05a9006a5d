"""Read tool calls in DSML, as they arrive and independent of how they are cut.

    text of a reply, with marks ──TagScanner──► texts and tags ──TagReader──► calls, other text

The mark ｜DSML｜ makes a tag. It is one token if the tokenizer has it, and then only the token makes a
tag: the same characters spelled out are removed. Without that token, the characters make a tag. In
both cases no mark reaches content or arguments. An incomplete tag is removed.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.matcher import Matcher
from hadal.gateway.text.tools import CallDelta

REMOVED = (f"</{MARK}", f"<{MARK}", MARK)
"""Forms of the mark that are removed from texts."""
TAG = "\ud800"
"""Mark that makes a tag, within a reply's text: decoded text has no half of a surrogate pair."""
_MAX_HEAD = 512
"""Maximum number of characters of a tag; a longer text is not a tag."""


class Kind(Enum):
    """Kind of a tag."""

    BLOCK = auto()
    INVOKE = auto()
    PARAMETER = auto()


@dataclass(frozen=True)
class CallTag:
    """Tag of a reply."""

    kind: Kind
    is_end: bool
    name: str = ""
    """Name of the tool or of the parameter."""
    is_text: bool = False
    """True: the parameter's value is plain text, not JSON."""

    @property
    def opens_calls(self) -> bool:
        """Return True if calls begin with this tag."""
        return not self.is_end and self.kind is not Kind.PARAMETER


_WORDS = {
    **dict.fromkeys(("function_calls", "tool_calls", "calls"), Kind.BLOCK),
    "invoke": Kind.INVOKE,
    "parameter": Kind.PARAMETER,
}
"""Name of a tag -> its kind; each form reads the names of all forms."""
_ENDS = {f"{gap}{word}>": kind for gap in ("", " ") for word, kind in _WORDS.items()}
_BEGINS = {
    word if kind is Kind.BLOCK else f'{word[:-1]} name="': kind for word, kind in _ENDS.items()
}
_INVOKE_REST = re.compile(r'(.*?)">', re.DOTALL)
_PARAMETER_REST = re.compile(r'(.*?)"(?: string="(true|false)")? *>', re.DOTALL)


class TagScanner:
    """Splitter of a reply's text into texts and tags. The result is independent of the cuts."""

    def __init__(self, *, is_token: bool, holds_breaks: bool) -> None:
        """`is_token`: the mark is a token, which the text has as TAG. `holds_breaks`: hold line
        breaks until it is clear that no calls follow; line breaks before calls are dropped.
        """
        self._spelled = None if is_token else Matcher((MARK,))
        self._drops_breaks = holds_breaks
        self._held = ""

    def feed(self, text: str) -> list[str | CallTag]:
        """Return the texts and tags that are certain."""
        if self._spelled is not None:
            text = self._tagged(text)
        text, self._held = self._held + text, ""
        parts: list[str | CallTag] = []
        while (at := text.find(TAG)) >= 0:
            begin = at - len(_bracket(text, at))
            is_end = text[begin:at] == "</"
            tag, length = (None, 0) if begin == at else _tag(text[at + 1 :], is_end)
            if length < 0:
                return [*parts, *self._shown(text, begin)]
            before = text[:begin]
            if tag is not None and tag.opens_calls and self._drops_breaks:
                before = before.rstrip("\n")
            parts += [each for each in (before, tag) if each]
            text = text[at + 1 + length :]
        return [*parts, *self._shown(text, len(text) - len(_bracket(text, len(text))))]

    def _shown(self, text: str, end: int) -> list[str]:
        """Return the text that is certain, and hold the rest: a tag may begin at `end`."""
        end = len(text[:end].rstrip("\n")) if self._drops_breaks else end
        self._held = text[end:]
        return [text[:end]] if end else []

    def flush(self) -> list[str | CallTag]:
        """Return the held text, without an incomplete tag: no more text follows in this section."""
        text, self._held = self._held, ""
        if self._spelled is not None:
            text += self._spelled.flush()
        if (at := text.find(TAG)) >= 0:
            text = text[: at - len(_bracket(text, at))]
        return [text] if text else []

    def _tagged(self, text: str) -> str:
        """Return the text with TAG for each mark that is spelled out."""
        assert self._spelled is not None
        found = ""
        mark: str | None = ""
        while mark is not None:
            shown, mark, text = self._spelled.feed(text)
            found += shown if mark is None else shown + TAG
        return found


def _bracket(text: str, at: int) -> str:
    """Return the "<" or "</" directly before a position."""
    return "</" if text.endswith("</", 0, at) else "<" if text.endswith("<", 0, at) else ""


def _tag(behind: str, is_end: bool) -> tuple[CallTag | None, int]:
    """Return the tag that continues with this text after its mark, and its length there. None: it
    is no tag. A negative length: more text decides.
    """
    head = behind[:_MAX_HEAD].partition(TAG)[0]
    is_whole = len(head) < len(behind) or len(behind) >= _MAX_HEAD
    words = _ENDS if is_end else _BEGINS
    word = next((each for each in words if head.startswith(each)), None)
    if word is None:
        is_begun = not is_whole and any(each.startswith(head) for each in words)
        return None, -1 if is_begun else 0
    kind = words[word]
    if is_end or kind is Kind.BLOCK:
        return CallTag(kind, is_end), len(word)
    rest = _INVOKE_REST if kind is Kind.INVOKE else _PARAMETER_REST
    found = rest.match(head, len(word))
    if found is None:
        return None, len(word) if is_whole else -1
    is_text = kind is Kind.PARAMETER and found[2] == "true"
    return CallTag(kind, False, _without_marks(found[1]), is_text), found.end()


def _without_marks(text: str) -> str:
    """Return a whole text without marks, also without marks that a removal creates."""
    matcher, shown = Matcher(REMOVED, is_nested=True), ""
    mark: str | None = ""
    while mark is not None:
        part, mark, text = matcher.feed(text)
        shown += part
    return shown + matcher.flush()


class TagReader:
    """Reader of one reply's calls, from their first tag on (`gateway/text/tools.CallReader` of the
    forms with control tokens). Each call has an id of its own; a reply's ids ascend.
    """

    def __init__(self, *, is_parallel: bool) -> None:
        self.num_calls = 0
        self.is_over = False
        """True from the end of the block until the next one begins."""
        self._is_parallel = is_parallel
        self._num_ended = 0
        self._is_open = False
        """True within a call."""
        self._names: list[str] = []
        """Names of the current call's parameters."""
        self._value: _Value | None = None
        """Value that is being read; None: between parameters."""
        self._body = ""
        """Text of a call outside of its parameters."""
        self._blank = ""
        """White space between calls: shown only if other text follows it."""
        self._deltas: list[CallDelta] = []
        self._shown = ""

    @property
    def is_enough(self) -> bool:
        """True if only one call is allowed and the reply has it."""
        return not self._is_parallel and self._num_ended > 0

    def take_part(self, part: str | CallTag) -> None:
        """Accept a text or a tag."""
        if isinstance(part, CallTag):
            self._take_tag(part)
        elif self._value is not None:
            self._add(self._value.feed(part))
        elif self._is_open:
            self._body += part
        else:
            text = self._blank + part
            shown = text.rstrip()
            self._shown += shown
            self._blank = text[len(shown) :]

    def _take_tag(self, tag: CallTag) -> None:
        if self._value is not None and not tag.is_end:
            return  # A mark within a value is removed.
        if tag.is_end:
            self._end_value()
        self._blank = ""
        if tag.kind is Kind.PARAMETER and not tag.is_end and self._is_open:
            self._begin_value(tag)
        elif tag.kind is not Kind.PARAMETER:
            self.end()
            self.is_over = tag.is_end and tag.kind is Kind.BLOCK
            if tag.kind is Kind.INVOKE and not tag.is_end and tag.name:
                self._is_open = True
                # V4's prompts have the calls of a turn by their ids (gateway/text/dsml_chats).
                own = f"call_{self.num_calls:03}_{secrets.token_hex(12)}"
                self._deltas.append(CallDelta(self.num_calls, "", own, tag.name))
                self.num_calls += 1

    def _begin_value(self, tag: CallTag) -> None:
        self._value = _Value(is_text=tag.is_text, is_shown=tag.name not in self._names)
        if self._value.is_shown:
            self._add(", " if self._names else "{")
            self._add(json.dumps(tag.name, ensure_ascii=False) + ": " + self._value.begin())
            self._names.append(tag.name)

    def _end_value(self, *, is_cut: bool = False) -> None:
        if self._value is not None:
            self._add(self._value.end(is_cut=is_cut))
            self._value = None

    def end(self, *, is_cut: bool = False) -> None:
        """End the current call, if there is one. `is_cut`: the reply's limit ended it."""
        if not self._is_open:
            return
        self._end_value(is_cut=is_cut)
        if not is_cut:
            body = self._body.strip()
            if self._names:
                self._add("}")
            elif (arguments := _read_json(body)) is not None and isinstance(arguments, dict):
                self._add(_clean_json(body, arguments))
            else:
                self._add("{}")
                self._shown += body
        self._is_open, self._names, self._body = False, [], ""
        self._num_ended += 1

    def news(self) -> tuple[list[CallDelta], str]:
        """Return new call deltas, and text that is not part of a call."""
        deltas, shown = self._deltas, self._shown
        self._deltas, self._shown = [], ""
        return deltas, shown

    def _add(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self.num_calls - 1, text))


class _Value:
    """Value of one parameter, as JSON."""

    def __init__(self, *, is_text: bool, is_shown: bool) -> None:
        self.is_shown = is_shown
        """False: the call has a value of this name, and the first one counts."""
        self._is_text = is_text
        self._raw = ""
        self._marks = Matcher(REMOVED, is_nested=True)

    def begin(self) -> str:
        """Return the beginning of the value."""
        return '"' if self._is_text else ""

    def feed(self, text: str) -> str:
        """Return more of the value. JSON is held until it is complete."""
        if not self._is_text:
            self._raw += text
            return ""
        shown = ""
        mark: str | None = ""
        while mark is not None:
            part, mark, text = self._marks.feed(text)
            shown += part
        return self._as_json(shown)

    def end(self, *, is_cut: bool) -> str:
        """Return the value's end. A value that is not JSON becomes a text."""
        if self._is_text:
            return self._as_json(self._marks.flush()) + ("" if is_cut or not self.is_shown else '"')
        if not self.is_shown:
            return ""
        if is_cut:
            return _without_marks(self._raw)
        found = _read_json(self._raw, _NOTHING)
        if found is _NOTHING:
            return json.dumps(_without_marks(self._raw), ensure_ascii=False)
        return _clean_json(self._raw.strip(), found)

    def _as_json(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.is_shown else ""


_NOTHING = object()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _read_json(text: str, default: Any = None) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return default


def _clean_json(text: str, value: Any) -> str:
    """Return a JSON text without marks in its names and texts; `value`: the value of the text."""
    if MARK not in text and "\\u" not in text:  # An escape may spell a part of the mark.
        return text
    try:
        cleaned = _cleaned(value)
    except RecursionError:
        return json.dumps(_without_marks(text), ensure_ascii=False)
    # Escaped, because the value may contain half of a surrogate pair, which is no text.
    return text if cleaned == value else json.dumps(cleaned)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _without_marks(value) if MARK in value else value
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(each) for name, each in value.items()}
    return value
