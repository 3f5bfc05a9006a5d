"""Find the first of several strings in a text that arrives in pieces, and hold back what may be the start
of one.

    text so far   "The answer is 4.\n\nQue"     patterns  "\n\nQuestion", "</s>"
    given out     "The answer is 4."
    held back                     "\n\nQue"     until the next piece decides

Which pattern matches, and where, depends on the text alone and not on how it was cut: the match that ends
first wins, and of those that end together the one that starts first. Knows no tokens.
"""

from __future__ import annotations

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
