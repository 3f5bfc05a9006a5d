"""Simulate a decode unit's ranks on pretended KV (rank_worlds): separate pools and a slow disk."""

from __future__ import annotations

from random import Random

import msgspec

from hadal.core.cache import DiskLocation, split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.messages.pools import Pull, StoreBlocks
from hadal.core.messages.units import Cancel, Decode, KvLease, Tokens
from hadal.core.plans import BlocksStored, DecodePlan, Join, KvPulled
from hadal.core.seams import Effect, Send
from hadal.kv.blocks import blocks_for
from hadal.kv.names import extend, root_of
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.decode.moving import STALL_STEPS_MAX
from tests.columns import key_of, rows_of
from tests.unit.roles.rank_worlds import STOP, World, token_of

FINGERPRINT = "f1"
SALT = b"a tenant"


def named(g: Generation) -> Generation:
    """Return the request with the names of its full blocks (chain), as the front sends it."""
    chain = extend(root_of(FINGERPRINT.encode()), b"", g.prompt + g.output, SALT)
    return msgspec.structs.replace(g, salt=SALT, chain=chain)


class DecodeWorld(World):
    """World of a decode unit; prefill is left out: an arrival pulls KV that is complete."""

    leader: DecodeLeader

    def __init__(self, random: Random, leader: DecodeLeader, num_ranks: int) -> None:
        super().__init__(random, leader, num_ranks)
        self.pulls: list[Pull] = []
        self.num_steps = 0
        self.last_step: dict[str, int] = {}
        """Name -> last step that computed it, in this attempt and formation."""
        self.stores: list[StoreBlocks] = []
        self.written: set[bytes] = set()
        """Names of blocks that the disk stored."""
        self.blocks: dict[bytes, set[tuple[str, int]]] = {}
        """Name of a block -> (text that has it, index of the block there)."""
        self.newly_pulled: set[str] = set()
        """Names of requests with pulled KV that have not joined yet."""

    def submit(self, name: str) -> None:
        self.prompts[name], self.attempts[name] = self.make(name), 0
        first = token_of(name, 0)
        self.outputs[name] = [first]
        whole = self.prompts[name].prompt + tuple(token_of(name, index) for index in range(100))
        chain = extend(root_of(FINGERPRINT.encode()), b"", whole, SALT)
        for position, block in enumerate(split(chain)):
            self.blocks.setdefault(block, set()).add((name, position))
        if first == STOP:
            self.ended.add(name)
        else:
            self.send(name)

    def send(self, name: str) -> None:
        g = self.current(name)
        num_tokens = len(g.prompt) + len(g.output) - 1
        self.feed(Decode(named(g), self.lease(num_tokens)))

    def lease(self, num_tokens: int) -> KvLease:
        """Return a lease: block i of a text is block 1 + i of the source pool."""
        blocks = tuple(range(1, 1 + blocks_for(num_tokens)))
        return KvLease("p", blocks, (0,) * len(blocks), num_tokens)

    def apply(self, effect: Effect) -> None:
        super().apply(effect)
        match effect:
            case Pull():
                self.pulls.append(effect)
                assert effect.rank in self.living
                same = [
                    p
                    for p in self.pulls
                    if (p.request_id, p.attempt) == (effect.request_id, effect.attempt)
                ]
                assert len(same) == 1, f"{effect.request_id} is pulled twice at once"
            case StoreBlocks():
                self.stores.append(effect)
                assert effect.rank in self.living
                self.look(effect)
            case Send(_, Tokens() as message):
                for attempt_id, index, value, finish in rows_of(message):
                    name, attempt = key_of(attempt_id)
                    output = self.outputs[name]
                    if attempt != self.attempts[name] or name in self.ended:
                        continue
                    assert index == len(output)
                    output.append(value)
                    if finish is not None:
                        self.ended.add(name)

    def pulled(self) -> None:
        pull = self.pulls.pop(self.random.randrange(len(self.pulls)))
        fails = self.random.random() < 0.05 or not self.copies(pull)
        self.feed(KvPulled(pull.request_id, pull.attempt, "void" if fails else None))

    def look(self, store: StoreBlocks) -> None:
        """Assert that a block to be written matches its name, down to the last position."""
        for name, position, block in zip(
            split(store.names), store.positions, store.block_ids, strict=True
        ):
            request, _ = self.ranks[store.rank].pool.get((block, 0), ("nobody", 0))
            assert (request, position) in self.blocks[name], (
                f"block {position} of {request} has another's name"
            )
            for offset in range(BLOCK_TOKENS):
                cell = self.ranks[store.rank].pool.get((block, offset))
                assert cell == (request, position * BLOCK_TOKENS + offset), (
                    f"{request} has {cell} at {position}"
                )

    def stored(self) -> None:
        store = self.stores.pop(self.random.randrange(len(self.stores)))
        self.look(store)
        places = tuple(
            None if self.random.random() < 0.1 else DiskLocation(0, 0) for _ in store.positions
        )
        written = [
            name
            for name, place in zip(split(store.names), places, strict=True)
            if place is not None
        ]
        assert not self.written & set(written), "a block is written twice"
        self.written.update(written)
        self.feed(BlocksStored(store.store_id, places))

    def copies(self, pull: Pull) -> bool:
        """Copy a pull's KV, of a new arrival or from another rank's pool; return False if the lease's
        blocks changed.
        """
        into, lease = self.ranks[pull.rank].pool, pull.lease
        if lease.source == "p":
            self.newly_pulled.add(pull.request_id)
        if lease.source != "p":
            if lease.source not in self.pools:
                return False
            rank = self.pools.index(lease.source)
            assert rank != pull.rank
            if self.leader.blocks[rank].versions(lease.block_ids) != lease.versions:
                return False
        for position in range(lease.num_tokens):
            index, offset = divmod(position, BLOCK_TOKENS)
            cell = (pull.request_id, position)
            if lease.source != "p":
                cell = self.ranks[rank].pool.get((lease.block_ids[index], offset), ("nobody", -1))
                assert cell == (pull.request_id, position), (
                    f"{pull.request_id} moves with {cell} at {position}"
                )
            into[pull.into[index], offset] = cell
        return True

    def step_done(self) -> None:
        self.num_steps += 1
        super().step_done()

    def reset(self, lost: set[int], fresh: set[int]) -> None:
        self.pulls = [pull for pull in self.pulls if pull.rank not in lost]
        self.stores = [store for store in self.stores if store.rank not in lost]
        self.last_step.clear()
        super().reset(lost, fresh)
        self.last_step.clear()

    def run(self, rank: int, plan: DecodePlan) -> tuple[dict[int, list[int]], int]:
        at = self.ranks[rank]
        for slot in plan.leaves:
            at.table.pop(slot, None)
        for join in plan.joins:
            self.join(rank, join)
        for slot, position, block in plan.grown:
            assert len(at.table[slot][1]) == position
            at.table[slot][1].append(block)
        assert set(plan.second) <= at.table.keys()
        drawn = {}
        for slot, row in at.table.items():
            name, blocks, num_tokens, index, num_drafts = row
            room = len(blocks) * BLOCK_TOKENS
            if num_tokens >= room:  # Drafts exceed the request: the rank writes to a scratch block.
                assert index >= self.prompts[name].max_tokens
                row[2:] = num_tokens + 1, index + 1, 0
                drawn[slot] = [token_of(name, index)]
                continue
            if self.random.random() < 0.1:
                at.verify(name, blocks, num_tokens)
            num_checked = min(num_drafts, room - 1 - num_tokens)
            num_drawn = 1 + self.random.randint(0, num_checked)
            for position in range(num_tokens, num_tokens + num_drawn):
                at.write(name, blocks, position)
            row[2:] = num_tokens + num_drawn, index + num_drawn, plan.num_drafts
            drawn[slot] = [token_of(name, index + ahead) for ahead in range(num_drawn)]
            if plan.publishes_full:
                full = blocks[num_tokens // BLOCK_TOKENS : (num_tokens + num_drawn) // BLOCK_TOKENS]
                at.copy(full, to_pool=True)
            stall = plan.step_id - self.last_step.get(name, plan.step_id - 1) - 1
            assert 0 <= stall <= STALL_STEPS_MAX, f"{name} stood still for {stall} steps"
            self.last_step[name] = plan.step_id
        for slot in plan.publishes:
            at.copy(at.table[slot][1], to_pool=True)
        return drawn, self.leader.slots.per_rank

    def join(self, rank: int, join: Join) -> None:
        """Add a row. Only the block list identifies the slot's request: find the name by its KV."""
        at = self.ranks[rank]
        assert join.slot not in at.table
        if join.is_pulled:
            at.copy(join.block_ids[: blocks_for(join.num_tokens)], to_pool=False)
        name, _ = at.kv[join.block_ids[0], 0]
        if name in self.newly_pulled:
            self.newly_pulled.remove(name)
            self.last_step.pop(name, None)
        at.verify(name, join.block_ids, join.num_tokens)
        assert join.last_token == token_of(name, join.output_index - 1)
        assert join.num_tokens == len(self.prompts[name].prompt) + join.output_index - 1
        if self.prompts[name].sampling == self.penalties:
            assert join.output == tuple(token_of(name, index) for index in range(join.output_index))
        at.table[join.slot] = [name, list(join.block_ids), join.num_tokens, join.output_index, 0]

    def event(self) -> None:
        """Let the next random event happen."""
        self.send_again(0.3)
        chance = self.random.random()
        if chance < 0.35 and self.pulls:
            self.pulled()
        elif chance < 0.4 and self.stores:
            self.stored()
        elif chance < 0.96 and self.steps:
            self.step_done()
        elif chance < 0.97:
            names = [name for name in self.prompts if name not in self.ended]
            if names:
                name = self.random.choice(names)
                self.feed(Cancel(name, self.attempts[name]))
                self.attempts[name] += 1
                self.lazy.append(name)
