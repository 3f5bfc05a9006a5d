"""API keys in Authorization headers: which headers are accepted, and the rights of a key."""

from __future__ import annotations

import pytest

from hadal.core.errors import ConfigError
from hadal.gateway.desk.auth import RIGHTS, Keys, Tenant, parse_key
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.edge.errors import ApiError


def test_without_keys_everybody_is_let_in() -> None:
    for keys in (Keys(()), Keys(("",))):
        assert keys.check(None) == keys.check("nonsense") == Tenant(salt_of(b""), RIGHTS), (
            "one tenant"
        )


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer one", "one"),
        ("bearer two", "two"),
        ("BEARER  two ", "two"),
        ("Bearer k\u00c3\u00a9y", "kéy"),
    ],
)
def test_known_keys(header: str, key: str) -> None:
    """The last header has a key's UTF-8 bytes, read as Latin-1 as servers read headers. Each key is
    a tenant with its own salt.
    """
    assert Keys(("one", "two", "kéy")).check(header) == Tenant(salt_of(key.encode()))


def test_rights_stand_behind_a_key() -> None:
    keys = Keys(("one", " two  priority ", "three operator priority", "two operator"))
    assert [tenant.rights for tenant in keys.tenants] == [frozenset(), RIGHTS, RIGHTS], (
        "of one key, all its lines'"
    )
    assert keys.check("Bearer one").rights == frozenset()
    assert keys.check("Bearer three").rights == RIGHTS
    for line in ("one two", "one priority,", "one Priority"):
        with pytest.raises(ConfigError, match=r"right|comma") as caught:
            parse_key(line)
        assert "one" not in str(caught.value)


def test_who_is_alone_has_all_rights() -> None:
    assert Keys(()).check(None).rights == RIGHTS == Keys(("one",)).check("Bearer one").rights


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "one",
        "Bearer",
        "Bearer ",
        "Basic one",
        "Bearer One",
        "Bearer one two",
        "Bearer \u4f60",
    ],
)
def test_unknown_keys(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Keys(("one", "two")).check(header)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
