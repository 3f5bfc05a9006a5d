"""Salts of tenants, made of their API keys. Requests with equal salts share KV.

Salts key the hashes that name blocks (kv/names), so a tenant can neither find nor share what another one
left, unless both made it public, and looking for it takes no different a time. A salt is a hash: the key
itself is in no message, log or file. It depends on the key alone, so a tenant finds its KV again after a
restart, and in every deployment that shares the folder. Knows no rights and no headers.
"""

from __future__ import annotations

from hashlib import blake2b

_TENANT = b"hadal-tenant-1"
"""Sets these hashes apart from all others of the same key."""
_SALT_BYTES = 32
_NAME = b"hadal-name-1"
EVERYONE = "everyone"
"""The one tenant's name where no keys are asked for."""


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
