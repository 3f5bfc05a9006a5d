"""API keys: a Bearer token compared in constant time.

Knows headers, nothing of tenants or quotas.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from hadal.gateway.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hadal"'}


class Keys:
    """The keys that are let in; with none, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests are of one length, so that the comparison's time tells nothing of a key's length either.
        self._digests = tuple(_digest(key.encode()) for key in keys if key)

    def check(self, authorization: str | None) -> None:
        """Raise ApiError 401 unless the header carries one of the keys."""
        if not self._digests:
            return
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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
