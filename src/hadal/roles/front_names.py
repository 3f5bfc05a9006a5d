"""Names the blocks of a generation's text (kv/names), as far as that was not done already.

Holds the deployment's root and nothing else, so any thread may use it: the gateway names a long
prompt where it tokenises it, and the front only what came since.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hadal.core.cache import num_names
from hadal.core.config import CacheConfig
from hadal.core.messages import BLOCK_TOKENS, Generation
from hadal.kv.names import extend, root_of


class FrontNames:
    """Names under one fingerprint; none at all where nothing is cached."""

    def __init__(self, cache: CacheConfig, fingerprint: str) -> None:
        """`fingerprint` stands for all that KV depends on besides the text."""
        self._root = root_of(fingerprint.encode()) if cache.is_on else None

    def named(self, generation: Generation, output: Sequence[int] = ()) -> Generation:
        """`generation` with a chain that names the full blocks of its prompt and `output`: longer,
        never another one.

        A hash for each block that has no name yet, so milliseconds for a very long prompt and next
        to nothing after.
        """
        num_blocks = (len(generation.prompt) + len(output)) // BLOCK_TOKENS
        if self._root is None or num_names(generation.chain) >= num_blocks:
            return generation
        text = generation.prompt + tuple(output)
        chain = extend(self._root, generation.chain, text, generation.salt, generation.num_public)
        return msgspec.structs.replace(generation, chain=chain)
