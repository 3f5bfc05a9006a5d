"""Cache entries made by a decode unit: blocks of generated text, so that the next turn can reuse
them.

    with a disk cache   a block is full --> it is written to disk
    else, on one host   the request ends --> its blocks stay, named, in this pool; Filled: prefill copies them

A block is full once a completed step has written its last position and the request still needed the
token drawn there; the table then has all tokens of the block. A step that failed or is void names
nothing, because its writes are unknown. A block that waits for the disk has one more owner
(roles/unit/disk_stores), so its request may end, move or be preempted meanwhile. A block that
prefill is to copy has no owner: it can be evicted at any time, and the reader detects that by the
block's version.

Prefill has named and stored the full blocks of the prompt. Independent of files.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.arrays import Ints
from hadal.core.cache import DISK_BLOCKS, NAME_BYTES, num_names, slice_of, split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import text_of
from hadal.core.messages.pools import StoreBlocks
from hadal.core.messages.units import Filled, KvLease
from hadal.core.plans import BlocksStored
from hadal.core.seams import DiskNews, Effect, Send
from hadal.kv.names import extend, root_of
from hadal.roles.decode.table import DecodeTable
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.disk_stores import DiskStores, Owner


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """Destination of blocks of generated text."""

    fingerprint: str = ""
    """KV fingerprint (kv/names); empty: blocks are neither named nor kept."""
    has_disk: bool = False
    """True: blocks are written to disk. False: they are offered to prefill."""


class DecodeCache:
    """Names of blocks that requests fill. `answers` sets where these blocks are kept."""

    def __init__(
        self, table: DecodeTable, pools: RankPools, per_rank: int, answers: AnswerCache
    ) -> None:
        self.stores = DiskStores(pools, holds=True)
        """Disk writes. They own their blocks until written, since requests may end before."""
        self.is_on = bool(answers.fingerprint)
        self._has_disk = answers.has_disk
        self._root = root_of(answers.fingerprint.encode())
        self._table = table
        self._pools = pools
        self._per_rank = per_rank

    def totals(self) -> dict[str, int]:
        """Return the values of UnitReport.cache; empty without a disk cache."""
        has_disk = self.is_on and self._has_disk
        return {**self.stores.counts, DISK_BLOCKS: len(self.stores.index)} if has_disk else {}

    # ---- the disk ----
    def begin_stores(self) -> list[StoreBlocks]:
        """Return the disk writes that start now."""
        return self.stores.begin()

    def note_disk(self, event: BlocksStored | DiskNews) -> None:
        """Note finished writes, or a change of the blocks on disk."""
        self.stores.note(event)

    def make_room(self, rank: int, num_blocks: int) -> int:
        """Drop disk writes of a rank that have not started, until `num_blocks` blocks are freed.
        Return how many were freed.
        """
        return self.stores.give_up(rank, num_blocks)

    def lose(self, rank: int) -> None:
        """Forget the writes of a lost rank."""
        self.stores.lose(rank)

    def owners(self, rank: int) -> list[tuple[Owner, tuple[int, ...]]]:
        """Return the writes that own blocks of a rank, with these blocks."""
        return self.stores.owners(rank)

    def check(self) -> list[str]:
        """Return problems; empty if names and counts of the disk writes agree."""
        return self.stores.check()

    # ---- names ----
    def placed(self, slot: int) -> None:
        """Note the names of a new request's full blocks, and the text of its partly filled one."""
        table, occupant = self._table, self._table.occupant(slot)
        generation, num_full = occupant.generation, occupant.lease.num_tokens // BLOCK_TOKENS
        num_chained = num_full * NAME_BYTES
        # A text without a full block has an empty chain, too; then only the fingerprint decides
        # whether blocks are named.
        table.is_named[slot] = self.is_on and (bool(generation.chain) or not num_full)
        if not table.is_named[slot]:
            return
        text = text_of(generation)
        rest, chain = text[num_full * BLOCK_TOKENS :], generation.chain[:num_chained]
        table.tail[slot, : len(rest)] = rest
        if len(chain) < num_chained:
            text = text[: num_full * BLOCK_TOKENS]
            chain = extend(self._root, chain, text, generation.salt, generation.num_public)
        table.names[slot] = chain

    def delivered(self, slots: Ints, values: Ints, lengths: Ints) -> None:
        """Name and queue the blocks that a completed step filled, and note its tokens.

        Each slot occurs once. Its request now has `lengths` positions of KV, and `values` is the
        token drawn after them. All of these tokens are delivered to the clients.
        """
        self._name_filled(slots, lengths)
        self._table.tail[slots, lengths % BLOCK_TOKENS] = values

    def _name_filled(self, slots: Ints, lengths: Ints) -> None:
        table = self._table
        full = (lengths % BLOCK_TOKENS == 0) & table.is_named[slots]
        if not full.any():
            return
        for slot, length in zip(slots[full].tolist(), lengths[full].tolist(), strict=True):
            salt = table.occupant(slot).generation.salt
            # As in the chain: each name continues the one before it.
            before = table.names[slot][-NAME_BYTES:] or self._root
            name = extend(before, b"", table.tail[slot].tolist(), salt)
            table.names[slot] += name
            position = length // BLOCK_TOKENS - 1
            if self._has_disk:
                self.stores.offer(
                    slot // self._per_rank, name, position, table.block_ids[slot][position]
                )

    def leave(self, slot: int, unit: str) -> list[Effect]:
        """Name the blocks that an ended request filled here, so that they stay until their memory
        is needed, and offer them to prefill. Does nothing with a disk cache, if no block was
        filled, or if called again for the same request.
        """
        table = self._table
        if self._has_disk or not table.is_named[slot]:
            return []
        table.is_named[slot] = False
        generation, chain = table.occupant(slot).generation, table.names[slot]
        # Prefill named the blocks that were full when it drew its token.
        first = (len(generation.prompt) + len(generation.output) - 1) // BLOCK_TOKENS
        end, rank = num_names(chain), slot // self._per_rank
        if end == first:
            return []
        pool = self._pools[rank]
        pool.name(table.block_ids[slot][first:end], chain, first)
        self._pools.take_names()  # Drop the changes: the front routes no prompt here.
        # Another request may have filled blocks with the same names: these are offered instead.
        block_ids = tuple(pool.named_as(split(slice_of(chain, first, end))))
        lease = KvLease(
            self._pools.names[rank],
            block_ids,
            pool.versions(block_ids),
            (end - first) * BLOCK_TOKENS,
        )
        key = generation.request_id, generation.attempt
        return [Send("front", Filled(unit, *key, chain, lease))]
