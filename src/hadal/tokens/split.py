"""Split of a text at added tokens, as the tokenizers library does it.

The leftmost match counts; of several that start there, the longest. A match that its token's flags
exclude is skipped as a whole. Source: tokenizers 0.23, `AddedVocabulary::find_matches`. Independent
of files and of the meaning of ids.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from hadal.tokens.added import AddedToken

_SPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space: `\\s` of Rust's regex; Python's `\\s` has four more characters."""
_WORD_CATEGORIES = frozenset({"Nd", "Nl", "Pc"})
_WORD_SIGNS = (
    range(0x24B6, 0x24EA),
    range(0x1F130, 0x1F14A),
    range(0x1F150, 0x1F16A),
    range(0x1F170, 0x1F18A),
    range(0x200C, 0x200E),
)
"""Other signs that are alphabetic by Unicode, and joiners: parts of `\\w` of Rust's regex."""


class Splitter:
    """Splitter of texts at a fixed set of added tokens."""

    def __init__(self, pattern_to_token: Mapping[str, tuple[int, AddedToken]]) -> None:
        """`pattern_to_token`: text to find -> id and token."""
        self._tokens = dict(pattern_to_token)
        self._any = re.compile(any_of(self._tokens)) if self._tokens else None

    def split(self, text: str, shield: str = "") -> list[str | int]:
        """Return text pieces and token ids, in order. A token of one character stays text if
        `shield` follows it.
        """
        if self._any is None or not text:
            return [text]
        pieces: list[str | int] = []
        at = space_end = 0
        for match in self._any.finditer(text):
            start, stop = match.span()
            each, token = self._tokens[match[0]]
            if shield and stop - start == 1 and text.startswith(shield, stop):
                continue
            if token.single_word and (_is_word(text, start - 1) or _is_word(text, stop)):
                continue
            if token.lstrip:
                while start > at and text[start - 1] in _SPACE:
                    start -= 1
                start = max(start, at)
            if token.rstrip:
                stop = max(stop, space_end)  # Scan a run of spaces only once.
                while stop < len(text) and text[stop] in _SPACE:
                    stop += 1
                space_end = stop
            if at < start:
                pieces.append(text[at:start])
            if start < stop:
                # As in the library, a token within white space that the previous token took counts.
                # With `lstrip`, nothing is left of such a token.
                pieces.append(each)
            at = stop
        if at != len(text):
            pieces.append(text[at:])
        return pieces


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of these texts. It is a prefix tree, so
    that the time per character does not grow with the number of texts.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(root)


def _expression(root: dict[str, Any]) -> str:
    """Write the tree from its leaves up, without recursion: texts may be long."""
    order, queue = [], [root]
    while queue:
        node = queue.pop()
        order.append(node)
        queue += [child for char, child in node.items() if char]
    written: dict[int, str] = {}
    for node in reversed(order):
        branches = [re.escape(char) + written[id(child)] for char, child in node.items() if char]
        if not branches:
            written[id(node)] = ""
        elif len(branches) == 1 and "" not in node:
            written[id(node)] = branches[0]
        else:
            written[id(node)] = f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
    return written[id(root)]


def _is_word(text: str, at: int) -> bool:
    """Return True if the character at this index exists and belongs to a word."""
    if not 0 <= at < len(text):
        return False
    category = unicodedata.category(text[at])
    if category[0] in "LM" or category in _WORD_CATEGORIES:
        return True
    return any(ord(text[at]) in signs for signs in _WORD_SIGNS)
