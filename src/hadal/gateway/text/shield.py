"""Turn control tokens in users' texts into plain text: a *shield* character follows the first
character of each, until the prompt has been split at its control tokens.

Depends on a model's marks, not on templates.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hadal.core.errors import RequestError
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.tokens.split import any_of

_CHARS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF8FF))]
"""Candidates for shields: noncharacters, then private use. The first two that no text has serve."""


class Marks:
    """Control texts that steer a model's chats."""

    def __init__(self, vocabulary: Vocabulary, more: Iterable[str]) -> None:
        """`more`: texts in addition to the vocabulary's own marks."""
        texts = {*vocabulary.marks, *more}
        texts |= {vocabulary.normalized(text) for text in vocabulary.marks}
        texts.discard("")
        self.normalized = vocabulary.normalized
        self.first_chars = re.compile(_first_chars(texts))
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._ends = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts))

    def shield(self, texts: Sequence[str]) -> Shield:
        """Return a shield for a request with these texts. Raises RequestError."""
        unused = (
            char
            for char in _CHARS
            if not any(form in text for text in texts for form in (char, *_escapes(char)))
        )
        with contextlib.suppress(StopIteration):
            return Shield(self, next(unused), next(unused), any(map(self._ends_one, texts)))
        raise RequestError(
            "The messages use every private-use character of Unicode; leave out two of them.",
            "messages",
        )

    def begins_one(self, text: str) -> bool:
        """Return True if a mark may begin at the text's end."""
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[len(text) - size :] in self._beginnings for size in sizes)

    def _ends_one(self, text: str) -> bool:
        """Return True if a mark may end at the text's beginning."""
        begin = text[: self._longest].lstrip()
        return any(begin[:size] in self._ends for size in range(1, len(begin) + 1))


@dataclass(frozen=True)
class Shield:
    """Shield characters of one request."""

    marks: Marks
    char: str
    """Character put after the first character of a mark."""
    end: str
    """Second character that occurs in no text; ends a message that the reply continues."""
    is_guarding: bool
    """True if texts of the request may form a mark where a template joins them."""

    def put(self, text: str) -> str:
        """Return the text with the shield in every mark, and at its end if a mark may begin there
        (`is_guarding`). Other texts are unchanged.
        """
        num_marks = _num(self.marks, text)
        normalized = self.marks.normalized(text)
        if normalized != text and _num(self.marks, normalized) > num_marks:
            text = normalized  # Normalising would create a mark.
        text = self.marks.first_chars.sub(lambda match: match[0] + self.char, text)
        if self.is_guarding and self.marks.begins_one(end := text.rstrip()):
            text = end + self.char + text[len(end) :]
        return text

    def put_in(self, value: Any) -> Any:
        """Return the value with the shield in all its texts."""
        if isinstance(value, str):
            return self.put(value)
        if isinstance(value, list):
            return [self.put_in(each) for each in value]
        if isinstance(value, dict):
            return {self.put(name): self.put_in(each) for name, each in value.items()}
        return value

    def removed_from(self, text: str) -> str:
        """Return a rendered text without the shield's characters, as its tokens stand for it."""
        return text.replace(self.char, "")

    def found(self, text: str) -> str:
        """Return a rendered text with the shield's characters unescaped, where the template escaped
        them as JSON, Python and URLs do.
        """
        for char in (self.char, self.end):
            for escape in _escapes(char):
                text = text.replace(escape, char)
        return text


def _first_chars(texts: Iterable[str]) -> str:
    """Return a regular expression for the first character of each of these texts. It begins with
    those characters, so Python skips a text without them quickly.
    """
    char_to_rests: dict[str, set[str]] = {}
    for text in texts:
        char_to_rests.setdefault(text[0], set()).add(text[1:])
    return "|".join(
        re.escape(char) + (f"(?={any_of(rests)})" if "" not in rests else "")
        for char, rests in char_to_rests.items()
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts of a value, names of fields included."""
    queue = [value]
    while queue:
        each = queue.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            queue += each
        elif isinstance(each, dict):
            queue += [*each, *each.values()]


def _num(marks: Marks, text: str) -> int:
    return sum(1 for _ in marks.first_chars.finditer(text))


def _escapes(char: str) -> tuple[str, str]:
    return f"\\u{ord(char):04x}", quote(char)
