"""Test by hand a request that moves between two ranks: after every event one of them has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hadal.core.messages.pools import Freed
from hadal.core.messages.units import Cancel, FrontUp, Pulled, UnitReport
from hadal.core.plans import NO_LINK_BYTES, KvPulled, LinkBytes, StepDone
from hadal.policy.decode_moves import Move, MoveTerms
from hadal.roles.decode.moving import LOOK_STEPS, STALL_STEPS_MAX
from hadal.roles.decode.table import SlotState
from tests.unit.roles.driving import decode, of, sent
from tests.unit.roles.moving_unit import PER_RANK, Unit

TERMS = MoveTerms()
MOMENTS = ["reserved", "left", "filling"]
"""Moments of a move: the plan that publishes KV is made; the next plan omits the request; the copy runs."""


def moving(moment: str = "filling") -> tuple[Unit, str, int, int]:
    """Return a unit at this moment of a move: (unit, name, source, target)."""
    unit = Unit()
    return unit, *unit.move(moment)


def test_a_request_moves_and_goes_on_where_it_came() -> None:
    unit, name, source, target = moving()
    (pull,) = unit.pulls
    num_tokens = int(unit.leader.table.length[source])
    blocks, allocator = unit.leader.table.blocks_of(source), unit.leader.blocks[0]
    found = (pull.request_id, pull.rank, pull.lease.source, pull.lease.num_tokens)
    assert found == (name, 1, "p0", num_tokens)
    assert pull.lease.block_ids == blocks[: len(pull.into)]
    assert pull.lease.versions == allocator.versions(pull.lease.block_ids)
    assert pull.into == unit.leader.table.blocks_of(target)[: len(pull.lease.block_ids)]
    assert source % PER_RANK in unit.plans[0][0].leaves
    effects = unit.feed(KvPulled(name, 0, None))
    (freed,) = of(effects, Freed)
    assert (freed.rank, freed.block_ids) == (0, blocks)
    assert sent(effects, Pulled) == []  # Prefill's copy was already released.
    effects = unit.step()
    ((rank, join),) = unit.joins()
    last_index, last_token = unit.tokens[name][-1]
    found = (rank, join.slot, join.num_tokens, join.is_pulled)
    assert found == (1, target % PER_RANK, num_tokens, True)
    assert (join.last_token, join.output_index) == (last_token, last_index + 1)
    assert unit.leader.slots.moving.stalls == {2: 1}
    found = sent(
        unit.leader.handle(1.0, FrontUp("f")) + unit.leader.handle(9.0, Cancel("", 0)), UnitReport
    )[-1].num_requests_moved
    assert found == 1


def test_its_tokens_have_no_gap() -> None:
    unit, name, _, target = moving()
    unit.feed(KvPulled(name, 0, None))
    assert unit.slot(name) == target
    unit.finish(name)


def test_nobody_goes_back_and_forth() -> None:
    unit, name, _, _ = moving()
    unit.feed(KvPulled(name, 0, None))
    for _ in range(150):
        unit.step()
        for pull in unit.pulls[1:]:
            unit.feed(KvPulled(pull.request_id, 0, None))
    assert unit.leader.slots.moving.num_moved == 1


@pytest.mark.promise(
    "The request keeps its blocks at the source until it has arrived, so a failed "
    "copy costs only the steps that it rested: three at most."
)
def test_a_copy_that_fails_lets_it_go_on_at_its_source() -> None:
    unit, name, source, target = moving()
    unit.feed(KvPulled(name, 0, "void"))
    found = (unit.slot(name), unit.state(source), unit.state(target))
    assert found == (source, SlotState.READY, SlotState.FREE)
    unit.step()
    ((rank, join),) = unit.joins()
    assert (rank, join.slot, join.is_pulled) == (0, source % PER_RANK, False)
    unit.finish(name)
    assert unit.returned == []


@pytest.mark.promise(
    "The request keeps its blocks at the source until it has arrived, so a failed "
    "copy costs only the steps that it rested: three at most."
)
def test_a_copy_that_takes_long_is_called_off_in_time() -> None:
    unit, name, source, target = moving()
    unit.step()
    unit.step()
    assert (unit.state(source), unit.state(target)) == (SlotState.ACTIVE, SlotState.FILLING)
    assert unit.leader.slots.moving.stalls == {STALL_STEPS_MAX: 1}
    assert [rank for rank, _ in unit.joins()] == [0]
    unit.step()
    unit.feed(KvPulled(name, 0, None))  # The copy's result is no longer needed.
    assert (unit.slot(name), unit.state(target)) == (source, SlotState.FREE)
    unit.finish(name)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("event", ["cancel", "new front"])
def test_a_request_that_is_not_wanted_any_more_holds_nothing(moment: str, event: str) -> None:
    unit, name, _, target = moving(moment)
    unit.feed(Cancel(name, 0) if event == "cancel" else FrontUp("another"))
    assert unit.state(target) == (SlotState.FILLING if moment == "filling" else SlotState.FREE)
    if moment == "filling":
        count = len(unit.pulls)
        unit.feed(decode(name, 640, max_tokens=400))  # The message repeated: its copy still runs.
        assert len(unit.pulls) == count
    unit.end_copy(name, moment)
    unit.empty()
    assert unit.returned == []


@pytest.mark.parametrize("moment", ["reserved", "left"])
@pytest.mark.parametrize("step", ["last but one", "last"])
def test_a_stop_id_ends_it_at_its_source(moment: str, step: str) -> None:
    unit, name, source, target = moving(moment)
    if moment == "reserved" and step == "last":
        unit.step()
    unit.step({source: 9})
    assert unit.tokens[name][-1][1] == 9
    assert unit.state(target) == SlotState.FREE
    unit.step()
    unit.step()
    assert unit.pulls == []
    assert (name, 0) not in unit.leader.slots.key_to_slot
    unit.empty()


def test_a_void_token_of_its_last_step_gives_it_back() -> None:
    unit, name, source, target = moving("left")
    unit.step(failed={source: "not finite"})
    assert (unit.returned, unit.pulls, unit.state(target)) == ([name], [], SlotState.FREE)
    unit.empty()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_failed_step_takes_only_what_it_computed(moment: str) -> None:
    unit, name, _, _ = moving(moment)
    unit.step(error="broken")
    assert (name in unit.returned) == (moment != "filling")
    assert len(unit.returned) == (1 if moment == "filling" else 2)
    unit.reset()
    unit.end_copy(name, moment)
    if moment == "filling":
        unit.finish(name)
    unit.empty()


@pytest.mark.parametrize("error", [None, "the pool is gone"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_its_source_is_lost(moment: str, error: str | None) -> None:
    unit, name, _, target = moving(moment)
    unit.reset((0,))
    assert sorted(unit.returned) == ["a", "c"]
    assert unit.state(target) == (SlotState.FILLING if moment == "filling" else SlotState.FREE)
    unit.end_copy(name, moment, error)
    assert (unit.leader.num_requests, unit.leader.blocks.num_used) == (0, 0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_its_target_is_lost(moment: str) -> None:
    unit, name, source, _ = moving(moment)
    unit.reset((1,))
    assert unit.returned == []
    assert unit.state(source) == SlotState.ACTIVE
    unit.finish(name)


@pytest.mark.parametrize("moment", MOMENTS)
def test_both_are_lost(moment: str) -> None:
    unit = Unit()
    unit.move(moment)
    unit.reset((0, 1))
    assert sorted(unit.returned) == ["a", "c"]
    assert (unit.leader.num_requests, unit.leader.blocks.num_used) == (0, 0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_unit_forms_anew(moment: str) -> None:
    """The request stays on its source rank, at any moment of its move, and continues from its last
    delivered token. It joins in one of the two plans that are sent together after the reset.
    """
    unit, name, source, _ = moving(moment)
    unit.reset()
    assert (unit.slot(name), unit.state(source)) == (source, SlotState.ACTIVE)
    index, _ = unit.tokens[name][-1]
    num_plans = sum(any(join.slot == source for join in plans[0].joins) for plans in unit.plans)
    assert num_plans == 1
    num_plans = len(unit.plans) if moment != "filling" else 1
    assert int(unit.leader.table.length[source]) - num_plans == 640 + index
    unit.end_copy(name, moment)
    unit.finish(name)
    assert unit.returned == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_its_target_runs_short_of_blocks(moment: str) -> None:
    unit, name, source, target = moving(moment)
    unit.leader.slots.moving.call_off_into([1])
    assert unit.leader.audit() == []
    assert unit.state(target) == (SlotState.FILLING if moment == "filling" else SlotState.FREE)
    unit.step()
    unit.end_copy(name, moment)
    assert unit.slot(name) == source
    unit.finish(name)
    assert unit.returned == []


def test_a_copy_is_not_waited_for_when_nothing_else_runs() -> None:
    """A move of the only request delays at most one step: the request joins the plan after its copy."""
    unit, name, _, _ = moving("left")
    unit.feed(Cancel("a" if name == "c" else "c", 0))
    while unit.plans:
        unit.step()
    unit.feed(KvPulled(name, 0, None))
    assert [rank for rank, _ in unit.joins()] == [1]
    assert max(unit.leader.slots.moving.stalls) <= 1
    unit.finish(name)


def needing_block(unit: Unit, *names: str) -> list[int]:
    """Pretend that these requests filled their blocks, and that their rank has no free block."""
    slots = [unit.slot(name) for name in names]
    for slot in slots:
        unit.leader.table.length[slot] = unit.leader.table.room[slot]
    pool = unit.leader.blocks[slots[0] // PER_RANK]
    assert pool.allocate(pool.num_free, "somebody") is not None
    return slots


@pytest.mark.parametrize("moment", ["left", "filling"])
def test_nobody_is_preempted_for_room_that_a_move_takes(moment: str) -> None:
    unit = Unit()
    for name in "ef":
        unit.feed(decode(name, 10, max_tokens=400))
        unit.feed(KvPulled(name, 0, None))
    _, source, target = unit.move(moment)
    slots = needing_block(unit, "e", "f")
    assert {slot // PER_RANK for slot in slots} == {1}
    grown = unit.leader.slots.grow(unit.leader._in_flight.done_id)
    if moment == "left":
        assert unit.state(target) == SlotState.FREE
        assert grown is not None
        assert [slot for slot, _, _ in grown] == slots
    else:  # The copy must end before a block is free.
        found = (grown, unit.leader.slots.is_starved, unit.state(source))
        assert found == (None, True, SlotState.READY)
    assert not unit.leader.table.is_preempted.any()


def test_nobody_is_preempted_for_room_that_a_move_is_about_to_leave() -> None:
    unit, name, source, _ = moving()
    needing_block(unit, "a" if name == "c" else "c")
    assert unit.leader.slots.grow(unit.leader._in_flight.done_id) is None
    assert not unit.leader.table.is_preempted.any()
    assert unit.state(source) == SlotState.MOVING


def test_who_moved_stays_for_a_while_and_has_one_copy_at_a_time() -> None:
    unit, name, source, _ = moving()
    moves, now = unit.leader.slots.moving, unit.leader._in_flight.next_id
    at_once = replace(TERMS, gain_steps=0.0)
    while unit.state(source) == SlotState.MOVING:  # Until the move is called off; its copy runs on.
        unit.step()
    assert moves.movable([0, 1], 10_000, at_once).num_blocks_RS[0, source] == 0
    unit.feed(KvPulled(name, 0, None))
    assert moves.movable([0, 1], now, TERMS).num_blocks_RS[0, source] == 0
    assert moves.movable([0, 1], now + int(TERMS.gain_steps), TERMS).num_blocks_RS[0, source] > 0
    assert moves.movable([1, 0], 10_000, TERMS).num_blocks_RS[1, source] > 0
    unit.leader.table.output_index[source] = 400 - TERMS.num_tokens_left_min + 1
    assert moves.movable([0, 1], 10_000, at_once).num_blocks_RS[0, source] == 0


@pytest.mark.parametrize("prompt", range(628, 639))
def test_the_room_taken_holds_the_next_position_too(prompt: int) -> None:
    unit = Unit(prompt)
    table, source = unit.leader.table, unit.slot("a")
    unit.leader.slots.moving.reserve([Move(0, source, 1)], unit.leader._in_flight.next_id)
    length = int(table.length[source]) + 1  # The next plan writes one more.
    num_blocks = len(table.block_ids[unit.leader.slots.moving.arriving["a", 0]])
    assert length < 64 * num_blocks <= length + 64


def test_moves_that_fail_are_tried_less_and_less() -> None:
    unit = Unit()
    num_failed = 0
    for _ in range(300):
        unit.step()
        while unit.pulls:
            num_failed += 1
            unit.feed(KvPulled(unit.pulls.pop().request_id, 0, "void"))
    assert 2 <= num_failed <= 8
    assert unit.leader.slots._looks._num_steps >= 4 * LOOK_STEPS


@pytest.mark.parametrize("balance", ["no_moves", "off"])
def test_nobody_moves_where_it_is_not_wanted(balance: str) -> None:
    unit = Unit(request_balance=balance)
    for _ in range(40):
        unit.step()
        assert not any(plan.publishes for plans in unit.plans for plan in plans)
    assert unit.leader.slots.moving.num_moved == 0


def test_the_ledger_sees_a_half_that_is_missing() -> None:
    unit, name, source, target = moving()
    moves = unit.leader.slots.moving
    trip = moves._trips[source]
    for broken in (
        replace(trip, target=None),
        replace(trip, target=source),
        replace(trip, key=("x", 0)),
    ):
        moves._trips[source] = broken
        assert (broken.target is None) == (unit.leader.audit() == [])
    moves._trips[source] = trip
    del moves.arriving[name, 0]
    assert unit.leader.audit()
    moves.arriving[name, 0] = target
    del moves._trips[source]
    assert unit.leader.audit()


def test_what_travelled_is_reported() -> None:
    """A unit's report counts the bytes of its steps, of KV transfers and of moves."""

    def reported(now_s: float) -> LinkBytes:
        return sent(unit.leader.handle(now_s, Cancel("", 0)), UnitReport)[-1].link_bytes

    unit, name, _, _ = moving()
    assert reported(1.0) == NO_LINK_BYTES
    unit.feed(KvPulled(name, 0, None, LinkBytes(kv=(700, 0))))
    unit.feed(decode("e", 640, max_tokens=400))
    unit.feed(KvPulled("e", 0, None, LinkBytes(kv=(0, 50))))
    assert reported(2.0) == LinkBytes(kv=(700, 50))
    step_id = unit.plans[0][0].step_id
    unit.feed(StepDone(step_id, (), (), {}, 0.01, "broke", link_bytes=LinkBytes((1, 2), (3, 4))))
    assert reported(3.0) == LinkBytes((1, 2), (3, 4), (700, 50))
