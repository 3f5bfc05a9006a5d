"""Test the prefill leader's cache by hand: what is found, read, named, stored, freed and reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hadal.core import cache
from hadal.core.cache import DiskLocation, num_names, split
from hadal.core.messages.generation import Generation
from hadal.core.messages.pools import Freed, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.units import (
    Cached,
    Filled,
    FrontUp,
    KvLease,
    Prefill,
    PrefillDone,
    Release,
    Returned,
)
from hadal.core.plans import BlocksRead, BlocksStored, KvPulled, LinkBytes, Sampling
from hadal.core.seams import DiskNews, Effect, Execute, RankReset, Tick, UsedBlocks, WakeAt
from hadal.kv.names import extend, root_of
from hadal.roles.prefill.cache import COPY_WAIT_S
from hadal.roles.prefill.leader import PrefillLeader
from hadal.roles.prefill.prompts import PrefillAttempt
from hadal.roles.prefill.reads import READ_TIMEOUT_S
from tests.unit.roles.driving import done, of, prefill_leader, prefill_plans, sent

ROOT = root_of(b"model")


def leader(num_blocks: int = 33, num_ranks: int = 1, **options: Any) -> PrefillLeader:
    fields: dict[str, Any] = {
        "chunk_tokens": 512,
        "num_waiting_max": 8,
        "lease_s": 60.0,
        "heartbeat_s": 60.0,
        "has_disk": True,
    }
    return prefill_leader(num_blocks, num_ranks, **fields | options)


def asked(name: str, num_tokens: int, *, salt: bytes = b"alice", max_tokens: int = 5) -> Generation:
    """Return a request; all prompts are prefixes of one text."""
    tokens = tuple(range(num_tokens))
    return Generation(
        name,
        tokens,
        (),
        max_tokens,
        (),
        0,
        Sampling(),
        0,
        salt=salt,
        chain=extend(ROOT, b"", tokens, salt),
    )


def chain_of(num_blocks: int) -> bytes:
    return asked("", 64 * num_blocks).chain


def news(num_blocks: int) -> DiskNews:
    return DiskNews(
        chain_of(num_blocks), tuple(DiskLocation(3, slot) for slot in range(num_blocks))
    )


def reading(num_blocks: int = 33) -> tuple[PrefillLeader, ReadBlocks]:
    """Return a unit that reads three blocks from disk for its prompt "a", and the read."""
    unit = leader(num_blocks)
    unit.handle(0.0, news(3))
    (load,) = of(unit.handle(0.0, Prefill(asked("a", 200))), ReadBlocks)
    return unit, load


def finish(unit: PrefillLeader, step_id: int, now_s: float = 0.1) -> list[Effect]:
    """Complete the step; its only chunk drew a token."""
    return unit.handle(now_s, done(step_id, {0: 7}))


def run(unit: PrefillLeader, name: str, num_tokens: int, step_id: int) -> list[Effect]:
    """Run a prompt from its arrival until its lease is released; return all effects."""
    effects = unit.handle(0.0, Prefill(asked(name, num_tokens)))
    effects += finish(unit, step_id)
    effects += unit.handle(0.2, Release(name, 0))
    assert unit.audit() == []
    return effects


def answer_stores(unit: PrefillLeader, effects: Sequence[Effect]) -> int:
    """Answer all writes one by one; return the number of written blocks."""
    stores, num = of(effects, StoreBlocks), 0
    while stores:
        store = stores.pop(0)
        places = tuple(DiskLocation(9, num + at) for at in range(len(store.block_ids)))
        num += len(places)
        stores += of(unit.handle(0.3, BlocksStored(store.store_id, places)), StoreBlocks)
        assert unit.audit() == []
    return num


def test_what_was_computed_is_found_and_not_computed_again() -> None:
    unit = leader(has_disk=False)
    run(unit, "a", 200, 0)
    assert unit.blocks.num_used == 0
    (plan,) = prefill_plans(unit.handle(0.3, Prefill(asked("b", 250))))
    (chunk,) = plan.chunks
    assert (chunk.start, len(chunk.tokens), len(chunk.block_ids)) == (192, 58, 4)
    (answer,) = sent(finish(unit, 1), PrefillDone)
    assert answer.num_cached == 192
    counts = unit.cache.totals()
    assert (counts[cache.MEMORY_HIT_TOKENS], counts[cache.MISS_TOKENS]) == (192, 200 + 58)
    assert unit.audit() == []


def test_two_read_the_same_blocks_at_a_time_and_another_tenant_none() -> None:
    unit = leader(has_disk=False)
    run(unit, "a", 200, 0)
    (one,) = prefill_plans(unit.handle(0.3, Prefill(asked("b", 200))))
    (two,) = prefill_plans(unit.handle(0.3, Prefill(asked("c", 200))))
    assert one.chunks[0].block_ids[:3] == two.chunks[0].block_ids[:3]
    assert one.chunks[0].block_ids[3] != two.chunks[0].block_ids[3]
    unit.handle(0.3, Prefill(asked("d", 200, salt=b"bob")))
    (bobs,) = prefill_plans(finish(unit, 1))
    assert (bobs.chunks[0].start, len(bobs.chunks[0].tokens)) == (0, 200)
    assert unit.blocks.num_used == 3 + 1 + 1 + 4
    assert unit.audit() == []


@pytest.mark.promise(
    "Only full blocks have names; a shared block is never written; a prompt's last "
    "position is always computed"
)
def test_the_last_position_is_computed_even_if_all_is_there() -> None:
    unit = leader(has_disk=False)
    run(unit, "a", 192, 0)
    (plan,) = prefill_plans(unit.handle(0.3, Prefill(asked("b", 192))))
    assert (plan.chunks[0].start, len(plan.chunks[0].tokens)) == (128, 64)


def test_a_prompt_that_reads_waits_for_the_disk_while_others_go_on() -> None:
    unit = leader()
    unit.handle(0.0, news(3))
    effects = unit.handle(0.0, Prefill(asked("a", 200)))
    assert prefill_plans(effects) == []
    (load,) = of(effects, ReadBlocks)
    found = (load.names, load.locations)
    assert found == (chain_of(3), tuple(DiskLocation(3, slot) for slot in range(3)))
    (plan,) = prefill_plans(unit.handle(0.1, Prefill(asked("b", 30))))
    assert [chunk.request_id for chunk in plan.chunks] == ["b"]
    effects = unit.handle(0.2, BlocksRead(load.read_id, 3))
    assert of(effects, UsedBlocks) == [UsedBlocks(load.locations)]
    (plan,) = prefill_plans(effects)
    found = (plan.chunks[0].start, plan.chunks[0].block_ids[:3], plan.fetches)
    assert found == (192, load.into, load.into)
    finish(unit, 0)
    (answer,) = sent(finish(unit, 1), PrefillDone)
    assert answer.num_cached == 192
    assert unit.cache.totals()[cache.DISK_HIT_TOKENS] == 192


def test_what_is_damaged_is_computed_and_not_asked_for_again() -> None:
    unit, load = reading()
    (plan,) = prefill_plans(unit.handle(0.1, BlocksRead(load.read_id, 1, 1, "checksum")))
    assert plan.chunks[0].start == 64
    assert unit.cache.totals()[cache.DAMAGED_BLOCKS] == 1
    assert [name in unit.cache.stores.index for name in split(chain_of(3))] == [True, False, True]
    effects = finish(unit, 0)
    # The damaged block is written again.
    assert b"".join(store.names for store in of(effects, StoreBlocks)) == chain_of(2)[16:]


def test_memory_comes_first_and_disk_behind_it() -> None:
    unit = leader()
    unit.handle(0.0, Prefill(asked("a", 100)))
    answer_stores(unit, finish(unit, 0))
    unit.handle(0.0, news(4))
    effects = unit.handle(0.3, Prefill(asked("b", 300)))
    assert of(effects, UsedBlocks) == [UsedBlocks((DiskLocation(3, 0),))]
    (load,) = of(effects, ReadBlocks)
    assert load.names == chain_of(4)[16:]


@pytest.mark.parametrize("recompute", ["off", "auto"])
def test_what_is_cheaper_to_compute_is_computed(recompute: str) -> None:
    unit = leader(recompute=recompute)
    unit.handle(0.0, news(3))
    unit.cache.loads.meter.observe(0.0, 3, 5.0)
    unit.scheduler._rates = type(unit.scheduler.rates)(1e-4, 0.0)
    unit.scheduler._rates_at = 0
    effects = unit.handle(0.1, Prefill(asked("a", 200)))
    if recompute == "off":
        assert [load.names for load in of(effects, ReadBlocks)] == [chain_of(3)]
        return
    (plan,) = prefill_plans(effects)
    assert plan.chunks[0].start == 0
    (said,) = sent(finish(unit, 0), PrefillDone)
    assert (said.num_cached, said.num_recomputed) == (0, 192)
    assert unit.cache.totals()[cache.RECOMPUTED_TOKENS] == 192
    assert len(of(unit.handle(40.0, Prefill(asked("b", 200, salt=b"x"))), ReadBlocks)) == 0
    unit.handle(40.0, done(1, {0: 1}))
    unit.cache.stores.index.put(extend(ROOT, b"", range(192), b"y"), [DiskLocation(1, 1)] * 3)
    # The read is tried again later.
    assert len(of(unit.handle(41.0, Prefill(asked("c", 200, salt=b"y"))), ReadBlocks)) == 1


def test_a_prompt_that_waits_too_long_computes_in_other_blocks() -> None:
    unit, load = reading()
    assert prefill_plans(unit.handle(READ_TIMEOUT_S - 0.1, Tick())) == []
    (plan,) = prefill_plans(unit.handle(READ_TIMEOUT_S, Tick()))
    assert plan.chunks[0].start == 0
    assert not set(plan.chunks[0].block_ids) & set(load.into)
    assert unit.audit() == []
    finish(unit, 0, READ_TIMEOUT_S + 1)
    unit.handle(READ_TIMEOUT_S + 1, Release("a", 0))
    assert set(unit.blocks[0].owners()) >= set(load.into), "the read may still write them"
    effects = unit.handle(READ_TIMEOUT_S + 2, BlocksRead(load.read_id, 3))
    # The computed blocks have the names now, so the read's blocks are freed.
    assert set(of(effects, Freed)[0].block_ids) == set(load.into)
    assert unit.audit() == []


def test_one_that_waits_too_long_and_finds_no_room_goes_back() -> None:
    unit, load = reading(num_blocks=5)
    effects = unit.handle(READ_TIMEOUT_S, Release("unknown", 0))  # Any event checks deadlines.
    assert [returned.reason for returned in sent(effects, Returned)] == ["queue full"]
    assert (unit.num_requests, unit.blocks.num_used, unit.audit()) == (0, 3, [])
    unit.handle(READ_TIMEOUT_S + 1, BlocksRead(load.read_id, 0, 0, "input/output error"))
    assert unit.blocks.num_used == 0
    assert unit.audit() == []


@pytest.mark.parametrize("end", [Release("a", 0), FrontUp("f2")])
def test_a_prompt_dropped_while_it_reads_leaves_its_blocks_to_the_read(end: Any) -> None:
    unit, load = reading()
    unit.handle(0.1, end)
    assert (unit.num_requests, set(unit.blocks[0].owners())) == (0, set(load.into))
    assert unit.audit() == []
    unit.handle(0.2, BlocksRead(load.read_id, 3))
    assert unit.blocks.num_used == 0
    (plan,) = prefill_plans(unit.handle(0.3, Prefill(asked("b", 200))))
    found = (plan.chunks[0].start, plan.chunks[0].block_ids[:3], plan.fetches)
    assert found == (192, load.into, load.into)


def test_reads_of_lost_ranks_are_forgotten_and_those_of_others_are_answered() -> None:
    unit = leader(num_ranks=2)
    unit.handle(0.0, RankReset((), (0, 1), ("p0", "p1"), 1))
    unit.handle(0.0, news(3))
    loads = [of(unit.handle(0.0, Prefill(asked(name, 200))), ReadBlocks)[0] for name in "ab"]
    assert {load.rank for load in loads} == {0, 1}
    lost = loads[0].rank
    unit.handle(
        0.1, RankReset((lost,), (), tuple("" if rank == lost else f"p{rank}" for rank in (0, 1)), 2)
    )
    assert unit.audit() == []
    assert len(unit.cache.loads) == 1
    (plans,) = [
        e.plans for e in unit.handle(0.2, BlocksRead(loads[1].read_id, 3)) if isinstance(e, Execute)
    ]
    assert plans[1 - lost].chunks[0].start == 192  # type: ignore[union-attr]
    before = plans[1 - lost].fetches  # type: ignore[union-attr]
    effects = unit.handle(0.3, RankReset((), (lost,), ("p0", "p1"), 3))
    (plans,) = [e.plans for e in effects if isinstance(e, Execute)]
    assert plans[1 - lost].fetches == before, "nobody knows whether they were fetched"  # type: ignore[union-attr]


def test_what_a_failed_step_was_to_fetch_the_next_one_fetches() -> None:
    unit, load = reading()
    (plan,) = prefill_plans(unit.handle(0.1, BlocksRead(load.read_id, 3)))
    assert plan.fetches == load.into
    unit.handle(0.2, done(plan.step_id, {}, error="RuntimeError: no"))
    (plan,) = prefill_plans(unit.handle(0.3, Prefill(asked("b", 200))))
    assert (plan.chunks[0].start, plan.chunks[0].block_ids[:3]) == (192, load.into)
    assert plan.fetches == load.into, "nobody knows how far the step came"


def test_what_is_found_is_what_each_rank_has_and_what_the_disk_has_behind_that() -> None:
    unit = leader(num_ranks=4, has_disk=False)
    unit.handle(0.0, RankReset((), (0, 1, 2), ("p0", "p1", "p2", ""), 1))
    chain = chain_of(8)
    for rank, num in ((1, 3), (2, 6)):
        blocks = unit.blocks[rank].allocate(num, "x")
        assert blocks is not None
        unit.blocks[rank].name(blocks, chain, 0)
        unit.blocks[rank].free(blocks[num - 2 :], "x")
    unit.blocks.take_freed()
    on_disk = [0, 1, 3, 4, 5, 6]
    names = b"".join(chain[16 * at : 16 * at + 16] for at in on_disk)
    unit.cache.stores.news(DiskNews(names, tuple(DiskLocation(1, at) for at in on_disk)))
    prompt = PrefillAttempt(asked("a", 512), asked("a", 512).prompt)
    finder = unit.cache.finder(0.0, None)
    for _ in range(2):
        found = finder.find(prompt)
        seen = {
            rank: (one.num_memory, one.num_shared, one.num_loading) for rank, one in found.items()
        }
        assert seen == {0: (0, 0, 2), 1: (3, 1, 4), 2: (6, 4, 1)}
    unit.blocks[2].free(unit.blocks[2].lookup(chain)[:4], "x")
    finder = unit.cache.finder(0.0, None)
    assert finder.find(prompt)[2].num_shared == 0


def test_evicted_blocks_are_told_before_the_plan_that_writes_them() -> None:
    unit = leader(num_blocks=6, has_disk=False)
    run(unit, "a", 300, 0)
    effects = unit.handle(0.3, Prefill(asked("b", 300, salt=b"bob")))
    kinds = [type(effect) for effect in effects if isinstance(effect, Freed | Execute)]
    assert kinds == [Freed, Execute]
    assert unit.cache.totals()[cache.EVICTED_BLOCKS] == 4
    (said,) = sent(effects, Cached)
    assert (said.added, set(split(said.dropped))) == (b"", set(split(chain_of(4))))


def test_the_front_hears_of_names_once_and_a_new_one_of_all() -> None:
    unit = leader(has_disk=False)
    effects = run(unit, "a", 200, 0)
    assert [said.added for said in sent(effects, Cached)] == [chain_of(3)]
    assert sent(run(unit, "b", 200, 1), Cached) == []
    (said,) = sent(unit.handle(1.0, FrontUp("f2")), Cached)
    assert (said.added, said.dropped, said.is_whole) == (chain_of(3), b"", True)


def test_blocks_are_stored_in_order_a_few_at_a_time_and_once() -> None:
    unit = leader(num_blocks=33)  # At most 1/8 of 32 blocks at a time: four, in two writes.
    unit.handle(0.0, Prefill(asked("a", 400)))
    effects = finish(unit, 0)
    first, second = of(effects, StoreBlocks)
    assert first.names + second.names == chain_of(4)
    assert (first.positions, second.positions) == ((0, 1), (2, 3))
    unit.handle(0.2, Release("a", 0))
    assert set(unit.blocks[0].owners()) == {*first.block_ids, *second.block_ids}
    assert answer_stores(unit, effects) == 6
    assert (unit.blocks.num_used, unit.cache.totals()[cache.STORED_BLOCKS]) == (0, 6)
    assert of(run(unit, "b", 400, 1), StoreBlocks) == []


def test_what_cannot_be_written_is_counted_and_nobody_waits_for_it() -> None:
    unit = leader()
    unit.handle(0.0, Prefill(asked("a", 200)))
    (store, *_) = of(finish(unit, 0), StoreBlocks)
    unit.handle(
        0.2, BlocksStored(store.store_id, (None,) * len(store.block_ids), error="no space left")
    )
    assert unit.cache.totals()[cache.SKIPPED_BLOCKS] == len(store.block_ids)
    assert unit.audit() == []


def test_a_block_whose_room_was_needed_before_its_turn_is_skipped() -> None:
    unit = leader(num_blocks=10)  # One block is written at a time.
    unit.handle(0.0, Prefill(asked("a", 500)))
    (store,) = of(finish(unit, 0), StoreBlocks)
    unit.handle(0.2, Release("a", 0))
    unit.handle(0.3, Prefill(asked("b", 500, salt=b"bob")))
    num = answer_stores(unit, [store])
    assert num < 7
    assert unit.cache.totals()[cache.SKIPPED_BLOCKS] == 7 - num


def test_a_void_token_takes_the_names_with_it_and_nothing_is_stored() -> None:
    unit = leader(chunk_tokens=128)
    unit.handle(0.0, Prefill(asked("a", 200)))
    unit.handle(0.1, done(0))
    assert unit.blocks.num_named == 2
    effects = unit.handle(0.2, done(1, {0: 5}, failed={0: "not finite"}))
    assert (unit.blocks.num_named, of(effects, StoreBlocks)) == (0, [])
    assert unit.audit() == []


def test_without_memory_only_the_disk_is_asked() -> None:
    unit = leader(keeps_blocks=False)
    effects = run(unit, "a", 200, 0)
    assert sent(effects, Cached) == []
    assert answer_stores(unit, effects) == 3
    assert (unit.blocks.num_named, unit.blocks.num_used) == (0, 0)
    (load,) = of(unit.handle(1.0, Prefill(asked("b", 200))), ReadBlocks)
    assert load.names == chain_of(3)
    unit.handle(1.1, BlocksRead(load.read_id, 3))
    finish(unit, 1)
    unit.handle(1.2, Release("b", 0))
    assert (unit.blocks.num_named, unit.blocks.num_used) == (0, 0)


def test_without_memory_a_prompt_of_one_token_is_stored_as_well() -> None:
    """The prompt's blocks are freed in the same event in which their writes begin."""
    unit = leader(keeps_blocks=False)
    unit.handle(0.0, Prefill(asked("a", 200, max_tokens=1)))
    assert answer_stores(unit, finish(unit, 0)) == 3
    assert unit.cache.totals()[cache.SKIPPED_BLOCKS] == unit.blocks.num_used == 0


def test_a_prompt_without_a_full_block_is_a_miss() -> None:
    unit = leader()
    run(unit, "a", 63, 0)
    assert unit.cache.totals()[cache.MISS_TOKENS] == 63


def test_without_names_nothing_is_cached() -> None:
    unit = leader()
    bare = Generation("a", tuple(range(200)), (), 5, (), 0, Sampling(), 0)
    unit.handle(0.0, Prefill(bare))
    effects = finish(unit, 0)
    assert of(effects, StoreBlocks) == []
    assert sent(effects, Cached) == []
    assert {name for name, count in unit.cache.totals().items() if count} == {cache.MISS_TOKENS}


def test_audit_sees_a_read_that_lost_its_blocks() -> None:
    unit, load = reading()
    assert num_names(load.names) == 3
    unit.blocks[0].free(load.into[:1], unit.cache.loads.of_rank(0)[0].owner)
    assert unit.audit() != []


# ---- blocks that decode filled ----
def filled(num_before: int, num_new: int, name: str = "a", *, salt: bytes = b"alice") -> Filled:
    """Return a message with blocks of the text that all prompts are prefixes of."""
    num_all = num_before + num_new
    lease = KvLease("pool of decode", tuple(range(1, 1 + num_new)), (7,) * num_new, 64 * num_new)
    return Filled("decode-0", name, 0, asked("", 64 * num_all, salt=salt).chain, lease)


def answered(num_blocks: int = 33, **options: Any) -> PrefillLeader:
    """Return a unit without a disk that has prefilled "a": three full blocks and a part of one."""
    unit = leader(num_blocks, has_disk=False, **options)
    run(unit, "a", 200, 0)
    return unit


def copying(unit: PrefillLeader, message: Filled, now_s: float = 0.3) -> list[Pull]:
    effects = unit.handle(now_s, message)
    assert unit.audit() == []
    return of(effects, Pull)


def test_the_next_turn_finds_what_decode_filled() -> None:
    unit = answered()
    message = filled(3, 2)
    (pull,) = copying(unit, message)
    assert (pull.request_id, pull.attempt, pull.lease) == ("a", 0, message.lease)
    assert unit.blocks.num_used == 2
    assert copying(unit, message) == [], "said twice, copied once"
    effects = unit.handle(0.4, KvPulled("a", 0, None, LinkBytes(kv=(5, 0))))
    assert [one.added for one in sent(effects, Cached)] == [chain_of(5)[3 * 16 :]]
    assert (unit.blocks.num_used, unit.blocks.num_named) == (0, 5)
    assert copying(unit, message) == [], "all of it is here"
    (plan,) = prefill_plans(unit.handle(0.5, Prefill(asked("b", 400))))
    (chunk,) = plan.chunks
    assert (chunk.start, len(chunk.tokens), chunk.block_ids[3:5]) == (320, 80, pull.into)
    assert plan.fetches == pull.into
    (answer,) = sent(finish(unit, 1), PrefillDone)
    assert answer.num_cached == 320
    assert unit.audit() == []


def test_what_decode_filled_is_anothers_only_under_his_salt() -> None:
    unit = answered()
    copying(unit, filled(3, 2))
    unit.handle(0.4, KvPulled("a", 0, None))
    (plan,) = prefill_plans(unit.handle(0.5, Prefill(asked("b", 400, salt=b"bob"))))
    assert plan.chunks[0].start == 0
    assert copying(unit, filled(3, 2, "c", salt=b"bob")) == [], (
        "nothing of what is before it is here"
    )


def test_only_what_is_not_here_is_copied_and_nothing_behind_a_gap() -> None:
    unit = answered()
    assert copying(unit, filled(4, 2)) == []
    (pull,) = copying(unit, filled(2, 3))
    assert (pull.lease.block_ids, pull.lease.versions, pull.lease.num_tokens) == (
        (2, 3),
        (7, 7),
        128,
    )


def test_an_answer_to_a_prompt_of_no_block_is_copied() -> None:
    unit = leader(has_disk=False)
    run(unit, "a", 30, 0)
    (pull,) = copying(unit, filled(0, 2))
    unit.handle(0.4, KvPulled("a", 0, None))
    (plan,) = prefill_plans(unit.handle(0.5, Prefill(asked("b", 130))))
    assert (plan.chunks[0].start, plan.chunks[0].block_ids[:2]) == (128, pull.into)


def test_a_copy_that_failed_leaves_nothing() -> None:
    unit = answered()
    (pull,) = copying(unit, filled(3, 2))
    effects = unit.handle(0.4, KvPulled("a", 0, "the leased blocks were freed during the copy"))
    assert of(effects, Freed) == [Freed(pull.into)]
    assert (unit.blocks.num_used, unit.blocks.num_named) == (0, 3)
    assert unit.audit() == []
    with pytest.raises(KeyError):
        unit.handle(0.5, KvPulled("a", 0, None))


def test_names_that_were_taken_back_meanwhile_are_not_gone_on_from() -> None:
    unit = answered()
    copying(unit, filled(3, 2))
    unit.handle(0.35, Prefill(asked("b", 100, salt=b"bob")))
    unit.handle(0.4, done(1, {0: 7}, failed={0: "not finite"}))
    assert unit.blocks.num_named == 0
    unit.handle(0.5, KvPulled("a", 0, None))
    assert (unit.blocks.num_used, unit.blocks.num_named) == (0, 0)


def test_room_is_made_of_what_is_nobodys_and_not_of_what_comes_before() -> None:
    unit = answered(num_blocks=8)
    run_other(unit, "x", 200, 1)  # Three more named blocks and a free one.
    (pull,) = copying(unit, filled(3, 2))
    unit.handle(0.4, KvPulled("a", 0, None))
    (plan,) = prefill_plans(unit.handle(0.5, Prefill(asked("b", 350))))
    assert (plan.chunks[0].start, plan.chunks[0].block_ids[3:5]) == (320, pull.into)


def run_other(unit: PrefillLeader, name: str, num_tokens: int, step_id: int) -> None:
    """Run another tenant's prompt from its arrival until its lease is released."""
    unit.handle(0.25, Prefill(asked(name, num_tokens, salt=b"bob")))
    finish(unit, step_id, 0.25)
    unit.handle(0.26, Release(name, 0))


@pytest.mark.promise("enough free or evictable blocks, beside the next prompt's?")
def test_without_room_nothing_is_copied_and_no_prompt_waits_for_it() -> None:
    unit = answered(num_blocks=8)
    unit.handle(0.25, Prefill(asked("x", 250, salt=b"bob")))  # "x" takes 4 of 7 blocks.
    assert copying(unit, filled(3, 2)) == []
    assert unit.blocks.num_named == 3
    unit.handle(0.3, done(1, {0: 7}))
    unit.handle(0.3, Release("x", 0))
    unit = answered(num_blocks=8, num_requests_max=1)
    unit.handle(0.25, Prefill(asked("x", 60, salt=b"bob")))
    unit.handle(0.25, Prefill(asked("y", 250, salt=b"bob")))  # "y" is next, and needs four blocks.
    assert copying(unit, filled(3, 3)) == []
    assert len(copying(unit, filled(3, 2))) == 0
    unit.handle(0.3, Release("y", 0))
    assert len(copying(unit, filled(3, 2))) == 1


@pytest.mark.promise(
    "A prompt that continues a text being copied waits for the copy, for a second at "
    "most. Other prompts do not wait."
)
def test_a_prompt_that_goes_on_from_a_copy_waits_for_it_but_not_long() -> None:
    unit = answered()
    (pull,) = copying(unit, filled(3, 2), 0.3)
    assert prefill_plans(unit.handle(0.4, Prefill(asked("b", 400)))) == []
    (plan,) = prefill_plans(unit.handle(0.4, Prefill(asked("c", 250))))
    assert plan.chunks[0].request_id == "c", "others do not"
    finish(unit, 1, 0.45)
    (plan,) = prefill_plans(unit.handle(0.5, KvPulled("a", 0, None)))
    assert (plan.chunks[0].request_id, plan.chunks[0].start) == ("b", 320)
    unit = answered()
    copying(unit, filled(3, 2), 0.3)
    effects = unit.handle(0.4, Prefill(asked("b", 400)))
    assert prefill_plans(effects) == []
    (plan,) = prefill_plans(unit.handle(0.3 + COPY_WAIT_S, Tick()))
    assert (plan.chunks[0].request_id, plan.chunks[0].start) == ("b", 192)
    finish(unit, 1, 1.5)
    unit.handle(1.6, Release("b", 0))
    effects = unit.handle(1.7, KvPulled("a", 0, None))
    assert of(effects, Freed) == [Freed(pull.into)], "it was computed meanwhile"
    assert (unit.blocks.num_used, unit.audit()) == (0, [])


def test_the_unit_wakes_for_a_prompt_that_waits_for_a_copy() -> None:
    unit = answered()
    unit.handle(0.2, Tick())
    effects = unit.handle(0.3, filled(3, 2))
    assert of(effects, WakeAt)[-1] == WakeAt(0.3 + COPY_WAIT_S)


def test_a_rank_that_has_the_text_copies_and_one_that_dies_takes_the_copy_with_it() -> None:
    unit = leader(num_ranks=2, has_disk=False)
    unit.handle(0.0, RankReset((), (0, 1), ("p", "q"), 1))
    unit.handle(0.0, Prefill(asked("x", 250, salt=b"bob")))
    unit.handle(0.0, Prefill(asked("a", 200)))
    while (step := next(iter(unit._in_flight), None)) is not None:
        drawn = {k: 7 for k, part in enumerate(step.parts) if part.end == len(part.prompt.tokens)}
        unit.handle(0.1, done(step.step_id, drawn))
    unit.handle(0.2, Release("a", 0))
    unit.handle(0.2, Release("x", 0))
    rank = unit.blocks.prefixes(chain_of(3)).popitem()[0]
    (pull,) = copying(unit, filled(3, 2))
    assert pull.rank == rank
    pools = ("", "q") if rank == 0 else ("p", "")
    unit.handle(0.4, RankReset((rank,), (), pools, 2))
    assert (unit.blocks.num_used, unit.audit()) == (0, [])
    assert copying(unit, filled(3, 2)) == []


def test_without_memory_nothing_is_copied() -> None:
    assert copying(leader(keeps_blocks=False), filled(0, 2)) == []
