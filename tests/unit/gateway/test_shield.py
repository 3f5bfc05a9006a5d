"""Places in texts where marks (texts of control tokens) begin, compared with their definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hadal.gateway.text.shield import Marks, Shield

TEXTS = st.text("<|a.*\n", max_size=12)


def plain(marks: set[str]) -> Any:
    """Return a stand-in for a vocabulary with these marks that does not normalise."""
    return SimpleNamespace(marks=marks, normalized=str)


@given(st.sets(st.text("<|a.*\n", min_size=1, max_size=4), min_size=1, max_size=6), TEXTS)
def test_a_shield_stands_behind_the_first_character_of_every_mark(
    marks: set[str], text: str
) -> None:
    shield = Shield(Marks(plain(marks), ()), "\ufdd0", "\ufdd1", is_guarding=False)
    begins = [any(text.startswith(mark, at) for mark in marks) for at in range(len(text))]
    shielded = [char + shield.char * begin for char, begin in zip(text, begins, strict=True)]
    assert shield.put(text) == "".join(shielded)
