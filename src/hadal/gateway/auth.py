"""API keys: a Bearer token compared in constant time, and what its tenant may do besides asking.

    KEY [RIGHT ...]      a line of a keys file, or what stands between two commas of HADAL_API_KEYS

A key has no blank and no comma. Where there is no key, or only one, nobody is there to be protected
from it: it has all rights. Knows headers, and that a key is a tenant; nothing of quotas.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from hadal.core.errors import ConfigError
from hadal.gateway.errors import ApiError

# Whose KV may be shared with whom: a salt for each tenant, out of its API key.
#
# Salts key the hashes that name blocks (kv/names), so a tenant can neither find nor share what
# another one left, and looking for it takes no different a time. A salt is a hash: the key itself
# is in no message, log or file. It depends on the key alone, so a tenant finds its KV again after a
# restart, and in every deployment that shares the folder.


_TENANT = b"hadal-tenant-1"
"""Sets these hashes apart from all others of the same key."""
_SALT_BYTES = 32
_NAME = b"hadal-name-1"
PRIORITY = "priority"
"""The right to go ahead of others: a `priority` above 0."""
OPERATOR = "operator"
"""The right to see what all tenants do together: /audit, /trace, and /metrics where that is not
open.
"""
RIGHTS = frozenset({PRIORITY, OPERATOR})
EVERYONE = "everyone"
"""The one tenant's name where no keys are asked for."""


@dataclass(frozen=True)
class Tenant:
    """Whoever sends a key."""

    salt: bytes
    rights: frozenset[str] = frozenset()

    @cached_property
    def name(self) -> str:
        """What the tenant is called in the ledger, in logs and at the front."""
        return name_of(self.salt)


def salt_of(api_key: bytes) -> bytes:
    """A tenant's salt; the empty key's where no keys are asked for."""
    return blake2b(api_key, digest_size=_SALT_BYTES, key=_TENANT).digest()


def name_of(salt: bytes) -> str:
    """A tenant's name in the ledger, which shows neither its salt nor a key that was drawn at
    random; a key that can be guessed can be recognised by it.
    """
    return (
        EVERYONE
        if salt == salt_of(b"")
        else f"t-{blake2b(salt, digest_size=5, key=_NAME).hexdigest()}"
    )


def salt_within(tenant: bytes, cache_salt: str) -> bytes:
    """The salt of one of a tenant's own users, whom it keeps apart by `cache_salt`."""
    return blake2b(cache_salt.encode(), digest_size=_SALT_BYTES, key=tenant).digest()


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hadal"'}
_EVERYONE = Tenant(salt_of(b""), RIGHTS)


class Keys:
    """The keys that are let in; with none, everybody is."""

    def __init__(self, lines: Iterable[str]) -> None:
        """`lines`: keys and their rights, as parse_key reads them; blank ones are passed over.
        Raises ConfigError.
        """
        key_to_rights: dict[bytes, frozenset[str]] = {}
        for key, rights in map(parse_key, filter(str.strip, lines)):
            key_to_rights[key] = key_to_rights.get(key, frozenset()) | rights
        known = tuple(key_to_rights)
        # Digests are of one length, so that the comparison's time says nothing of a key's length
        # either.
        self._digests = tuple(_digest(key) for key in known)
        self.tenants = tuple(
            Tenant(salt_of(key), RIGHTS if len(known) == 1 else key_to_rights[key]) for key in known
        )
        """The tenants, in the order of their keys."""

    @property
    def is_open(self) -> bool:
        """There are no keys: everybody is let in."""
        return not self._digests

    def check(self, authorization: str | None) -> Tenant:
        """Return the tenant whose key the header carries; without keys there is one tenant.

        Raises ApiError 401 for a header without any of the keys.
        """
        if not self._digests:
            return _EVERYONE
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ApiError(
                401,
                "An API key is needed: send 'Authorization: Bearer KEY'.",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        # Header values arrive as latin-1; keys with other letters were sent as UTF-8 bytes.
        given = _digest(token.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "This API key is not known; check it.",
                code="invalid_api_key",
                headers=_CHALLENGE,
            )
        return self.tenants[matches.index(True)]


def parse_key(line: str) -> tuple[bytes, frozenset[str]]:
    """A key and its rights. Raises ConfigError, which does not show the key."""
    key, *rights = line.split()
    if "," in line:
        raise ConfigError("a key cannot hold a comma.")
    if not RIGHTS.issuperset(rights):
        known = " and ".join(sorted(RIGHTS))
        raise ConfigError(
            f"what stands behind the key is no right: there may be {known}, and no key has a blank."
        )
    return key.encode(), frozenset(rights)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
