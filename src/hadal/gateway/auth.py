"""API keys: a Bearer token compared in constant time, and what its tenant may do besides asking.

    KEY [RIGHT ...]      a line of a keys file, or what stands between two commas of HADAL_API_KEYS

A key has no blank and no comma. Where there is no key, or only one, nobody is there to be protected
from it: it has all rights. Knows headers, and that a key is a tenant; nothing of quotas.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from hadal.core.errors import ConfigError
from hadal.gateway.errors import ApiError
from hadal.gateway.tenants import RIGHTS, Tenant, salt_of

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
        # Digests are of one length, so that the comparison's time tells nothing of a key's length
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
