"""Bearer tokens."""

from __future__ import annotations

import pytest

from hadal.gateway.auth import Keys
from hadal.gateway.errors import ApiError


def test_without_keys_everybody_is_let_in() -> None:
    for keys in (Keys(()), Keys(("",))):
        keys.check(None)
        keys.check("nonsense")


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER  two ", "Bearer k\u00c3\u00a9y"])
def test_known_keys(header: str) -> None:
    """The last is how a header in UTF-8 arrives."""
    Keys(("one", "two", "kéy")).check(header)


@pytest.mark.parametrize(
    "header", [None, "", "one", "Bearer", "Bearer ", "Basic one", "Bearer One", "Bearer one two", "Bearer \u4f60"]
)
def test_unknown_keys(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Keys(("one", "two")).check(header)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
