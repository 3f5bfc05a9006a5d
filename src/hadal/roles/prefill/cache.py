"""Reuse of KV by a prefill leader: blocks found instead of computed, and kept for others to find.

    find -> start: acquire blocks in the pool, read blocks from disk (reads) -> loaded
    a step computed the rest -> written: full blocks get names
    the first token was drawn -> finished: blocks are written to disk (roles/unit/disk_stores)
    take: copy blocks that decode filled -> taken: these get names

Other prompts find a block as soon as it has a name. It is written to disk only when its prompt's
first token has shown that its content is sound, because a write to disk cannot be undone. A failed
draw (void token) removes the names of all blocks on its rank.

Independent of steps and of the choice of ranks. policy/cached_prefix decides what is cheaper to
compute than to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hadal.core import cache
from hadal.core.balance import AUTO
from hadal.core.cache import NAME_BYTES, num_names, slice_of, split
from hadal.core.errors import InvariantError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.pools import Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.units import Cached, Filled, KvLease
from hadal.core.plans import BlocksRead, BlocksStored, KvPulled
from hadal.core.rates import StepRates
from hadal.core.seams import DiskNews, Effect, Send, UsedBlocks
from hadal.kv.blocks import blocks_for
from hadal.kv.disk_index import BlockIndex
from hadal.policy.cached_prefix import Prefix, ReadRates, choose_prefix, usable_blocks
from hadal.roles.prefill.prompts import Found, PrefillAttempt, Start
from hadal.roles.prefill.reads import DiskReads
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.disk_stores import DiskStores

COPY_WAIT_S = 1.0
"""Seconds that a prompt waits for a copy of blocks that it would otherwise compute. Shared memory
copies gigabytes in that time.
"""


@dataclass(frozen=True, slots=True)
class Taker:
    """Owner of blocks that receive a copy from a decode unit's pool."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Taking:
    """Copy under way: a rank's blocks `into` become blocks of `chain` from number `first` on."""

    rank: int
    chain: bytes
    first: int
    into: tuple[int, ...]
    until_s: float
    """Time until which a prompt that continues this text waits for the copy."""


class PrefixFinder:
    """Prefixes that prompts would find on each rank, at one moment."""

    def __init__(
        self,
        pools: RankPools,
        index: BlockIndex,
        rates: StepRates | None,
        read_rates: ReadRates | None,
        queued_s: Mapping[int, float],
    ) -> None:
        """`rates`, `read_rates`: measured rates of steps and of disk reads; None if unknown.
        `rates` is also None if all blocks on disk are to be read. `queued_s`: rank -> predicted
        seconds of its reads under way.
        """
        self._pools = pools
        self._index = index
        self._rates = rates
        self._read_rates = read_rates
        self._queued_s = queued_s
        self._num_shared: dict[tuple[int, bytes], int] = {}
        """(rank, last name of a prefix there) -> number of its blocks with an owner. Kept because
        prompts of one plan often share their beginning.
        """

    def find(self, prompt: PrefillAttempt) -> Found:
        """Return the prefix that a prompt would find, by rank."""
        num_most = min(num_names(prompt.generation.chain), usable_blocks(len(prompt.tokens)))
        chain = slice_of(prompt.generation.chain, 0, num_most)
        if not chain:
            return {}
        found: dict[int, Prefix] = {}
        # If all ranks read one disk and have nothing of the text in memory, most find the same
        # prefix.
        kinds: dict[tuple[int, int, float], Prefix] = {}
        rank_to_start = self._pools.prefixes(chain)
        start_to_num: dict[int, int] = {}
        end = 0
        for start in sorted({rank_to_start.get(rank, 0) for rank in self._pools.living}):
            if end <= start:  # Otherwise an earlier start has found this part.
                end = start + self._index.num_found(slice_of(chain, start, num_most))
            start_to_num[start] = end - start
        for rank in self._pools.living:
            start = rank_to_start.get(rank, 0)
            if not start and not start_to_num[0]:
                continue
            num_shared = self._shared(rank, slice_of(chain, 0, start)) if start else 0
            queued_s = self._queued_s.get(rank, 0.0)
            kind = start, num_shared, queued_s
            if kind not in kinds:
                kinds[kind] = choose_prefix(
                    start, num_shared, start_to_num[start], self._rates, self._read_rates, queued_s
                )
            found[rank] = kinds[kind]
        return found

    def _shared(self, rank: int, names: bytes) -> int:
        """Return how many blocks of a rank's prefix are in use: they need no free blocks."""
        key = rank, names[-NAME_BYTES:]
        if key not in self._num_shared:
            self._num_shared[key] = self._pools[rank].num_owned(self._pools[rank].lookup(names))
        return self._num_shared[key]


class PrefillCache:
    """Cache of a prefill unit. `keeps`: blocks stay in the pools; `has_disk`: blocks are written to
    disk. A prompt without a chain uses neither. `out` is the leader's list of effects, to which
    this class appends.

    `recompute`: "auto": blocks on disk are read unless computing them is faster; "off": all are
    read. `index`: blocks known to be on disk; None: none yet.
    """

    def __init__(
        self,
        unit: str,
        epoch: str,
        pools: RankPools,
        out: list[Effect],
        *,
        keeps: bool,
        has_disk: bool,
        recompute: str = AUTO,
        index: BlockIndex | None = None,
    ) -> None:
        self.loads = DiskReads()
        self.stores = DiskStores(pools, index=index)
        self._index = self.stores.index
        self._counts: Counter[str] = Counter()
        """Counts by the names of core/cache, except counts of disk writes and of the pools."""
        self._unit = unit
        self._epoch = epoch
        self._pools = pools
        self._out = out
        self._keeps = keeps
        self._has_disk = has_disk
        self._is_priced = recompute == AUTO
        self._fetches: list[tuple[int, ...]] = [()] * pools.num_ranks
        """Blocks that each rank's next plan must fetch from its pool: read or copied there since
        its last plan, or fetched by a plan that may never have run.
        """
        self._takings: dict[Taker, Taking] = {}
        self._begun: list[StoreBlocks] = []
        """Disk writes of this event. They own their blocks already, and are sent after the event's
        plans, so that no step waits for a write.
        """

    # ---- a prompt starts ----
    def finder(self, now_s: float, rates: StepRates | None) -> PrefixFinder:
        """Return a finder, valid until something changes. `rates`: None if nothing is measured yet."""
        return PrefixFinder(
            self._pools,
            self._index,
            rates if self._is_priced else None,
            self.loads.rates(now_s),
            self.loads.queued_s(),
        )

    def start(self, now_s: float, starts: Sequence[Start]) -> None:
        """Allocate all blocks of starting prompts. Found blocks are acquired first, so that none is
        evicted for a new one.
        """
        for prompt, rank, prefix in starts:
            held = self._pools[rank].lookup(slice_of(prompt.generation.chain, 0, prefix.num_memory))
            if len(held) != prefix.num_memory:
                raise InvariantError(f"{self._unit}: the cached blocks of {prompt.key} are gone.")
            self._pools[rank].acquire(held, prompt.key)
            prompt.rank, prompt.prefix, prompt.block_ids = rank, prefix, held
            prompt.num_named = prefix.num_memory
            prompt.num_planned = prompt.num_done = prefix.num_memory * BLOCK_TOKENS
        for prompt, rank, prefix in starts:
            new = self._pools[rank].allocate(
                blocks_for(len(prompt.tokens)) - prefix.num_memory, prompt.key
            )
            if new is None:
                raise InvariantError(f"{self._unit}: a packed prompt's blocks are not free.")
            prompt.block_ids += new
        self._out += self._pools.take_freed()
        for prompt, rank, prefix in starts:
            self._say_used(slice_of(prompt.generation.chain, 0, prefix.num_memory))
            if prefix.num_loading:
                prompt.is_loading = True
                load = self.loads.begin(now_s, prompt, prefix.num_memory, prefix.num_loading)
                self._pools[rank].acquire(load.into, load.owner, is_use=False)
                self._out.append(
                    ReadBlocks(
                        load.read_id,
                        load.names,
                        self._index.lookup(load.names),
                        load.into,
                        rank,
                    )
                )

    def _say_used(self, names: bytes) -> None:
        """Report blocks as used to the disk store, which evicts by use."""
        locations = self._index.found(names)
        if locations:
            self._out.append(UsedBlocks(locations))

    # ---- events of the disk ----
    def loaded(self, now_s: float, event: BlocksRead) -> None:
        """Handle a finished read: its prompt continues with the loaded blocks and computes the rest."""
        load = self.loads.end(now_s, event.read_id, event.num_loaded)
        num, prompt = event.num_loaded, load.prompt
        self._counts[cache.DAMAGED_BLOCKS] += event.num_damaged
        if num < len(
            load.into
        ):  # The first block that was not loaded; blocks behind it are useless without it.
            self._index.drop(slice_of(load.names, num, num + 1))
        if self._keeps:
            self._pools[load.rank].name(load.into[:num], load.chain, load.first)
        self._fetches[load.rank] += load.into[:num]
        if prompt is not None:
            prompt.is_loading = False
            prompt.prefix = replace(prompt.prefix, num_loading=num)
            prompt.num_named = load.first + num
            prompt.num_planned = prompt.num_done = prompt.num_named * BLOCK_TOKENS
        self._pools.free(load.rank, load.into, load.owner)
        self._say_used(slice_of(load.names, 0, num))

    def give_up(self, now_s: float) -> list[PrefillAttempt]:
        """Make prompts that waited too long for the disk compute instead, in other blocks: the read
        may still write its own. Return prompts without free blocks for that.
        """
        stuck = []
        for load in self.loads.overdue(now_s):
            prompt = self.loads.give_up(now_s, load)
            prompt.prefix = replace(prompt.prefix, num_loading=0)
            new = self._pools[load.rank].allocate(len(load.into), prompt.key)
            if new is None:
                stuck.append(prompt)
                continue
            end = load.first + len(new)
            prompt.block_ids = (*prompt.block_ids[: load.first], *new, *prompt.block_ids[end:])
            self._pools.free(load.rank, load.into, prompt.key)
        return stuck

    def abandon(self, prompt: PrefillAttempt) -> None:
        """Note that a dropped prompt waits for no read."""
        self.loads.abandon(prompt)

    def note_disk(self, event: BlocksStored | DiskNews) -> None:
        """Note finished writes, or a change of the blocks on disk."""
        self.stores.note(event)

    def take_fetches(self, rank: int) -> tuple[int, ...]:
        """Return the blocks that the rank's next plan must fetch from its pool, and forget them."""
        fetches, self._fetches[rank] = self._fetches[rank], ()
        return fetches

    def fetch_again(self, rank_to_blocks: Sequence[tuple[int, ...]]) -> None:
        """Keep these blocks for a later plan, as the plans that fetched them may never have run."""
        for rank, blocks in enumerate(rank_to_blocks):
            self._fetches[rank] += blocks

    # ---- a prompt is computed ----
    def written(self, prompt: PrefillAttempt) -> None:
        """Name a prompt's full blocks up to `num_done`, so that other prompts find them."""
        full = min(prompt.num_done // BLOCK_TOKENS, num_names(prompt.generation.chain))
        if self._keeps and full > prompt.num_named:
            first = prompt.num_named
            self._pools[prompt.rank].name(
                prompt.block_ids[first:full], prompt.generation.chain, first
            )
            prompt.num_named = full

    def finished(self, prompt: PrefillAttempt) -> None:
        """Count a prompt's hits after its first token, and store blocks that the disk does not have."""
        generation, counts, prefix = prompt.generation, self._counts, prompt.prefix
        counts[cache.MEMORY_HIT_TOKENS] += prefix.num_memory * BLOCK_TOKENS
        counts[cache.DISK_HIT_TOKENS] += prefix.num_loading * BLOCK_TOKENS
        counts[cache.MISS_TOKENS] += len(prompt.tokens) - prefix.num_blocks * BLOCK_TOKENS
        counts[cache.RECOMPUTED_TOKENS] += prefix.num_recomputed * BLOCK_TOKENS
        if self._has_disk:
            for position, name in enumerate(split(generation.chain)):
                self.stores.offer(prompt.rank, name, position, prompt.block_ids[position])
            # Begun now: this token may be its last, and then its blocks may have no owner at the
            # end of the event.
            self._begun += self.stores.begin()

    def failed(self, prompt: PrefillAttempt) -> None:
        """Forget all names of a rank after a void token: the KV that it attended to may be void."""
        self._pools.forget_names(prompt.rank)

    # ---- blocks that decode filled ----
    def take(self, now_s: float, message: Filled, num_blocks_next: int) -> None:
        """Copy blocks that decode filled to the rank with most of the text before them. Do nothing
        if none is new there, if blocks between are missing, or without free blocks besides those
        that the next prompt needs (`num_blocks_next`).
        """
        owner, chain = Taker(message.request_id, message.attempt), message.chain
        if not self._keeps or not self._pools.living or owner in self._takings:
            return
        found = self._pools.prefixes(chain)
        rank = max(
            self._pools.living,
            key=lambda rank: (found.get(rank, 0), self._pools[rank].num_free),
        )
        pool, lease = self._pools[rank], message.lease
        before = pool.lookup(chain)
        num_new = num_names(chain) - len(before)
        skipped = len(lease.block_ids) - num_new
        if not num_new or skipped < 0:
            return
        # Owned for a moment, so that the allocation does not evict the blocks before the new ones.
        pool.acquire(before, owner, is_use=False)
        has_room = pool.num_free >= num_new + num_blocks_next
        into = pool.allocate(num_new, owner) if has_room else None
        self._pools.free(rank, before, owner)
        if into is None:
            return
        self._takings[owner] = Taking(rank, chain, len(before), into, now_s + COPY_WAIT_S)
        part = KvLease(
            lease.source,
            lease.block_ids[skipped:],
            lease.versions[skipped:],
            num_new * BLOCK_TOKENS,
        )
        self._out += self._pools.take_freed()
        self._out.append(Pull(owner.request_id, owner.attempt, part, into, rank))

    def taken(self, event: KvPulled) -> None:
        """Name the blocks of an ended copy, unless it failed or the blocks before them are no
        longer found. Raises KeyError if no such copy is under way.
        """
        owner = Taker(event.request_id, event.attempt)
        taking = self._takings.pop(owner)
        pool, before = self._pools[taking.rank], slice_of(taking.chain, 0, taking.first)
        if event.error is None and len(pool.lookup(before)) == taking.first:
            pool.name(taking.into, taking.chain, taking.first)
            self._fetches[taking.rank] += taking.into
        self._pools.free(taking.rank, taking.into, owner)

    def ready(self, now_s: float, waiting: Iterable[PrefillAttempt]) -> Iterable[PrefillAttempt]:
        """Return the prompts, without any that continue a text being copied."""
        coming = tuple(one.chain for one in self._takings.values() if now_s < one.until_s)
        if not coming:
            return waiting
        return [prompt for prompt in waiting if not prompt.generation.chain.startswith(coming)]

    def next_deadline_s(self, now_s: float) -> float | None:
        """Return when the next prompt stops waiting for a read or a copy; None if none waits."""
        times_s = [one.until_s for one in self._takings.values() if now_s < one.until_s]
        if (read_s := self.loads.next_deadline_s) is not None:
            times_s.append(read_s)
        return min(times_s, default=None)

    # ---- the end of an event ----
    def end_event(self) -> None:
        """Start the disk writes that may start, after this event's plans (see `_begun`), and report
        changes of the pools to the front.
        """
        self._out += [*self._begun, *self.stores.begin()]
        self._begun.clear()
        added, dropped = self._pools.take_names()
        if added or dropped:
            self._out.append(Send("front", Cached(self._unit, self._epoch, added, dropped)))

    def totals(self) -> dict[str, int]:
        """Return the values of UnitReport.cache, for all names in core/cache."""
        found = {
            **self._counts,
            **self.stores.counts,
            cache.EVICTED_BLOCKS: self._pools.num_evicted,
            cache.MEMORY_BLOCKS: self._pools.num_named,
            cache.DISK_BLOCKS: len(self._index),
        }
        return {name: found.get(name, 0) for name in (*cache.CACHE_LEVELS, *cache.CACHE_TOTALS)}

    def say_all(self) -> None:
        """Report all blocks that can be found, to a front that has not received any."""
        self._pools.take_names()
        names = self._pools.found_names
        if self._keeps:
            cached = Cached(self._unit, self._epoch, names, b"", is_whole=True)
            self._out.append(Send("front", cached))

    def lose(self, ranks: Sequence[int]) -> None:
        """Forget everything of lost ranks; their prompts are removed already."""
        for owner in [owner for owner, taking in self._takings.items() if taking.rank in ranks]:
            del self._takings[owner]
        for rank in ranks:
            self.loads.lose(rank)
            self.stores.lose(rank)
            self._fetches[rank] = ()

    def owners(self, rank: int) -> list[tuple[Hashable, tuple[int, ...]]]:
        """Return the reads, writes and copies that own blocks of a rank, with these blocks."""
        owners: list[tuple[Hashable, tuple[int, ...]]] = [
            (load.owner, load.into) for load in self.loads.of_rank(rank)
        ]
        owners += [(one, of.into) for one, of in self._takings.items() if of.rank == rank]
        return owners + list(self.stores.owners(rank))

    def check(self) -> list[str]:
        """Return problems; empty if reads and writes add up."""
        return self.loads.check() + self.stores.check()
