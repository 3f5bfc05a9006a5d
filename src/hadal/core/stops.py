"""Stop tokens: token ids that end the request in a slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Ints


class StopIds:
    """Stop ids by slot. A leader and its ranks evaluate the same ids: a rank stops computing a
    request that drew one, and its leader expects no more of its tokens.
    """

    def __init__(self, num_slots: int) -> None:
        self._ids: Ints = np.full((num_slots, 1), -1, np.int64)
        """[slots, most stop ids of a request]; -1 is padding and matches no token."""

    def set(self, slot: int, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self._ids.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)), constant_values=-1)
        self._ids[slot] = -1
        self._ids[slot, : len(stop_ids)] = stop_ids

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's stop ids to another slot."""
        self._ids[target] = self._ids[source]

    def are_drawn(self, slots_N: Ints, tokens_N: Ints) -> NDArray[np.bool_]:
        """Return which of these slots drew one of their stop ids, [N]. Loops over columns, because
        most requests have only one or two.
        """
        found_N: NDArray[np.bool_] = np.zeros(slots_N.size, np.bool_)
        for ids_S in self._ids.T:
            found_N |= ids_S[slots_N] == tokens_N
        return found_N
