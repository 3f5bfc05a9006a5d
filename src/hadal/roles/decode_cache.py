"""What a decode unit adds to the disk cache: blocks of generated text, so that the next turn finds
them.

A block is full when its last position was written by a step that is done and whose request still
wanted its token; then the table has all of its tokens. What the plans in flight have done since is
not known, so a step that failed or is void names nothing. While a block waits to be written, or is,
it has one more owner (roles/disk_stores): its request may end, move or be preempted meanwhile.

Prefill has named and stored what is full of the prompt. Knows neither files nor messages.
"""

from __future__ import annotations

import numpy as np

from hadal.core.cache import DISK_BLOCKS, NAME_BYTES
from hadal.core.messages import BLOCK_TOKENS, text_of
from hadal.kv.names import extend, root_of
from hadal.roles.decode_table import Bools, DecodeTable, Ints
from hadal.roles.disk_stores import StoreBook
from hadal.roles.rank_pools import RankPools


class DecodeCache:
    """`fingerprint`: see kv/names; empty: there is no disk cache, and nothing is named."""

    def __init__(
        self, table: DecodeTable, pools: RankPools, per_rank: int, fingerprint: str
    ) -> None:
        self.stores = StoreBook(pools, holds=True)
        """Nobody else keeps a block when its request ends."""
        self.is_on = bool(fingerprint)
        self._root = root_of(fingerprint.encode())
        self._table = table
        self._per_rank = per_rank

    def totals(self) -> dict[str, int]:
        """What Load.cache says; empty where there is no cache."""
        return {**self.stores.counts, DISK_BLOCKS: len(self.stores.index)} if self.is_on else {}

    # ---- names ----
    def seated(self, slot: int) -> None:
        """A request's prompt is prefilled: note the text that its next block begins with, and what
        it follows.
        """
        table, seat = self._table, self._table.seat(slot)
        generation, num_full = seat.generation, seat.lease.num_tokens // BLOCK_TOKENS
        num_chained = num_full * NAME_BYTES
        # A text without a full block has an empty chain, too: for those, only the fingerprint says
        # what is cached.
        table.is_named[slot] = self.is_on and (bool(generation.chain) or not num_full)
        if not table.is_named[slot]:
            return
        text = text_of(generation)
        rest, chain = text[num_full * BLOCK_TOKENS :], generation.chain[:num_chained]
        table.tail[slot, : len(rest)] = rest
        if len(chain) < num_chained:
            text = text[: num_full * BLOCK_TOKENS]
            chain = extend(self._root, chain, text, generation.salt, generation.num_public)
        table.names[slot] = chain[-NAME_BYTES:] or self._root

    def fills(self, computed: Bools) -> dict[int, list[int]]:
        """rank -> the blocks whose last position the plan just made writes; ranks without any are
        not in it.
        """
        table = self._table
        by_rank: dict[int, list[int]] = {}
        if not self.is_on:
            return by_rank
        slots = np.flatnonzero(computed & table.is_named)
        for slot in slots[table.length[slots] % BLOCK_TOKENS == 0].tolist():
            block_id = table.block_ids[slot][int(table.length[slot]) // BLOCK_TOKENS - 1]
            by_rank.setdefault(slot // self._per_rank, []).append(block_id)
        return by_rank

    def delivered(self, slots: Ints, values: Ints, lengths: Ints) -> None:
        """A step is done that wrote the last of so many positions of these slots and drew `values`
        behind them, all of whose tokens were delivered: name the blocks that it filled, queue them,
        and note the new tokens.
        """
        self._name_filled(slots, lengths)
        self._table.tail[slots, lengths % BLOCK_TOKENS] = values

    def _name_filled(self, slots: Ints, lengths: Ints) -> None:
        table = self._table
        full = (lengths % BLOCK_TOKENS == 0) & table.is_named[slots]
        if not full.any():
            return
        for slot, length in zip(slots[full].tolist(), lengths[full].tolist(), strict=True):
            salt = table.seat(slot).generation.salt
            # As the chain's names would be: each begins with the one before it.
            name = table.names[slot] = extend(
                table.names[slot], b"", table.tail[slot].tolist(), salt
            )
            position = length // BLOCK_TOKENS - 1
            self.stores.offer(
                slot // self._per_rank, name, position, table.block_ids[slot][position]
            )
