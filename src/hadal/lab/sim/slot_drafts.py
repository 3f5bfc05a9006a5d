"""Drafts (speculative tokens) of a decode unit's slots, without a model: accepted by chance.

The chance is drawn from the request's seed and the token's place in its output. So a request has
the same drafts accepted in every run, independent of other requests and of the number of drafts.
Does not depend on steps or prices.

Shapes: S slots of all ranks; K slots that a step computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadal.core.messages.base import BLOCK_TOKENS

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Chances = NDArray[np.uint64]


class SimulatedDrafts:
    """Drafts by slot. Raises ValueError if `mtp_accept` is no probability."""

    def __init__(self, num_slots: int, num_max: int, mtp_accept: float) -> None:
        """`num_max`: most drafts of a plan. `mtp_accept`: probability that a draft is accepted if
        all drafts before it were.
        """
        if not 0.0 <= mtp_accept <= 1.0:
            raise ValueError(f"mtp_accept is {mtp_accept}; it must be from 0 to 1.")
        self.num_max = num_max
        self.has_any = False
        """True if a taken slot has drafts, as of the last `note`."""
        self._accepted_below = mtp_accept * 2.0**_CHANCE_BITS
        self._room_S: Ints = np.zeros(num_slots, np.int64)
        """Positions that fit into the slot's blocks; a draft beyond them is not verified."""
        self._chance_S: Chances = np.zeros(num_slots, np.uint64)
        """Hash of the request's seed, from which the chances of its drafts are drawn."""
        self._num_S: Ints = np.zeros(num_slots, np.int64)
        """Number of drafts from the last plan that computed the slot, by slot."""

    def join(self, slot: int, num_blocks: int, seed: int) -> None:
        """Begin a request in a slot. It has no drafts yet, so its first step verifies none."""
        self._room_S[slot] = num_blocks * BLOCK_TOKENS
        self._chance_S[slot] = seed * _OF_SEED % 2**64
        self._num_S[slot] = 0

    def grow(self, slot: int) -> None:
        """Add a block to a slot."""
        self._room_S[slot] += BLOCK_TOKENS

    def clear(self) -> None:
        """Drop all drafts; the unit's slots are empty."""
        self.has_any = False

    def note(self, slots_K: Ints, num_drafts: int, is_taken_S: Bools) -> None:
        """Record that a plan makes `num_drafts` drafts for each of these slots."""
        if num_drafts or self.has_any:
            self._num_S[slots_K] = num_drafts
            self.has_any = bool(self._num_S[is_taken_S].any())

    def num_checked(self, slots_K: Ints, length_S: Ints) -> Ints:
        """Return the number of drafts that a step verifies per slot: limited by its blocks."""
        num_fitting = self._room_S[slots_K] - 1 - length_S[slots_K]
        num_checked: Ints = np.minimum(self._num_S[slots_K], num_fitting)
        return np.maximum(num_checked, 0, out=num_checked)

    def is_right(self, slots_K: Ints, left_K: Ints) -> Bools:
        """Return True for each slot with an accepted next draft. `left_K`: output tokens left to
        draw after the token before the draft.
        """
        chances = _mixed(self._chance_S[slots_K] + left_K.astype(np.uint64) * _OF_TOKEN)
        is_right: Bools = (chances >> np.uint64(64 - _CHANCE_BITS)) < self._accepted_below
        return is_right


_CHANCE_BITS = 53
"""Bits of a chance: the precision of a float."""
_OF_SEED, _OF_TOKEN = 0xD1342543DE82EF95, np.uint64(0x9E3779B97F4A7C15)
"""Odd, unrelated 64-bit multipliers, so that (seed, tokens left) pairs hash independently."""


def _mixed(values: Chances) -> Chances:
    """Return a 64-bit hash of each value (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
