"""Bearer tokens."""

from __future__ import annotations

import pytest

from hadal.gateway.auth import Keys
from hadal.gateway.errors import ApiError
from hadal.gateway.tenants import salt_of


def test_without_keys_everybody_is_let_in() -> None:
    for keys in (Keys(()), Keys(("",))):
        assert keys.check(None) == keys.check("nonsense") == salt_of(b""), "one tenant"


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer one", "one"), ("bearer two", "two"), ("BEARER  two ", "two"), ("Bearer k\u00c3\u00a9y", "kéy")],
)
def test_known_keys(header: str, key: str) -> None:
    """The last is how a header in UTF-8 arrives. Each key is a tenant, by its own salt."""
    assert Keys(("one", "two", "kéy")).check(header) == salt_of(key.encode())


@pytest.mark.parametrize(
    "header", [None, "", "one", "Bearer", "Bearer ", "Basic one", "Bearer One", "Bearer one two", "Bearer \u4f60"]
)
def test_unknown_keys(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Keys(("one", "two")).check(header)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
