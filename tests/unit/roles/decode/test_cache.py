"""Test blocks of generated text: their names, when they may be written, and their owner meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from hadal.core.cache import (
    DISK_BLOCKS,
    DISK_EVICTED_BLOCKS,
    SKIPPED_BLOCKS,
    STORED_BLOCKS,
    DiskLocation,
    split,
)
from hadal.core.errors import InvariantError
from hadal.core.messages.pools import Freed, Pull, StoreBlocks
from hadal.core.messages.units import Cancel, Decode, Filled, KvLease, Returned, Tokens, UnitReport
from hadal.core.plans import BlocksStored, KvPulled, StepDone
from hadal.core.seams import DiskNews, RankReset, Send, Tick
from hadal.kv.blocks import blocks_for
from hadal.kv.names import extend, root_of
from hadal.policy.decode_moves import MoveTerms
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.decode.table import SlotState
from hadal.roles.unit import disk_stores
from hadal.roles.unit.disk_stores import Writer
from tests.unit.roles.decode_worlds import FINGERPRINT, SALT, DecodeWorld, named
from tests.unit.roles.driving import decode, decode_leader, decode_plans, done, of, sent

ROOT = root_of(FINGERPRINT.encode())


def leader(num_blocks: int = 40, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    fields: dict[str, Any] = {
        "num_waiting_max": 9,
        "max_context": 2000,
        "heartbeat_s": 100.0,
        "has_disk": True,
        "fingerprint": FINGERPRINT,
    }
    unit = decode_leader(num_blocks, num_ranks, **fields | options)
    unit.start(0.0)
    return unit


def text_of(message: Decode, *tokens: int) -> tuple[int, ...]:
    return message.generation.prompt + message.generation.output + tokens


def names_of(text: tuple[int, ...]) -> list[bytes]:
    return list(split(extend(ROOT, b"", text, SALT)))


def request(
    name: str = "a", prompt: int = 100, *, output: int = 1, max_tokens: int = 300
) -> Decode:
    message = decode(name, prompt, output=output, max_tokens=max_tokens)
    return Decode(named(message.generation), message.lease)


class Drive:
    """Drive a unit step by step: each slot draws 1000, 1001, ... Requested block writes are recorded."""

    def __init__(self, unit: DecodeLeader, *messages: Decode) -> None:
        self.unit = unit
        self.stores: list[StoreBlocks] = []
        self.publishes: set[bool] = set()
        self.steps: list[tuple[int, tuple[int, ...]]] = []
        self.num_drawn: Counter[int] = Counter()
        for message in messages:
            self.occupant(message)

    def feed(self, event: Any) -> list[Any]:
        effects = self.unit.handle(0.0, event)
        assert self.unit.audit() == []
        self.stores += of(effects, StoreBlocks)
        for plan in decode_plans(effects):
            self.publishes.add(plan.publishes_full)
            (slots,) = (
                step.computed for step in self.unit._in_flight if step.step_id == plan.step_id
            )
            self.steps.append((plan.step_id, tuple(slots.nonzero()[0].tolist())))
        return effects

    def occupant(self, message: Decode) -> None:
        self.feed(message)
        self.feed(KvPulled(message.generation.request_id, message.generation.attempt, None))

    def step(self, error: str | None = None) -> list[Any]:
        step_id, slots = self.steps.pop(0)
        if error is not None:
            return self.feed(done(step_id, error=error))
        tokens = {}
        for slot in slots:
            tokens[slot] = 1000 + self.num_drawn[slot]
            self.num_drawn[slot] += 1
        return self.feed(done(step_id, tokens))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drawn(self, num: int) -> tuple[int, ...]:
        return tuple(range(1000, 1000 + num))

    def answer(self, store: StoreBlocks, *, is_written: bool = True) -> list[Any]:
        place = DiskLocation(0, 0) if is_written else None
        return self.feed(BlocksStored(store.store_id, (place,) * len(store.positions)))

    def cache(self) -> dict[str, int]:
        return self.unit.slots.cache.totals()


def counted(stored: int = 0, skipped: int = 0, on_disk: int = 0) -> dict[str, int]:
    """Return all cache counters of a decode unit's report."""
    return {
        STORED_BLOCKS: stored,
        SKIPPED_BLOCKS: skipped,
        DISK_EVICTED_BLOCKS: 0,
        DISK_BLOCKS: on_disk,
    }


@pytest.mark.promise(
    "With a cache folder, blocks that fill go to disk, so that the next turn finds them."
)
@pytest.mark.parametrize("prompt", [1, 62, 63, 64, 65, 100, 126, 127, 128, 200])
@pytest.mark.parametrize("output", [1, 3])
def test_every_block_that_steps_fill_is_named_as_its_text_is(prompt: int, output: int) -> None:
    message = request(prompt=prompt, output=output)
    drive = Drive(leader(), message)
    drive.run(200)
    for store in drive.stores:
        drive.answer(store)
    # The last token drawn has no KV yet.
    num_written = message.lease.num_tokens + 200
    names = names_of(text_of(message, *drive.drawn(200))[:num_written])
    first = message.lease.num_tokens // 64
    assert [name for store in drive.stores for name in split(store.names)] == names[first:]
    found = [at for store in drive.stores for at in store.positions]
    assert found == list(range(first, len(names)))
    blocks = drive.unit.table.blocks_of(0)
    found = [block for store in drive.stores for block in store.block_ids]
    assert found == list(blocks[first : len(names)])
    assert drive.publishes == {True}


def test_a_block_is_stored_in_the_step_that_wrote_its_last_position_and_not_before() -> None:
    message = request(prompt=120)  # Steps write 120, 121, ..: the eighth writes 127.
    drive = Drive(leader(), message)
    drive.run(7)
    assert drive.stores == []
    drive.step()
    assert [store.positions for store in drive.stores] == [(1,)]


def test_the_chain_that_the_front_sent_is_gone_on_with_even_if_it_is_behind() -> None:
    message = request(prompt=300)
    chain = extend(ROOT, b"", text_of(message, *range(1000, 1020)), SALT, 70)
    short = msgspec.structs.replace(message.generation, chain=chain[:16], num_public=70)
    drive = Drive(leader(), Decode(short, message.lease))
    drive.run(20)
    assert drive.stores[0].names == chain[4 * 16 :]


def test_public_parts_of_a_prompt_are_named_as_the_front_names_them() -> None:
    message = request(prompt=100)
    text = text_of(message, *range(1000, 1028))
    chain = extend(ROOT, b"", text[:100], SALT, 70)
    sent_on = msgspec.structs.replace(message.generation, chain=chain, num_public=70)
    drive = Drive(leader(), Decode(sent_on, message.lease))
    drive.run(40)
    assert drive.stores[0].names == extend(ROOT, b"", text, SALT, 70)[16:32]


@pytest.mark.parametrize("has_disk", [False, True])
def test_without_a_cache_nothing_is_named(has_disk: bool) -> None:
    message = request(prompt=100)
    chain = message.generation.chain if not has_disk else b""
    unnamed = msgspec.structs.replace(message.generation, chain=chain)
    drive = Drive(leader(has_disk=has_disk), Decode(unnamed, message.lease))
    drive.run(100)
    assert drive.stores == []
    assert drive.publishes == {has_disk}
    assert drive.cache() == (counted() if has_disk else {})


def test_what_is_on_disk_or_under_way_is_not_written_again() -> None:
    message = request("a", 100)
    names = names_of(text_of(message, *range(1000, 1300)))
    drive = Drive(leader())
    drive.feed(DiskNews(names[2], (DiskLocation(3, 3),)))
    drive.occupant(message)
    drive.occupant(request("b", 100))  # "b" joins two plans later and draws the same text.
    drive.unit.slots.cache.stores._num_writing_max = 1
    drive.run(30)
    assert [store.names for store in drive.stores] == [names[1]]
    drive.run(130)
    # One write is in flight; the next waits for it.
    assert [store.names for store in drive.stores] == [names[1]]
    drive.answer(drive.stores[0])
    assert [store.names for store in drive.stores] == [names[1], names[3]]
    assert drive.cache() == counted(stored=1, on_disk=2)
    drive.feed(DiskNews(b"", (), names[1] + names[2]))
    assert drive.cache()[DISK_BLOCKS] == 0


def test_what_made_room_on_disk_is_written_again() -> None:
    drive = Drive(leader(), request("a", 100))
    drive.feed(DiskNews(b"n" * 16, (DiskLocation(0, 0),)))
    drive.run(30)
    (store,) = drive.stores
    drive.feed(BlocksStored(store.store_id, (DiskLocation(0, 0),), dropped=b"n" * 16))
    assert drive.cache()[DISK_BLOCKS] == 1
    drive.feed(DiskNews(b"", (), store.names))
    drive.feed(Cancel("a", 0))
    drive.run(2)
    drive.num_drawn.clear()
    drive.occupant(request("b", 100))
    drive.run(30)
    assert [other.names for other in drive.stores] == [store.names] * 2


@pytest.mark.parametrize("is_written", [True, False])
def test_blocks_stay_until_they_are_written_whatever_becomes_of_the_request(
    is_written: bool,
) -> None:
    drive = Drive(leader(), request("a", 100))
    drive.run(30)
    (store,) = drive.stores
    drive.feed(Cancel("a", 0))
    drive.run(2)
    assert (drive.unit.num_requests, drive.unit.blocks.num_used) == (0, 1)
    assert drive.unit.blocks[0].owners() == {store.block_ids[0]: (Writer(0),)}
    effects = drive.answer(store, is_written=is_written)
    assert of(effects, Freed) == [Freed(store.block_ids)]
    assert drive.unit.blocks.num_used == 0
    assert drive.cache() == (counted(stored=1, on_disk=1) if is_written else counted(skipped=1))
    with pytest.raises(InvariantError, match="does not fit"):
        drive.answer(store)


def test_only_so_much_is_under_way_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_stores, "HELD_BLOCKS", 2)
    drive = Drive(leader(), request("a", 63))
    drive.unit.slots.cache.stores._num_writing_max = 1
    drive.run(5 * 64 + 10 - 63)
    assert [store.positions for store in drive.stores] == [(0,)]
    assert drive.cache() == counted(skipped=2)  # Of five blocks one is being written and two wait.
    drive.answer(drive.stores[0])
    drive.answer(drive.stores[1])
    drive.answer(drive.stores[2])
    assert [store.positions for store in drive.stores] == [(0,), (1,), (2,)]
    assert drive.cache() == counted(stored=3, skipped=2, on_disk=3)


def test_what_waits_to_be_written_goes_before_any_request() -> None:
    """Request "a" leaves two of 8 blocks: one being written, one waiting. "b" needs 7: the waiting one, too."""
    drive = Drive(leader(num_blocks=9), request("a", 63))
    drive.run(76)
    assert [store.positions for store in drive.stores] == [(0,)]
    drive.feed(Cancel("a", 0))
    drive.run(2)
    assert drive.unit.blocks.num_used == 2
    drive.num_drawn.clear()
    # "b" takes the 6 free blocks, and will need one more.
    drive.occupant(request("b", 360, max_tokens=60))
    assert drive.unit.num_requests == 1
    for _ in range(30):
        assert sent(drive.step(), Returned) == []
    assert drive.unit.blocks.num_used == 8
    assert drive.cache()[SKIPPED_BLOCKS] == 1


def test_one_that_waits_for_blocks_gets_those_that_wait_to_be_written() -> None:
    drive = Drive(leader(num_blocks=9), request("a", 63))
    drive.run(76)
    drive.feed(Cancel("a", 0))
    drive.run(2)
    effects = drive.feed(request("b", 440, max_tokens=60))  # 7 blocks.
    assert len(of(effects, Pull)) == 1
    assert drive.unit.blocks.num_used == 8


def test_blocks_that_a_living_request_holds_are_not_given_up_for_nothing() -> None:
    drive = Drive(leader(num_blocks=9), request("a", 63))
    drive.run(76)
    drive.feed(request("b", 440, max_tokens=60))
    assert drive.cache() == counted()
    assert drive.unit.slots.cache.stores.give_up(0, 100) == 0


def test_a_failed_step_names_nothing() -> None:
    drive = Drive(leader(), request("a", 120))
    drive.run(7)
    drive.step(error="broken")
    drive.step()
    assert drive.stores == []
    assert drive.unit.blocks.num_used == 0


def test_a_slot_whose_token_is_void_names_nothing() -> None:
    drive = Drive(leader(), request("a", 120))
    drive.run(7)
    step_id, _ = drive.steps.pop(0)
    drive.feed(StepDone(step_id, (0,), (5,), {}, 0.01, None, {0: "not finite"}))
    drive.step()
    assert drive.stores == []


def test_a_cancelled_slot_names_nothing_that_nobody_was_given() -> None:
    drive = Drive(leader(), request("a", 119))
    drive.run(7)
    drive.feed(Cancel("a", 0))
    drive.run(2)  # The second of these writes position 127, after a token that was dropped.
    assert drive.stores == []


def test_void_plans_name_nothing_and_the_block_is_named_when_it_is_filled_again() -> None:
    message = request("a", 120)
    drive = Drive(leader(num_ranks=2))
    drive.feed(RankReset((), (0, 1), ("p", "q"), 1))
    drive.occupant(message)
    drive.run(7)
    assert drive.stores == []
    drive.steps.clear()
    drive.feed(RankReset((1,), (), ("p", ""), 2))  # The eighth and ninth step are void.
    assert drive.stores == []
    drive.run(3)
    (store,) = drive.stores
    assert store.names == names_of(text_of(message, *drive.drawn(10)))[1]


def test_a_lost_rank_takes_its_stores_with_it() -> None:
    drive = Drive(leader(num_ranks=2))
    drive.feed(RankReset((), (0, 1), ("p", "q"), 1))
    drive.occupant(request("a", 120))
    drive.occupant(request("b", 111))
    drive.unit.slots.cache.stores._num_writing_max = 1
    drive.run(90)
    assert [(store.rank, store.positions) for store in drive.stores] == [(0, (1,)), (1, (1,))]
    drive.steps.clear()
    drive.feed(RankReset((0,), (), ("", "q"), 2))
    assert drive.cache()[SKIPPED_BLOCKS] == 2
    with pytest.raises(InvariantError, match="does not fit"):
        drive.answer(drive.stores[0])
    assert drive.unit.slots.cache.stores.owners(0) == []
    assert len(drive.unit.slots.cache.stores.owners(1)) == 2
    drive.feed(RankReset((), (0,), ("p2", "q"), 3))
    drive.answer(drive.stores[1])
    assert drive.stores[2].rank == 1


def test_load_tells_the_counts() -> None:
    drive = Drive(leader(), request("a", 120))
    drive.run(9)
    drive.answer(drive.stores[0])
    (load,) = sent(drive.unit.handle(200.0, Tick()), UnitReport)
    assert load.cache == counted(stored=1, on_disk=1)


def test_a_request_that_moved_is_named_where_it_goes_on() -> None:
    """A moving request takes along the name of its last full block and its tokens since then; a block
    that is being written stays at the source.
    """
    written: set[bytes] = set()
    num_moved = 0
    for seed in range(4):
        from_moves = _moving_world(seed)
        written |= from_moves.written
        num_moved += from_moves.leader.slots.moving.num_moved
    assert num_moved > 5
    assert len(written) > 40


def _moving_world(seed: int) -> DecodeWorld:
    random = Random(seed)
    eager = MoveTerms(stall_steps=0.01, gain_steps=12.0, num_tokens_left_min=3)
    unit = leader(20, 3, num_waiting_max=100, terms=eager)
    world = DecodeWorld(random, unit, 3)
    world.reset(set(), {0, 1, 2})
    for _ in range(1500):
        world.live(1, 10, 0.005)
        assert unit.table.is_named[unit.table.slots_in(SlotState.ACTIVE)].all()
    return world


def test_a_lease_says_where_generated_text_begins() -> None:
    """After a retry, earlier output is prefilled again, so the prefill unit stores its blocks."""
    message = request("a", 50, output=30)
    lease = KvLease("pool", tuple(range(1, 1 + blocks_for(79))), (0, 0), 79)
    drive = Drive(leader(), Decode(message.generation, lease))
    drive.run(60)
    assert [store.positions for store in drive.stores] == [(1,)]


# ---- without a disk, on one host: full blocks are offered to prefill ----
def offering(num_blocks: int = 40, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    fields = {"has_disk": False, "offers_blocks": True, "pool_name": "pool of decode"}
    return leader(num_blocks, num_ranks, **fields | options)


def test_what_an_answer_filled_is_offered_before_its_last_token_and_stays() -> None:
    message = request(prompt=100, max_tokens=101)
    drive = Drive(offering(), message)
    blocks: tuple[int, ...] = ()
    effects: list[Any] = []
    while not (filled := sent(effects, Filled)):
        blocks = drive.unit.table.blocks_of(0)
        effects = drive.step()
    # The last of 101 tokens has no KV: 200 positions are written, three blocks are full.
    chain = b"".join(names_of(text_of(message, *drive.drawn(100))[:200]))
    lease = KvLease("pool of decode", blocks[1:3], (0, 0), 128)
    assert filled == [Filled("decode-0", "a", 0, chain, lease)]
    kinds = [type(effect.message) for effect in of(effects, Send)]
    assert kinds.index(Filled) < kinds.index(Tokens)
    while drive.steps:
        assert sent(drive.step(), Filled) == []
    pool = drive.unit.blocks[0]
    assert (pool.num_used, pool.versions(lease.block_ids)) == (0, lease.versions)
    assert drive.stores == []
    assert drive.publishes == {True}
    assert drive.cache() == {}


@pytest.mark.parametrize(("prompt", "num_steps"), [(100, 27), (128, 63), (1, 10)])
def test_a_request_that_fills_no_block_costs_no_message(prompt: int, num_steps: int) -> None:
    drive = Drive(offering(), request(prompt=prompt, max_tokens=1 + num_steps))
    effects = [effect for _ in range(num_steps) for effect in drive.step()]
    assert len(sent(effects, Tokens)) == num_steps
    assert sent(effects, Filled) == []
    assert drive.unit.blocks.num_named == 0


@pytest.mark.promise(
    "If the client disconnects, the blocks of the delivered part of the answer are found."
)
def test_a_client_that_left_leaves_what_was_delivered() -> None:
    message = request(prompt=100)
    drive = Drive(offering(), message)
    drive.run(28)
    (filled,) = sent(drive.feed(Cancel("a", 0)), Filled)
    assert filled.chain == b"".join(names_of(text_of(message, *drive.drawn(28))))
    assert len(filled.lease.block_ids) == 1
    drive.run(2)
    assert drive.unit.blocks.num_used == 0


def test_nothing_is_offered_of_what_may_be_void() -> None:
    drive = Drive(offering(), request(prompt=100))
    drive.run(30)
    step_id, _ = drive.steps.pop(0)
    effects = drive.feed(StepDone(step_id, (0,), (5,), {}, 0.01, None, {0: "not finite"}))
    assert sent(effects, Returned)
    assert sent(effects, Filled) == []
    drive = Drive(offering(), request(prompt=100))
    drive.run(30)
    assert sent(drive.step(error="broken"), Filled) == []
    assert drive.unit.blocks.num_named == 0


def test_nothing_is_offered_of_a_request_whose_kv_is_not_here_yet() -> None:
    unit = offering()
    unit.handle(0.0, request(prompt=100, output=100))
    assert sent(unit.handle(0.0, Cancel("a", 0)), Filled) == []
    assert unit.blocks.num_named == 0


def test_what_two_filled_alike_is_kept_once_and_offered_twice() -> None:
    drive = Drive(offering(), request("a", 100), request("b", 100))
    drive.run(40)
    (one,) = sent(drive.feed(Cancel("a", 0)), Filled)
    (other,) = sent(drive.feed(Cancel("b", 0)), Filled)
    assert (one.chain, one.lease) == (other.chain, other.lease)
    drive.run(2)
    assert (drive.unit.blocks.num_used, drive.unit.blocks.num_named) == (0, 1)


def test_what_was_offered_makes_room_and_the_lease_is_void_then() -> None:
    drive = Drive(offering(num_blocks=5), request(prompt=100, max_tokens=60))
    drive.run(30)
    (filled,) = sent(drive.feed(Cancel("a", 0)), Filled)
    drive.run(2)
    drive.num_drawn.clear()
    freed = of(drive.feed(request("b", 230, max_tokens=9)), Freed)
    assert set(filled.lease.block_ids) <= {block for one in freed for block in one.block_ids}
    pool = drive.unit.blocks[0]
    assert pool.versions(filled.lease.block_ids) != filled.lease.versions


def test_a_request_that_moved_is_offered_from_the_rank_where_it_ended() -> None:
    num_offered = num_moved = 0
    for seed in range(4):
        eager = MoveTerms(stall_steps=0.01, gain_steps=12.0, num_tokens_left_min=3)
        unit = offering(20, 3, num_waiting_max=100, terms=eager, pool_name="")
        world = OfferedWorld(Random(seed), unit, 3)
        world.reset(set(), {0, 1, 2})
        for _ in range(1500):
            world.live(1, 10, 0.005)
        num_offered += world.num_offered
        num_moved += unit.slots.moving.num_moved
    assert num_moved > 5
    assert num_offered > 40


class OfferedWorld(DecodeWorld):
    """World that checks the contents of offered blocks at once."""

    num_offered = 0

    def apply(self, effect: Any) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Filled):
            self.look_at(effect.message)
        super().apply(effect)

    def look_at(self, filled: Filled) -> None:
        names = list(split(filled.chain))[-len(filled.lease.block_ids) :]
        rank = self.pools.index(filled.lease.source)
        for name, block in zip(names, filled.lease.block_ids, strict=True):
            request, first = self.ranks[rank].pool[block, 0]
            assert (request, first // 64) in self.blocks[name]
            cells = [self.ranks[rank].pool[block, offset] for offset in range(64)]
            assert cells == [(request, first + offset) for offset in range(64)]
            self.num_offered += 1
