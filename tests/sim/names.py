"""Expected content of every block name in a world: its KV cells, and the salt of its tenant."""

from __future__ import annotations

import numpy as np

from hadal.core.cache import split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.kv.names import PUBLIC, extend, root_of
from tests.sim.engine import Cells, cells_of

FINGERPRINT = "a model"
OTHER = "the same with other weights"
FINGERPRINT_TO_WEIGHTS = {FINGERPRINT: 0, OTHER: 0x5851F42D4C957F2D}
"""Fingerprint -> weights of a unit's Pool."""


class Names:
    """Cells and salts of named blocks: of prompts, and of outputs that were surely computed."""

    def __init__(self) -> None:
        self._cells: dict[bytes, Cells] = {}
        self._salts: dict[bytes, bytes] = {}

    def add(self, generation: Generation) -> bytes:
        """Record blocks of prompt + output under the generation's fingerprint; return its chain."""
        tokens, fingerprint = generation.prompt + generation.output, generation.fingerprint
        root, weights = root_of(fingerprint.encode()), FINGERPRINT_TO_WEIGHTS[fingerprint]
        chain = extend(root, b"", tokens, generation.salt, generation.num_public)
        for at, name in enumerate(split(chain)):
            first, end = at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS
            if name not in self._cells:
                self._cells[name] = cells_of(tokens[first:end], first) ^ np.uint64(weights)
                self._salts[name] = PUBLIC if end <= generation.num_public else generation.salt
            assert self._salts[name] == (
                PUBLIC if end <= generation.num_public else generation.salt
            ), "two tenants'"
        return chain

    def verify(self, name: bytes, cells: Cells) -> None:
        """Raise AssertionError unless these are the cells of that name."""
        expected = self._cells.get(name)
        assert expected is not None, "a name that no text has"
        assert np.array_equal(expected, cells), "a block is not what its name says"
