"""A decode rank's copy of the scheduler's (leader's) table: one row per occupied slot, packed, in
preallocated arrays.

The leader sends only differences; the rank itself advances every row that it computes. Rows of the
step come first; then rows that rest (are not computed in this step) or drew a stop id. So a step
reads prefixes of the arrays. Otherwise the order of rows is arbitrary. Shapes: B rows of the step,
M blocks of a request.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.plans import Join
from hadal.core.stops import StopIds


class RankTable:
    """Last token, position and blocks of each occupied slot."""

    def __init__(self, max_slots: int, max_positions: int) -> None:
        max_blocks = -(-max_positions // BLOCK_TOKENS)
        self._max_positions = max_positions
        self._row_of_slot: dict[int, int] = {}
        self._num_resting = 0
        self._ended: set[int] = set()
        """Slots that drew a stop id. Tokens after it would be discarded."""
        self._stops = StopIds(max_slots)
        self._slots = np.zeros(max_slots, np.int64)
        self._tokens = np.zeros(max_slots, np.int64)
        self._positions = np.zeros(max_slots, np.int64)
        self._rooms = np.zeros(max_slots, np.int64)
        # Unset entries are the scratch block: a write past a row's last block damages no KV.
        self._blocks = np.full((max_slots, max_blocks), SCRATCH_BLOCK, np.int32)

    def note_ends(self, slots_N: np.ndarray, tokens_N: np.ndarray) -> bool:
        """Note slots that drew a stop id. Return whether any of these tokens is one."""
        is_stop_N = self._stops.are_drawn(slots_N, tokens_N)
        self._ended.update(slots_N[is_stop_N].tolist())
        return bool(is_stop_N.any())

    def __len__(self) -> int:
        """Return the number of rows that the step computes."""
        return len(self._row_of_slot) - self._num_resting

    @property
    def occupied(self) -> Collection[int]:
        """All occupied slots, including resting ones."""
        return self._row_of_slot.keys()

    def leave(self, slot: int) -> None:
        """Remove a slot. A missing slot is ignored: it was cleared after a failed step."""
        self._ended.discard(slot)
        row = self._row_of_slot.pop(slot, None)
        if row is None:
            return
        last = len(self._row_of_slot)  # The last row moves into the gap.
        if row != last:
            for array in self._arrays:
                array[row] = array[last]
            self._row_of_slot[int(self._slots[row])] = row

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self._slots, self._tokens, self._positions, self._rooms, self._blocks

    def rest(self, resting: Collection[int]) -> None:
        """Exclude exactly these slots, and slots that drew a stop id, from the next pass on. Raises
        ValueError for a slot that is not occupied.
        """
        if not resting and not self._num_resting and not self._ended:
            return
        self._check_occupied(resting, "that rest")
        resting = self._ended.union(resting)
        num_rows, self._num_resting = len(self._row_of_slot), len(resting)
        is_resting = np.zeros(num_rows, np.bool_)
        is_resting[[self._row_of_slot[slot] for slot in resting]] = True
        order = np.argsort(is_resting, kind="stable")
        for array in self._arrays:
            array[:num_rows] = array[order]
        self._row_of_slot = {slot: row for row, slot in enumerate(self._slots[:num_rows].tolist())}

    def join(self, join: Join) -> None:
        """Add a slot; replaces its row if it has one. Raises ValueError if it does not fit."""
        if not 0 <= join.slot < len(self._slots):
            raise ValueError(f"slot {join.slot} is outside the table of {len(self._slots)}")
        if join.num_tokens >= self._max_positions or len(join.block_ids) > self._blocks.shape[1]:
            raise ValueError(
                f"slot {join.slot}: {join.num_tokens} tokens, or its blocks, exceed the model's"
                f" {self._max_positions} positions"
            )
        self.leave(join.slot)
        row = len(self._row_of_slot)
        self._row_of_slot[join.slot] = row
        self._slots[row] = join.slot
        self._tokens[row] = join.last_token
        self._positions[row] = join.num_tokens
        self._blocks[row] = SCRATCH_BLOCK
        self._blocks[row, : len(join.block_ids)] = join.block_ids
        self._rooms[row] = self._room(len(join.block_ids))
        self._stops.set(join.slot, join.stop_ids)

    def grow(self, slot: int, index: int, block_id: int) -> None:
        """Add a block to a slot, as its block number `index`. A missing slot is ignored."""
        row = self._row_of_slot.get(slot)
        if row is not None:
            self._blocks[row, index] = block_id
            self._rooms[row] = self._room(index + 1)

    def written_blocks(self, slot: int) -> list[int]:
        """Return the blocks of the positions written so far; empty for a missing slot."""
        row = self._row_of_slot.get(slot)
        if row is None:
            return []
        num_blocks = -(-int(self._positions[row]) // BLOCK_TOKENS)
        return [int(block_id) for block_id in self._blocks[row, :num_blocks]]

    def clear(self) -> None:
        self._row_of_slot.clear()
        self._ended.clear()
        self._num_resting = 0

    @property
    def slots_B(self) -> np.ndarray:
        return self._slots[: len(self)]

    @property
    def tokens_B(self) -> np.ndarray:
        """Last token of each row; the next step writes its KV."""
        return self._tokens[: len(self)]

    @property
    def positions_B(self) -> np.ndarray:
        """Position of each row's last token."""
        return self._positions[: len(self)]

    @property
    def rooms_B(self) -> np.ndarray:
        """Number of positions that fit into each row's blocks, at most the model's maximum."""
        return self._rooms[: len(self)]

    def table_BM(self, last_position: int) -> Tensor:
        """Return the rows' block ids, int32 [B, M], up to the block of `last_position`."""
        num_blocks = min(last_position // BLOCK_TOKENS + 1, self._blocks.shape[1])
        return torch.from_numpy(np.ascontiguousarray(self._blocks[: len(self), :num_blocks]))

    def split(self, second: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows of the first, rows of the second micro-batch). `second`: slots of the second
        micro-batch. Raises ValueError for a slot that is not occupied.
        """
        self._check_occupied(second, "of the second micro-batch")
        is_second = np.zeros(len(self._row_of_slot), np.bool_)
        is_second[[self._row_of_slot[slot] for slot in second]] = True
        is_second = is_second[: len(self)]  # Slots that drew a stop id rest.
        return np.flatnonzero(~is_second), np.flatnonzero(is_second)

    def _check_occupied(self, slots: Collection[int], which: str) -> None:
        absent = sorted(slot for slot in slots if slot not in self._row_of_slot)
        if absent:
            raise ValueError(f"slots {absent} {which} are not occupied")

    def _room(self, num_blocks: int) -> int:
        return min(num_blocks * BLOCK_TOKENS, self._max_positions)

    def advance(self, tokens_B: np.ndarray, num_drawn_B: np.ndarray) -> None:
        """Advance every row of the step by `num_drawn_B` tokens. `tokens_B`: each row's last drawn
        token.
        """
        num_rows = len(self)
        self._tokens[:num_rows] = tokens_B
        positions = self._positions[:num_rows]
        # A row that ended at the context limit may be stepped once more before its leave arrives.
        np.minimum(positions + num_drawn_B, self._max_positions - 1, out=positions)

    def full_blocks(self, rows: np.ndarray, num_before_B: np.ndarray) -> set[int]:
        """Return blocks of these rows that became full since each row had `num_before_B` full ones."""
        num_now_B = self.positions_B // BLOCK_TOKENS
        return {
            int(block_id)
            for row in rows
            for block_id in self._blocks[row, num_before_B[row] : num_now_B[row]]
        }
