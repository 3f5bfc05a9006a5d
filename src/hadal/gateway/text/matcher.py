"""Find the first of several strings in a text that arrives in pieces, and hold back a possible
start of one.

    text so far   "The answer is 4.\n\nQue"     patterns  "\n\nQuestion", "</s>"
    given out     "The answer is 4."
    held back                     "\n\nQue"     until the next piece decides

The match depends only on the text, not on how it was cut: the match that ends first wins; of those
that end together, the one that starts first. Independent of tokens.
"""

from __future__ import annotations

_NESTED_CHARS = 256
"""Maximum characters held back for patterns within patterns; models do not nest more by chance."""


class Matcher:
    """Matcher of several patterns: fed with text, it returns the text that is safe to show."""

    __slots__ = ("_firsts", "_held", "_is_nested", "_patterns")

    def __init__(self, patterns: tuple[str, ...], *, is_nested: bool = False) -> None:
        """`patterns` are not empty. `is_nested`: text around a removed match may match again."""
        self._patterns = patterns
        self._is_nested = is_nested
        self._firsts = frozenset(pattern[0] for pattern in patterns)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Return the text that may be shown, the pattern that matched, and the text to feed next.

        The text to feed next follows the match; nested, it includes the text before the match.
        After a match the matcher is empty.
        """
        if not self._held and self._firsts.isdisjoint(
            text
        ):  # Fast path for most texts; a vocabulary may have hundreds of patterns.
            return text, None, ""
        # Held text contains no match, so a match ends within the new text.
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
        """Return the held text at the end: it was not a match."""
        held, self._held = self._held, ""
        return held

    def _start_of_match(self, text: str) -> int:
        """Return the start of the longest suffix of `text` that begins a pattern; len(text) if
        there is none.
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
