"""Salts of tenants, derived from their API keys. Requests with equal salts share KV.

Salts key the hashes that name blocks (kv/names). So a tenant cannot find or share another tenant's
cached blocks, or learn of them from lookup times, unless both made them public. A salt is a hash,
so generations, logs and KV files do not contain the key itself. A salt depends on the key alone, so
a tenant finds its KV again after a restart, and in every deployment that shares the KV folder.
Independent of rights.
"""

from __future__ import annotations

from hashlib import blake2b

_TENANT = b"hadal-tenant-1"
"""Domain separation: hashes of the same key for other purposes differ."""
_SALT_BYTES = 32
_NAME = b"hadal-name-1"
EVERYONE = "everyone"
"""Name of the single tenant if no keys are required."""


def salt_of(api_key: bytes) -> bytes:
    """Return a tenant's salt. If no keys are required, `api_key` is empty."""
    return blake2b(api_key, digest_size=_SALT_BYTES, key=_TENANT).digest()


def name_of(salt: bytes) -> str:
    """Return a tenant's name in the ledger. It reveals neither its salt nor a random key; a
    guessable key can be recognised by it.
    """
    return (
        EVERYONE
        if salt == salt_of(b"")
        else f"t-{blake2b(salt, digest_size=5, key=_NAME).hexdigest()}"
    )


def salt_within(tenant: bytes, cache_salt: str) -> bytes:
    """Return the salt for one of a tenant's own users, separated by `cache_salt`."""
    return blake2b(cache_salt.encode(), digest_size=_SALT_BYTES, key=tenant).digest()
