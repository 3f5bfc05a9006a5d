"""Test by hand rows that rest (a step leaves them out): which rows take turns, and that they continue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from hadal.core.messages.pools import Freed, Pull
from hadal.core.messages.units import Cancel, Decode, Tokens
from hadal.core.plans import DecodePlan, KvPulled, StepDone
from hadal.core.seams import Effect, Execute, RankReset
from hadal.policy.rows import BATCH_STEPS
from hadal.roles.decode.leader import DecodeLeader
from tests.columns import key_of, rows_of
from tests.unit.roles.driving import decode, decode_leader, decode_plans, of, sent

LINE = (0.001, 0.001)
"""Step time as (constant, per row): one row takes 2 ms, four take 5 ms. With the promise of at most
2x a row's time alone, a step holds three rows.
"""


def of_tenant(name: str, tenant: str, service: float = 0.0, **options: Any) -> Decode:
    message = decode(name, **options)
    generation = replace(message.generation, tenant=tenant)
    return replace(message, generation=generation, service=service)


class FixedLine:
    """Stand-in for the meter of step times: its line is fixed, as it ignores measurements."""

    line = LINE

    def add(self, num: int, seconds: float) -> None:
        pass


def leader_with(num_ranks: int = 1, **options: Any) -> DecodeLeader:
    leader = decode_leader(40, num_ranks, **{"num_slots": 8, "num_waiting_max": 99} | options)
    leader._passes._line = FixedLine()  # type: ignore[assignment]
    return leader


class Unit:
    """Leader with a fixed step-time line, and the answers of its Runner."""

    def __init__(self, requests: Iterable[tuple[str, str]], **options: Any) -> None:
        self.leader = leader_with(**options)
        self.plans: deque[DecodePlan] = deque()
        self.slots: set[int] = set()
        """Slots in the Runner's table after the plans that are done."""
        self.drawn: Counter[str] = Counter()
        self.checked: Counter[int] = Counter()
        """Slot -> number of its drafts that are not checked yet."""
        self.feed(*(of_tenant(name, tenant, max_tokens=300) for name, tenant in requests))
        self.feed(*(KvPulled(name, 0, None) for name, _ in requests))

    def feed(self, *events: Any) -> list[Effect]:
        effects = self.leader.handle(0.0, *events)
        self.plans += decode_plans(effects)
        for message in sent(effects, Tokens):
            self.drawn.update(key_of(row[0])[0] for row in rows_of(message))
        assert self.leader.audit() == []
        return effects

    def step(self, num_right: int = 0) -> DecodePlan:
        """Complete the oldest plan, with at most `num_right` accepted drafts per slot."""
        plan = self.plans.popleft()
        self.slots -= set(plan.leaves)
        self.slots |= {join.slot for join in plan.joins}
        self.checked.update(dict.fromkeys((join.slot for join in plan.joins), 0))
        keys = []
        for slot in sorted(self.slots - set(plan.resting)):
            keys += [slot] * (plan.num_passes + min(num_right, self.checked[slot]))
            self.checked[slot] = plan.num_drafts
        self.feed(StepDone(plan.step_id, tuple(keys), (7,) * len(keys), {}, 0.01))
        return plan


def test_rows_of_the_tenant_with_more_take_turns() -> None:
    unit = Unit([("a", "x"), ("b", "y"), ("c", "y"), ("d", "y")])
    rests = [unit.step().resting for _ in range(6)]
    assert rests == [(3,), (2,), (1,), (3,), (2,), (1,)]
    assert unit.drawn == {"a": 6, "b": 4, "c": 4, "d": 4}
    unit.feed(Cancel("a", 0))
    assert [unit.step().resting for _ in range(4)][-1] == (), "alone it has all of the step"


def test_all_rows_are_computed_of_a_tenant_alone_and_by_a_large_promise() -> None:
    unit = Unit([(name, "x") for name in "abcd"])
    assert [unit.step().resting for _ in range(3)] == [()] * 3
    unit = Unit([("a", "x"), ("b", "y"), ("c", "y"), ("d", "y")], promise=1000.0)
    assert [unit.step().resting for _ in range(3)] == [()] * 3


def test_a_batch_rests_from_the_next_plan_on_when_another_comes() -> None:
    unit = Unit([(name, "x/batch") for name in "abcd"])
    assert unit.step().resting == ()
    unit.feed(of_tenant("e", "x", max_tokens=300))
    unit.feed(KvPulled("e", 0, None))
    plans = [unit.step() for _ in range(2 * BATCH_STEPS)]
    first = next(plan.step_id for plan in plans if plan.joins)
    resting = {plan.step_id: plan.resting for plan in plans if plan.step_id >= first}
    assert {step: len(slots) for step, slots in resting.items()} == {
        step: 3 if step % BATCH_STEPS == 0 else 4 for step in resting
    }
    assert unit.drawn["e"] == len(resting)


def test_drafts_of_a_row_that_rests_are_checked_when_it_is_computed() -> None:
    unit = Unit([("a", "x"), ("b", "y"), ("c", "y"), ("d", "y")], drafts=2)
    for _ in range(12):  # The leader raises if a slot draws more than its plan may.
        unit.step(num_right=2)
    # The first plan of a row has no draft to check; each later plan yields three tokens.
    assert unit.drawn["a"] == 1 + 3 * 11
    assert {unit.drawn[name] for name in "bcd"} == {1 + 3 * 7}, "computed in two plans of three"


def test_what_rests_is_not_counted_and_goes_on_behind_its_last_token_when_the_unit_forms() -> None:
    unit = Unit([("a", "x"), ("b", "y"), ("c", "y"), ("d", "y")])
    for _ in range(4):
        unit.step()
    unit.plans.clear()
    unit.feed(RankReset((), (), ("p",), 1))
    joins = {join.slot: join for join in unit.plans[0].joins}
    # Prefill drew the first token of each request.
    assert [joins[slot].output_index for slot in range(4)] == [
        1 + unit.drawn[name] for name in "abcd"
    ]


def test_a_row_that_rests_keeps_its_blocks_until_the_plans_in_flight_are_done() -> None:
    unit = Unit([("a", "x"), ("b", "y"), ("c", "y"), ("d", "y")])
    resting = unit.plans[0].resting[0]
    name = "abcd"[resting]
    assert of(unit.feed(Cancel(name, 0)), Freed) == []
    unit.step()
    assert of(unit.feed(), Freed) == []
    plan = unit.plans[0]
    slots = sorted({0, 1, 2, 3} - set(plan.resting))
    done = StepDone(plan.step_id, tuple(slots), (7,) * len(slots), {}, 0.01)
    assert len(of(unit.feed(done), Freed)) == 1


def test_of_those_that_are_prefilled_the_tenant_served_least_is_first_and_batches_last() -> None:
    leader = decode_leader(40, num_slots=1)
    leader.handle(0.0, of_tenant("a", "x"))
    waiting = (("b", "y/batch", 0.0), ("c", "x", 90.0), ("d", "z", 10.0), ("e", "x", 91.0))
    for name, tenant, service in waiting:
        assert of(leader.handle(0.0, of_tenant(name, tenant, service)), Pull) == []
    order = []
    for _ in waiting:
        (key,) = leader.slots.key_to_slot
        leader.handle(0.1, KvPulled(key[0], 0, "gone"))
        order.append(next(iter(leader.slots.key_to_slot))[0])
    assert order == ["d", "c", "e", "b"]


def test_a_tenant_was_served_what_its_latest_message_says() -> None:
    """The request with the higher service was sent later, so its value is the tenant's current service."""
    leader = decode_leader(40, num_slots=1)
    leader.handle(0.0, of_tenant("a", "x"))
    for name, tenant, service in (("b", "x", 5.0), ("c", "x", 91.0), ("d", "z", 10.0)):
        leader.handle(0.0, of_tenant(name, tenant, service))
    leader.handle(0.1, KvPulled("a", 0, "gone"))
    assert [name for name, _ in leader.slots.key_to_slot] == ["d"]


def test_tenants_that_were_served_alike_take_turns() -> None:
    leader = decode_leader(40, num_slots=4)
    messages = [
        of_tenant(f"{tenant}{number}", tenant, 50.0) for tenant in "xy" for number in range(3)
    ]
    leader.handle(0.0, *messages)
    assert sorted(name for name, _ in leader.slots.key_to_slot) == ["x0", "x1", "y0", "y1"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_holds_no_more_rows_than_the_step_may(num_ranks: int) -> None:
    """A step takes as long as its busiest rank."""
    leader = leader_with(num_ranks)
    leader.handle(0.0, RankReset((), tuple(range(num_ranks)), tuple("pqr"[:num_ranks]), 1))
    names = ["a", *(f"y{number}" for number in range(6 * num_ranks))]
    for name in names:
        leader.handle(0.0, of_tenant(name, "x" if name == "a" else "y", max_tokens=50))
    effects = leader.handle(0.0, *(KvPulled(name, 0, None) for name in names))
    for plan in of(effects, Execute)[0].plans:
        assert isinstance(plan, DecodePlan)
        assert len(plan.joins) - len(plan.resting) == 3
