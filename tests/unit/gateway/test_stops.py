"""The stop matcher, compared with a definition that checks one character after the other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hadal.gateway.text.matcher import Matcher

texts = st.text(alphabet="ab<", max_size=30)
patterns = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4).map(tuple)


def by_definition(text: str, patterns: tuple[str, ...]) -> tuple[str, str | None, str]:
    for end in range(1, len(text) + 1):
        found = [pattern for pattern in patterns if text[:end].endswith(pattern)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest, text[end:]
    return text, None, ""


@given(texts, patterns, st.lists(st.integers(0, 30)))
def test_any_cut_gives_the_definition(
    text: str, patterns: tuple[str, ...], cuts: list[int]
) -> None:
    matcher = Matcher(patterns)
    permits = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown, match, rest = "", None, ""
    for start, end in itertools.pairwise(permits):
        if match is not None:
            rest += text[start:end]
            continue
        safe, match, rest = matcher.feed(text[start:end])
        shown += safe
        if match is None:
            # Only a possible start of a match is withheld, and no part of it has been shown.
            held = text[len(shown) : end]
            assert not held or any(pattern.startswith(held) for pattern in patterns)
    if match is None:
        shown += matcher.flush()
    assert (shown, match, rest) == by_definition(text, patterns)


def test_match_that_ends_first_wins() -> None:
    assert Matcher(("abcd", "bc")).feed("abcd") == ("a", "bc", "d")
    assert Matcher(("b", "ab")).feed("aab") == ("a", "ab", "")


@given(texts, patterns, st.lists(st.integers(0, 30)))
def test_what_is_taken_out_leaves_no_match(
    text: str, patterns: tuple[str, ...], cuts: list[int]
) -> None:
    expected = ""
    for char in text:
        expected += char
        found = [pattern for pattern in patterns if expected.endswith(pattern)]
        expected = expected[: len(expected) - len(max(found, key=len, default=""))]
    matcher = Matcher(patterns, is_nested=True)
    shown = ""
    for start, end in itertools.pairwise(
        sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    ):
        piece: str = text[start:end]
        match: str | None = ""
        while match is not None:
            safe, match, piece = matcher.feed(piece)
            shown += safe
    assert shown + matcher.flush() == expected
    assert not any(pattern in expected for pattern in patterns)
