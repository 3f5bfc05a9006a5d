"""Names of KV blocks from their contents: a hash chain, so equal names mean equal text from the
first token on.

    root    = H(version, fingerprint)
    name[0] = H(root,    tokens 0..63;   key = salt)
    name[i] = H(name[i-1], its 64 tokens; key = salt)

The fingerprint is a digest of everything that KV depends on besides the text: model, layout, dtype,
precision. The salt is the key of every name's hash, so that only holders of a tenant's salt can
name, or look for, its blocks. H is BLAKE2b with NAME_BYTES of output. Only full blocks have names.
Does not depend on the locations of blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from hadal.core.cache import NAME_BYTES, num_names
from hadal.core.messages.base import BLOCK_TOKENS

VERSION = b"hadal-kv-1"
"""Version of the KV format. Raise it whenever the same text, model and precision may give other
bytes in a block.
"""
PUBLIC = b"public"
"""Salt of text shared by all tenants. It differs from every tenant's salt, because those are hashes."""


def root_of(fingerprint: bytes) -> bytes:
    """Return the root of all chains under a fingerprint."""
    return blake2b(fingerprint, digest_size=NAME_BYTES, key=VERSION).digest()


def extend(
    root: bytes, chain: bytes, tokens: Sequence[int], salt: bytes, num_public: int = 0
) -> bytes:
    """Return the names of all full blocks of `tokens`; `chain` already has the names of the first
    ones.

    Blocks wholly within the first `num_public` tokens are named under PUBLIC. `salt`: at most 64
    bytes.
    """
    names = bytearray(chain)
    before = chain[-NAME_BYTES:] or root
    for first in range(
        num_names(chain) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS
    ):
        end = first + BLOCK_TOKENS
        text = before + array("i", tokens[first:end]).tobytes()
        before = blake2b(
            text, digest_size=NAME_BYTES, key=PUBLIC if end <= num_public else salt
        ).digest()
        names += before
    return bytes(names)
