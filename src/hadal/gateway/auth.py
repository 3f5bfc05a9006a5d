"""API keys: a Bearer token compared in constant time.

Knows headers, and that a key is a tenant; nothing of quotas.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from hadal.gateway.errors import ApiError
from hadal.gateway.tenants import name_of, salt_of

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hadal"'}


class Keys:
    """The keys that are let in; with none, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        known = [key.encode() for key in keys if key]
        # Digests are of one length, so that the comparison's time tells nothing of a key's length either.
        self._digests = tuple(_digest(key) for key in known)
        self._salts = tuple(salt_of(key) for key in known)

    @property
    def tenants(self) -> list[str]:
        """Their names in the ledger, in the order of the keys."""
        return [name_of(salt) for salt in self._salts]

    def check(self, authorization: str | None) -> bytes:
        """Return the salt of the tenant whose key the header carries; without keys there is one tenant.

        Raises ApiError 401 for a header without any of the keys.
        """
        if not self._digests:
            return salt_of(b"")
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ApiError(
                401, "An API key is needed: send 'Authorization: Bearer KEY'.", code="missing_api_key",
                headers=_CHALLENGE,
            )
        # Header values arrive as latin-1; keys with other letters were sent as UTF-8 bytes.
        given = _digest(token.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(401, "This API key is not known; check it.", code="invalid_api_key", headers=_CHALLENGE)
        return self._salts[matches.index(True)]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
