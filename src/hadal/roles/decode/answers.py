"""What a decode unit adds to the cache: blocks of generated text, so that the next turn finds them.

    with a disk cache   a block is full --> it is written there
    else, on one host   the request ends --> its blocks stay, named, in this pool; Filled: prefill copies them

A block is full once a completed step has written its last position and the request still wanted the
token; then the table has all of its tokens. A step that failed or is void names nothing, because it is
not known what it wrote. A block that waits for the disk has one more owner (roles/unit/disk_stores),
so its request may end, move or be preempted meanwhile. A block that prefill is to copy has no owner: it
can be evicted at any time, and its version tells the reader.

Prefill has named and stored what is full of the prompt. Knows no files.
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
    """Where blocks of generated text are kept."""

    fingerprint: str = ""
    """See kv/names; empty: nowhere, and nothing is named."""
    has_disk: bool = False
    """On disk; else prefill is offered them."""


class DecodeCache:
    """Names what requests fill. `answers`: what becomes of it."""

    def __init__(
        self, table: DecodeTable, pools: RankPools, per_rank: int, answers: AnswerCache
    ) -> None:
        self.stores = DiskStores(pools, holds=True)
        """It owns blocks until they are written, as their requests may end before."""
        self.is_on = bool(answers.fingerprint)
        self._has_disk = answers.has_disk
        self._root = root_of(answers.fingerprint.encode())
        self._table = table
        self._pools = pools
        self._per_rank = per_rank

    def totals(self) -> dict[str, int]:
        """What UnitReport.cache says; empty where there is no disk cache."""
        has_disk = self.is_on and self._has_disk
        return {**self.stores.counts, DISK_BLOCKS: len(self.stores.index)} if has_disk else {}

    # ---- the disk ----
    def begin_stores(self) -> list[StoreBlocks]:
        """Begin the writes that may begin."""
        return self.stores.begin()

    def note_disk(self, event: BlocksStored | DiskNews) -> None:
        """Note what was written, or what can be found on disk."""
        self.stores.note(event)

    def make_room(self, rank: int, num_blocks: int) -> int:
        """Give up blocks of a rank that wait to be written; return how many came free."""
        return self.stores.give_up(rank, num_blocks)

    def lose(self, rank: int) -> None:
        """Forget the writes of a rank that is gone."""
        self.stores.lose(rank)

    def owners(self, rank: int) -> list[tuple[Owner, tuple[int, ...]]]:
        """Which writes own which blocks of a rank."""
        return self.stores.owners(rank)

    def check(self) -> list[str]:
        """Problems; empty when writes add up."""
        return self.stores.check()

    # ---- names ----
    def placed(self, slot: int) -> None:
        """A request's prompt is prefilled: note the text that its next block begins with, and what
        it follows.
        """
        table, occupant = self._table, self._table.occupant(slot)
        generation, num_full = occupant.generation, occupant.lease.num_tokens // BLOCK_TOKENS
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
        table.names[slot] = chain

    def delivered(self, slots: Ints, values: Ints, lengths: Ints) -> None:
        """Name and queue the blocks that a completed step filled, and note its tokens.

        Each slot stands once. Its request now has `lengths` positions of KV, and `values` is the token
        drawn behind them. The clients got all of these tokens.
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
            # As the chain's names would be: each begins with the one before it.
            before = table.names[slot][-NAME_BYTES:] or self._root
            name = extend(before, b"", table.tail[slot].tolist(), salt)
            table.names[slot] += name
            position = length // BLOCK_TOKENS - 1
            if self._has_disk:
                self.stores.offer(
                    slot // self._per_rank, name, position, table.block_ids[slot][position]
                )

    def leave(self, slot: int, unit: str) -> list[Effect]:
        """A request gets no more tokens: name the blocks that it filled here, so that they stay until
        their room is needed, and offer them to prefill. Once for each slot; nothing where there are none.
        """
        table = self._table
        if self._has_disk or not table.is_named[slot]:
            return []
        table.is_named[slot] = False
        generation, chain = table.occupant(slot).generation, table.names[slot]
        # Prefill named what was full before its last token.
        first = (len(generation.prompt) + len(generation.output) - 1) // BLOCK_TOKENS
        end, rank = num_names(chain), slot // self._per_rank
        if end == first:
            return []
        pool = self._pools[rank]
        pool.name(table.block_ids[slot][first:end], chain, first)
        self._pools.take_names()  # Drop the changes: the front routes no prompt here.
        # Another request may have filled the same.
        block_ids = tuple(pool.named_as(split(slice_of(chain, first, end))))
        lease = KvLease(
            self._pools.names[rank],
            block_ids,
            pool.versions(block_ids),
            (end - first) * BLOCK_TOKENS,
        )
        key = generation.request_id, generation.attempt
        return [Send("front", Filled(unit, *key, chain, lease))]
