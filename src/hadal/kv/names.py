"""Names of KV blocks by what they contain: a hash chain, so equal names mean equal text from the
first token on.

    root    = H(version, fingerprint)
    name[0] = H(root,    tokens 0..63;   key = salt)
    name[i] = H(name[i-1], its 64 tokens; key = salt)

The fingerprint stands for all that KV depends on besides the text: model, layout, dtype, precision.
The salt is the key of every hash, so that nobody can name a block, or look for one, of a tenant
whose salt he does not know. H is BLAKE2b with NAME_BYTES of output. Only full blocks have names.
Knows nothing of where blocks lie.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from hadal.core.cache import NAME_BYTES, num_names
from hadal.core.messages.base import BLOCK_TOKENS

VERSION = b"hadal-kv-1"
"""Raised whenever the same text, model and precision may leave other bytes in a block."""
PUBLIC = b"public"
"""The salt of what all tenants share. No tenant's salt is this: theirs are hashes."""


def root_of(fingerprint: bytes) -> bytes:
    """What chains under a fingerprint begin with."""
    return blake2b(fingerprint, digest_size=NAME_BYTES, key=VERSION).digest()


def extend(
    root: bytes, chain: bytes, tokens: Sequence[int], salt: bytes, num_public: int = 0
) -> bytes:
    """Return the names of all full blocks of `tokens`, of which `chain` has the first ones already.

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
