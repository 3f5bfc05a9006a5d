"""Names of the blocks of a generation's text (kv/names), computed where they are missing.

Any thread may use this module. The gateway names a long prompt in the thread that tokenizes it,
under the fingerprint of the weights that will probably serve it. The front names later blocks, or
all of them under another fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hadal.core.cache import num_names
from hadal.core.config import CacheConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.kv.names import extend, root_of


class FrontNames:
    """Namer of blocks; it names nothing if caching is off."""

    def __init__(self, cache: CacheConfig, fingerprint: str) -> None:
        """Start with `fingerprint`, which identifies all inputs of KV besides the text."""
        self.fingerprint = fingerprint
        """Fingerprint under which arriving prompts are named."""
        self._is_on = cache.is_on
        self._fingerprint_to_root: dict[str, bytes] = {}

    def named(
        self,
        generation: Generation,
        output: Sequence[int] = (),
        fingerprint: str | None = None,
    ) -> Generation:
        """Return `generation` with a chain: names of the full blocks of its prompt and `output`
        under a fingerprint. The default is the fingerprint of arriving prompts. A chain under the
        same fingerprint is extended; one under another is replaced. A prompt to be scored gets no
        names, since all of it must be computed.

        Costs one hash per block without a name: milliseconds for a very long prompt, almost nothing
        afterwards.
        """
        fingerprint = self.fingerprint if fingerprint is None else fingerprint
        is_same = generation.fingerprint == fingerprint
        chain = generation.chain if is_same else b""
        num_blocks = (len(generation.prompt) + len(output)) // BLOCK_TOKENS
        is_named = self._is_on and generation.sampling.num_prompt_logprobs < 0
        if is_named and num_names(chain) < num_blocks:
            text, root = generation.prompt + tuple(output), self._root_of(fingerprint)
            chain = extend(root, chain, text, generation.salt, generation.num_public)
        elif is_same:
            return generation
        return msgspec.structs.replace(generation, chain=chain, fingerprint=fingerprint)

    def _root_of(self, fingerprint: str) -> bytes:
        roots = self._fingerprint_to_root
        if fingerprint not in roots:
            roots[fingerprint] = root_of(fingerprint.encode())
        return roots[fingerprint]
