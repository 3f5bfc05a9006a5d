"""Hints by hand: seats that are taken early, parts of a prompt's KV, and who has to go first."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from hadal.core.messages import (
    Cancel,
    Decode,
    FrontUp,
    KvLease,
    PullEarly,
    Pulled,
    Returned,
    UnitUp,
)
from hadal.core.plans import KvPulled
from hadal.core.seams import Freed, Pull, RankReset, Tick, WakeAt
from hadal.kv.blocks import blocks_for
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.decode.table import SlotState
from tests.fresh import seeds
from tests.unit.roles.decode_worlds import FINGERPRINT, DecodeWorld
from tests.unit.roles.driving import decode, decode_leader, decode_plans, done, of, sent

SEEDS = seeds(1, 2, 4)
LEASE_S = 5.0


def leader(num_blocks: int = 20, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    fields = {"num_slots": 3, "num_waiting_max": 3, "heartbeat_s": 100.0, "lease_s": LEASE_S}
    unit = decode_leader(num_blocks, num_ranks, **fields | options)
    unit.start(0.0)
    return unit


def hint(num_tokens: int, name: str = "a", prompt: int = 300, **options: Any) -> PullEarly:
    """So many tokens of a prompt are prefilled: blocks 1.. of a pool."""
    whole = decode(name, prompt, **options).generation
    blocks = tuple(range(1, 1 + blocks_for(num_tokens)))
    return PullEarly(
        msgspec.structs.replace(whole, output=()),
        KvLease("pool", blocks, (0,) * len(blocks), num_tokens),
    )


def pulled(unit: DecodeLeader, name: str = "a", error: str | None = None) -> list[Any]:
    return unit.handle(1.0, KvPulled(name, 0, error))


def leased(pull: Pull) -> tuple[int, ...]:
    return pull.lease.block_ids


def test_kv_of_other_weights_is_not_pulled() -> None:
    unit = leader(fingerprint="f")
    assert [up.fingerprint for up in sent(unit.handle(0.0, FrontUp("f1")), UnitUp)] == ["f", "f"]

    def under(fingerprint: str, message: Decode | PullEarly) -> Decode | PullEarly:
        generation = msgspec.structs.replace(message.generation, fingerprint=fingerprint)
        return type(message)(generation, message.lease)

    assert of(unit.handle(0.0, under("g", hint(64))), Pull) == []
    effects = unit.handle(0.0, under("g", decode()))
    assert sent(effects, Returned) == [Returned("decode-0", "a", 0, "other weights")]
    assert of(effects, Pull) == []
    assert len(of(unit.handle(0.0, under("f", decode())), Pull)) == 1


def test_a_prompt_comes_in_parts_and_decode_pulls_the_rest() -> None:
    unit = leader()
    (first,) = of(unit.handle(0.0, hint(64)), Pull)
    assert (leased(first), first.lease.num_tokens, len(first.into)) == ((1,), 64, 1)
    assert of(unit.handle(0.1, hint(192)), Pull) == []  # One copy at a time.
    (second,) = of(pulled(unit), Pull)
    assert (leased(second), second.lease.num_tokens) == ((2, 3), 128)
    effects = pulled(unit)
    assert of(effects, Pull) == sent(effects, Pulled) == []
    (rest,) = of(unit.handle(0.2, decode(prompt=300)), Pull)
    assert (leased(rest), rest.lease.num_tokens, rest.lease.versions) == ((4, 5), 108, (0, 0))
    assert (*first.into, *second.into, *rest.into) == unit.table.blocks_of(0)
    effects = pulled(unit)
    assert sent(effects, Pulled) == [Pulled("decode-0", "a", 0)]
    (join,) = decode_plans(effects)[0].joins
    assert (join.num_tokens, join.output_index, join.is_pulled) == (300, 1, True)
    assert join.block_ids == unit.table.blocks_of(0)


def test_only_full_blocks_are_pulled_early() -> None:
    unit = leader()
    (pull,) = of(unit.handle(0.0, hint(130)), Pull)
    assert (leased(pull), pull.lease.num_tokens) == ((1, 2), 128)
    pulled(unit)
    (rest,) = of(unit.handle(0.1, decode(prompt=300)), Pull)
    assert leased(rest) == (3, 4, 5)


def test_room_is_taken_for_the_whole_prompt_and_its_first_step() -> None:
    unit = leader()
    unit.handle(0.0, hint(64, prompt=320))
    assert (unit.blocks.num_used, unit.num_requests, unit.audit()) == (6, 1, [])
    unit.handle(0.1, decode(prompt=320))
    assert unit.blocks.num_used == 6


def test_the_same_hint_twice_is_one() -> None:
    unit = leader()
    unit.handle(0.0, hint(128))
    assert of(unit.handle(0.0, hint(128)), Pull) == []
    pulled(unit)
    assert of(unit.handle(0.1, hint(128)), Pull) == of(unit.handle(0.1, hint(64)), Pull) == []
    assert unit.num_requests == 1
    unit.handle(0.2, decode(prompt=300))
    assert of(unit.handle(0.2, hint(256)), Pull) == []  # Late.
    assert of(unit.handle(0.2, decode(prompt=300)), Pull) == []


def test_decode_waits_for_the_copy_under_way() -> None:
    unit = leader()
    unit.handle(0.0, hint(192))
    assert of(unit.handle(0.1, decode(prompt=300)), Pull) == []
    (rest,) = of(pulled(unit), Pull)
    assert leased(rest) == (4, 5)
    assert sent(pulled(unit), Pulled)


@pytest.mark.promise(
    "The request is prefilled again elsewhere; what was pulled early is pulled again."
)
@pytest.mark.parametrize("is_decode_first", [False, True])
def test_a_part_that_failed_is_pulled_again_with_the_rest(is_decode_first: bool) -> None:
    unit = leader()
    unit.handle(0.0, hint(64))
    pulled(unit)
    unit.handle(0.1, hint(192))
    if is_decode_first:
        unit.handle(0.2, decode(prompt=300))
        effects = pulled(unit, error="void")
    else:
        assert of(pulled(unit, error="void"), Pull) == []
        effects = unit.handle(0.2, decode(prompt=300))
    assert sent(effects, Returned) == []
    (rest,) = of(effects, Pull)
    assert leased(rest) == (2, 3, 4, 5)
    effects = pulled(unit, error="void")
    assert [message.reason for message in sent(effects, Returned)] == ["pull failed: void"]
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


def test_a_hint_without_room_is_ignored() -> None:
    unit = leader(num_blocks=6)
    assert of(unit.handle(0.0, hint(64, prompt=321)), Pull) == []
    # It never fits; Decode will hear so.
    assert of(unit.handle(0.0, hint(64, prompt=900)), Pull) == []
    assert of(unit.handle(0.0, hint(64, prompt=900, max_tokens=900)), Pull) == []
    unit = leader(num_slots=1)
    unit.handle(0.0, decode("b"))
    assert of(unit.handle(0.0, hint(64)), Pull) == []
    assert unit.num_requests == 1
    unit.handle(0.0, decode("c"))
    unit.handle(0.0, Cancel("b", 0))
    assert of(unit.handle(0.0, hint(64)), Pull) == []  # c waits, and is prefilled.
    unit = leader(num_blocks=8)
    unit.handle(0.0, decode("b", 200))
    unit.handle(0.0, decode("c", 300))
    assert list(unit.arrivals.waiting) == [("c", 0)]
    # There is room for d, but it is not its turn.
    assert of(unit.handle(0.0, hint(64, "d", 70)), Pull) == []


def test_one_that_is_prefilled_takes_the_seat_of_the_latest_that_is_not() -> None:
    unit = leader(num_slots=2)
    unit.handle(0.0, hint(64, "a"))
    unit.handle(0.0, hint(64, "b"))
    pulled(unit, "a")
    pulled(unit, "b")
    effects = unit.handle(0.1, decode("c"))
    assert [pull.request_id for pull in of(effects, Pull)] == ["c"]
    assert len(of(effects, Freed)) == 1
    assert sent(effects, Returned) == []
    assert unit.slots.key_to_slot.keys() == {("a", 0), ("c", 0)}
    # The one that went finds what it would have found without a hint.
    assert of(unit.handle(0.2, decode("b", 300)), Pull)[0].lease.num_tokens == 300


def test_a_seat_that_is_being_written_goes_when_the_copy_has_ended() -> None:
    unit = leader(num_slots=1)
    unit.handle(0.0, hint(64, "a"))
    assert of(unit.handle(0.1, decode("b")), Pull) == []
    assert of(unit.handle(0.1, hint(128, "a")), Pull) == []
    assert of(unit.handle(0.1, decode("a", 300)), Pull) == []
    effects = pulled(unit, "a")
    assert [pull.request_id for pull in of(effects, Pull)] == ["b"]
    assert list(unit.arrivals.waiting) == [("a", 0)]
    unit.handle(0.2, Cancel("b", 0))
    (pull,) = of(pulled(unit, "b"), Pull)
    assert (pull.request_id, pull.lease.num_tokens) == ("a", 300)


def test_one_that_comes_back_to_its_old_seat_waits_for_the_copy_into_it() -> None:
    unit = leader(num_slots=2)
    unit.handle(0.0, hint(64, "a"))
    unit.handle(0.0, hint(64, "b"))
    unit.handle(0.0, decode("c"))  # Takes b's, when it can.
    assert of(unit.handle(0.1, Cancel("a", 0)), Pull) == []
    assert of(unit.handle(0.1, decode("b", 300)), Pull) == []
    assert [pull.request_id for pull in of(pulled(unit, "a"), Pull)] == ["c"]
    assert [pull.request_id for pull in of(pulled(unit, "b"), Pull)] == ["b"]


def test_a_running_request_gets_the_blocks_of_a_seat_and_nobody_is_given_back() -> None:
    unit = leader(num_blocks=8)
    unit.handle(0.0, decode("r", 64, max_tokens=200))
    pulled(unit, "r")
    unit.handle(0.1, hint(64, "a", 200))
    pulled(unit, "a")
    assert unit.blocks.num_free == 1
    for step_id in range(130):
        effects = unit.handle(0.2, done(step_id, {0: 5}))
        assert sent(effects, Returned) == []
    assert (unit.num_requests, unit.blocks.num_used, unit.audit()) == (1, 4, [])


def test_a_seat_whose_copy_runs_is_waited_for_rather_than_preempting() -> None:
    unit = leader(num_blocks=9)
    for name in ("r", "s"):
        unit.handle(0.0, decode(name, 64, max_tokens=200))
        pulled(unit, name)
    unit.handle(0.1, hint(64, "a", 180))
    assert unit.blocks.num_free == 1
    steps, plans = 0, 2
    while plans > steps:
        tokens = {0: 5, 1: 5} if steps > 1 else {0: 5}
        effects = unit.handle(0.2, done(steps, tokens))
        assert sent(effects, Returned) == []
        steps, plans = steps + 1, plans + len(decode_plans(effects))
    assert unit.slots.is_starved
    assert decode_plans(pulled(unit, "a"))
    assert unit.slots.key_to_slot.keys() == {("r", 0), ("s", 0)}


def test_decode_waits_for_the_copy_into_a_seat_that_was_given_up_even_if_there_is_room() -> None:
    unit = leader(num_blocks=12)
    unit.handle(0.0, decode("r", 64, max_tokens=600))
    pulled(unit, "r")
    unit.handle(0.1, hint(64, "a", 180))
    steps = 0
    while not unit.slots.is_starved:
        unit.handle(0.2, done(steps, {0: 5}))
        steps += 1
    unit.handle(0.3, decode("a", 180))
    unit.handle(0.4, Cancel("r", 0))
    unit.handle(0.4, done(steps, {0: 5}))
    assert unit.blocks.num_free == 8
    unit.handle(0.5, decode("b", 64))
    assert list(unit.arrivals.waiting) == [("a", 0), ("b", 0)]
    assert [pull.request_id for pull in of(pulled(unit, "a"), Pull)] == ["a", "b"]


def test_no_more_seats_go_than_are_needed() -> None:
    unit = leader(num_blocks=11)
    unit.handle(0.0, decode("r", 64, max_tokens=300))
    pulled(unit, "r")
    for name in ("a", "b"):
        unit.handle(0.1, hint(64, name, 180))
    steps = 0
    while not unit.slots.is_starved:
        unit.handle(0.2, done(steps, {0: 5}))
        steps += 1
    assert unit.table.is_muted.tolist() == [False, False, True]


@pytest.mark.parametrize("is_copying", [False, True])
@pytest.mark.parametrize("event", [Cancel("a", 0), FrontUp("new")])
def test_what_ends_a_request_ends_its_seat(event: Cancel | FrontUp, is_copying: bool) -> None:
    unit = leader()
    unit.handle(0.0, hint(64))
    if not is_copying:
        pulled(unit)
    effects = unit.handle(0.1, event)
    if is_copying:
        assert unit.num_requests == 1
        effects = pulled(unit)
    assert sent(effects, Returned) == sent(effects, Pulled) == of(effects, Pull) == []
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


def test_a_seat_of_which_nothing_is_heard_is_given_up() -> None:
    unit = leader()
    unit.handle(0.0, hint(64))
    pulled(unit)
    unit.handle(4.0, hint(128))
    pulled(unit)
    unit.handle(4.0 + 0.99 * LEASE_S, Tick())
    assert unit.num_requests == 1
    effects = unit.handle(4.0 + LEASE_S, Tick())
    assert (unit.num_requests, unit.blocks.num_used, sent(effects, Returned)) == (0, 0, [])
    assert len(of(unit.handle(10.0, decode(prompt=300)), Pull)[0].into) == 5
    unit.handle(50.0, Tick())
    assert unit.num_requests == 1


def test_the_deadline_wakes_the_unit() -> None:
    unit = leader()
    assert of(unit.handle(3.0, hint(64)), WakeAt) == [WakeAt(3.0 + LEASE_S)]
    unit.handle(3.1, decode(prompt=300))
    assert unit.arrivals.next_deadline_s is None


def test_the_one_that_was_not_heard_of_longest_goes_first() -> None:
    unit = leader()
    unit.handle(0.0, hint(64, "a"))
    unit.handle(1.0, hint(64, "b"))
    pulled(unit, "a")
    pulled(unit, "b")
    unit.handle(2.0, hint(128, "a"))
    unit.handle(1.0 + LEASE_S, Tick())
    assert unit.slots.key_to_slot.keys() == {("a", 0)}


def test_a_lost_rank_takes_its_seats_without_a_word() -> None:
    unit = leader(num_ranks=2)
    unit.handle(0.0, RankReset((), (0, 1), ("p0", "p1"), 1))
    (pull,) = of(unit.handle(0.0, hint(64)), Pull)
    assert pull.rank == 0
    (other,) = of(unit.handle(0.0, hint(64, "b")), Pull)
    assert other.rank == 1
    effects = unit.handle(0.1, RankReset((0,), (), ("", "p1"), 2))
    assert sent(effects, Returned) == []
    assert unit.slots.key_to_slot.keys() == {("b", 0)}
    pulled(unit, "b")
    (rest,) = of(unit.handle(0.2, decode("b", 300)), Pull)
    assert leased(rest) == (2, 3, 4, 5)


def test_a_decode_that_does_not_fit_its_lease_loses_the_seat_too() -> None:
    unit = leader()
    unit.handle(0.0, hint(64))
    pulled(unit)
    good = decode(prompt=300)
    wrong = Decode(good.generation, msgspec.structs.replace(good.lease, num_tokens=299))
    assert len(sent(unit.handle(0.1, wrong), Returned)) == 1
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_hints_lose_no_token_and_leak_nothing(seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    num_ranks = random.choice([2, 3])
    unit = leader(
        random.choice([9, 14, 30]),
        num_ranks,
        num_slots=random.choice([2, 4]),
        num_waiting_max=100,
        lease_s=random.choice([0.05, 30.0]),
        has_disk=True,
        fingerprint=FINGERPRINT,
        drafts=random.choice([0, 2]),
    )
    world = DecodeWorld(random, unit, num_ranks)
    world.reset(set(), set(range(num_ranks)))
    world.live(500, random.choice([2, 4, 7]), 0.02)
    world.end()
    while world.steps or world.pulls or world.stores or unit.num_requests:
        world.event()
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


def test_the_worlds_see_seats_that_go_on_and_seats_that_go() -> None:
    seen: Counter[str] = Counter()
    for seed in range(5):
        random = Random(seed)
        unit = leader(
            14, 2, num_slots=4, num_waiting_max=100, has_disk=True, fingerprint=FINGERPRINT
        )
        world = DecodeWorld(random, unit, 2)
        world.reset(set(), {0, 1})
        for _ in range(800):
            before = {
                unit.table.occupant(slot).key: int(unit.table.num_pulled[slot])
                for slot in unit.table.slots_in(SlotState.EARLY).tolist()
            }
            world.live(1, 5, 0.01)
            for key, num_pulled in before.items():
                slot = unit.slots.key_to_slot.get(key)
                seen["let go"] += slot is None
                seen["went on with a part"] += (
                    slot is not None
                    and unit.table.state[slot] == SlotState.PULLING
                    and num_pulled > 0
                )
    assert seen["let go"] > 10
    assert seen["went on with a part"] > 10
