"""A decode rank's mirror of its leader's table: one row per occupied slot, packed, in arrays made
once.

The leader sends differences; from then on the rank advances every row by itself. Rows are packed so
that a step reads prefixes of the arrays; the order of rows means nothing. Shapes: B rows, M blocks
of a request.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from hadal.core.messages import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.plans import Join


class RankTable:
    """Which slot decodes what, where, with which blocks."""

    def __init__(self, max_slots: int, max_positions: int) -> None:
        max_blocks = -(-max_positions // BLOCK_TOKENS)
        self._max_positions = max_positions
        self._row_of_slot: dict[int, int] = {}
        self._slots = np.zeros(max_slots, np.int64)
        self._tokens = np.zeros(max_slots, np.int64)
        self._positions = np.zeros(max_slots, np.int64)
        # What was never set is the scratch block: a step past the last block harms nobody.
        self._blocks = np.full((max_slots, max_blocks), SCRATCH_BLOCK, np.int32)

    def __len__(self) -> int:
        return len(self._row_of_slot)

    def leave(self, slot: int) -> None:
        """Remove a slot; one that is not there was cleared after a failed step."""
        row = self._row_of_slot.pop(slot, None)
        if row is None:
            return
        last = len(self)  # The last row moves into the gap.
        if row != last:
            for array in (self._slots, self._tokens, self._positions, self._blocks):
                array[row] = array[last]
            self._row_of_slot[int(self._slots[row])] = row

    def join(self, join: Join) -> None:
        """Add a slot, in place of what it held. Raises ValueError for one that does not fit the
        table.
        """
        if not 0 <= join.slot < len(self._slots):
            raise ValueError(f"slot {join.slot} is outside the table of {len(self._slots)}")
        if join.num_tokens >= self._max_positions or len(join.block_ids) > self._blocks.shape[1]:
            raise ValueError(
                f"slot {join.slot}: {join.num_tokens} tokens exceed the model's"
                f" {self._max_positions} positions"
            )
        self.leave(join.slot)
        row = self._row_of_slot[join.slot] = len(self)
        self._slots[row] = join.slot
        self._tokens[row] = join.last_token
        self._positions[row] = join.num_tokens
        self._blocks[row] = SCRATCH_BLOCK
        self._blocks[row, : len(join.block_ids)] = join.block_ids

    def grow(self, slot: int, index: int, block_id: int) -> None:
        """Give a slot another block."""
        row = self._row_of_slot.get(slot)
        if row is not None:
            self._blocks[row, index] = block_id

    def written_blocks(self, slot: int) -> list[int]:
        """The blocks that hold the positions so far; none for a slot that is not there."""
        row = self._row_of_slot.get(slot)
        if row is None:
            return []
        num_blocks = -(-int(self._positions[row]) // BLOCK_TOKENS)
        return [int(block_id) for block_id in self._blocks[row, :num_blocks]]

    def clear(self) -> None:
        self._row_of_slot.clear()

    @property
    def slots_B(self) -> np.ndarray:
        return self._slots[: len(self)]

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens_B, positions_B int64, block_table_BM int32) as views, M as wide as the longest
        row needs.
        """
        num_rows = len(self)
        num_blocks = int(self._positions[:num_rows].max(initial=0)) // BLOCK_TOKENS + 1
        return (
            torch.from_numpy(self._tokens[:num_rows]),
            torch.from_numpy(self._positions[:num_rows]),
            torch.from_numpy(self._blocks[:num_rows, :num_blocks]),
        )

    def split(self, second: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the two micro-batches; `second` are slots. Raises ValueError for one that is not
        occupied.
        """
        absent = sorted(slot for slot in second if slot not in self._row_of_slot)
        if absent:
            raise ValueError(f"slots {absent} of the second micro-batch are not occupied")
        is_second = np.zeros(len(self), np.bool_)
        is_second[[self._row_of_slot[slot] for slot in second]] = True
        return np.flatnonzero(~is_second), np.flatnonzero(is_second)

    def advance(self, tokens_B: np.ndarray) -> None:
        """Every row got its token; it is what the next step feeds."""
        num_rows = len(self)
        self._tokens[:num_rows] = tokens_B
        positions = self._positions[:num_rows]
        # A row that finished at the context's end may be stepped once more before its leave
        # arrives.
        np.minimum(positions + 1, self._max_positions - 1, out=positions)
