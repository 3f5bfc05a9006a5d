"""Test a decode unit of several ranks: balance, and random worlds in which ranks fail and return."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from hadal.core.messages.pools import Pull
from hadal.core.messages.questions import Trace, TraceRequest
from hadal.core.messages.units import FrontUp, Returned, UnitReport, UnitUp
from hadal.core.plans import DecodePlan, KvPulled
from hadal.core.seams import Execute, RankReset, Send
from hadal.policy.decode_moves import MoveTerms
from hadal.roles.decode.leader import DecodeLeader
from tests.fresh import seeds
from tests.unit.roles.decode_worlds import FINGERPRINT, DecodeWorld
from tests.unit.roles.driving import decode, decode_leader, done, of, sent

SEEDS = seeds(1, 2, 4)
POOLS = ("p0", "p1")


def leader(num_ranks: int = 2, **options: Any) -> DecodeLeader:
    return decode_leader(num_ranks=num_ranks, **{"num_waiting_max": 100} | options)


def up(unit: DecodeLeader) -> DecodeLeader:
    unit.start(0.0)
    unit.handle(0.0, RankReset((), (0, 1), POOLS, 1))
    return unit


def occupant(unit: DecodeLeader, name: str, **options: Any) -> int:
    """Return the rank that got the request."""
    (pull,) = of(unit.handle(0.0, decode(name, **options)), Pull)
    unit.handle(0.0, KvPulled(name, 0, None))
    return pull.rank


EAGER = MoveTerms(stall_steps=0.01, gain_steps=12.0, num_tokens_left_min=3)
"""Terms under which nearly every move pays."""


@pytest.mark.parametrize("terms", [None, EAGER])
@pytest.mark.parametrize("overlap", ["auto", "decode_five"])
@pytest.mark.parametrize("drafts", [0, 1, 3, "auto"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_comes_once_whatever_the_ranks_do(
    seed: int, drafts: int | str, overlap: str, terms: MoveTerms | None
) -> None:
    print("seed", seed)
    random = Random(seed)
    num_ranks = random.choice([2, 3, 4])
    unit = leader(
        num_ranks,
        num_slots=random.choice([2, 4]),
        num_blocks=random.choice([7, 12, 30]),
        overlap=overlap,
        min_split_tokens=2,
        num_layers=4,
        num_moe_layers=3,
        terms=terms,
        has_disk=random.choice([True, False]),
        fingerprint=FINGERPRINT,
        drafts=drafts,
    )
    world = DecodeWorld(random, unit, num_ranks)
    assert sent(unit.start(0.0), UnitUp) == []
    for number in range(16):
        world.submit(f"r{number}")  # Before any rank is up.
    world.reset(set(), set(range(num_ranks)))
    world.live(400, 16, 0.03)
    world.end()
    while world.steps or world.pulls or world.stores or unit.num_requests:
        world.event()
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


@pytest.mark.slow("worlds of every fixed seed")
def test_the_worlds_see_losses_preemption_and_both_ways_to_run() -> None:
    reasons: set[str] = set()
    schedules: set[tuple[str, int]] = set()
    for seed in range(4):
        random = Random(seed)
        world = DecodeWorld(
            random, leader(3, num_blocks=6, overlap="decode_five", min_split_tokens=4), 3
        )
        world.reset(set(), {0, 1, 2})
        world.live(500, 16, 0.03)
        reasons |= {reason.split(":")[0] for reason in world.reasons}
        schedules |= world.schedules
    assert {"rank lost", "preempted", "pull failed", "queue full"} <= reasons
    assert schedules == {("sequential", 1), ("decode_five", 2)}


def test_a_unit_says_that_it_is_up_once_a_rank_lives() -> None:
    unit = leader()
    assert sent(unit.start(0.0), UnitUp) == sent(unit.handle(0.0, FrontUp("f")), UnitReport) == []
    effects = unit.handle(0.0, RankReset((), (1,), ("", "p1"), 3))
    up = UnitUp("decode-0", "decode", "e1", 16, 4, 16)
    said = [e for e in of(effects, Send) if isinstance(e.message, UnitUp)]
    assert said == [Send("front", up), Send("supervisor", up)]
    (load,) = sent(effects, UnitReport)
    found = (load.num_ranks, load.formation, load.num_blocks, load.num_blocks_request)
    assert found == (1, 3, 16, 16)
    (load,) = sent(unit.handle(0.1, RankReset((), (0,), POOLS, 4)), UnitReport)
    found = (load.num_ranks, load.num_blocks, load.num_requests_max, load.num_blocks_request)
    assert found == (2, 32, 8, 16)
    (load,) = sent(unit.handle(0.2, RankReset((0, 1), (), ("", ""), 5)), UnitReport)
    found = (load.num_ranks, load.num_blocks, load.num_requests_max, load.num_blocks_request)
    assert found == (0, 0, 0, 0)


def test_requests_go_where_less_kv_is_used_and_plans_have_the_ranks_own_slots() -> None:
    unit = up(leader())
    assert [occupant(unit, "a", prompt=200), occupant(unit, "b"), occupant(unit, "c")] == [0, 1, 1]
    effects = unit.handle(0.1, done(0, {0: 5}))
    (execute,) = of(effects, Execute)
    first, second = execute.plans
    assert isinstance(first, DecodePlan)
    assert isinstance(second, DecodePlan)
    assert ([j.slot for j in first.joins], [j.slot for j in second.joins]) == ([], [0, 1])
    unit.handle(0.2, done(1, {0: 5}))
    unit.handle(0.3, done(2, {5: 5, 4: 5, 0: 5}))
    assert unit.audit() == []


@pytest.mark.promise(
    "The survivors load again the experts that have no replica left. Requests on the "
    "survivors keep their KV and are rolled back to the last delivered token."
)
def test_a_lost_rank_gives_back_and_a_survivor_joins_again_at_its_last_token() -> None:
    unit = up(leader())
    found = [occupant(unit, "a", prompt=20, max_tokens=4), occupant(unit, "b", max_tokens=9)]
    assert found == [0, 1]
    unit.handle(0.1, done(0, {0: 5}))
    effects = unit.handle(0.2, RankReset((1,), (), ("p0", ""), 2))
    assert sent(effects, Returned) == [Returned("decode-0", "b", 0, "rank lost")]
    plan = of(effects, Execute)[0].plans[0]
    assert isinstance(plan, DecodePlan)
    (join,) = plan.joins
    assert (join.last_token, join.output_index, join.num_tokens) == (5, 2, 21)
    assert unit.audit() == []


def test_a_trace_is_of_the_next_steps_that_are_done() -> None:
    unit = up(leader())
    occupant(unit, "a", max_tokens=50)
    unit.handle(0.0, TraceRequest(9, 2, 10.0))
    (third,) = of(unit.handle(0.1, done(0, {0: 1})), Execute)
    assert third.plans[0].is_traced  # type: ignore[union-attr]
    # Steps 1 and 2 are void. Steps 3 and 4 are traced instead.
    unit.handle(0.2, RankReset((), (), POOLS, 2))
    assert sent(unit.handle(0.3, done(3, {0: 1})), Trace) == []
    (trace,) = sent(unit.handle(0.4, done(4, {0: 1})), Trace)
    assert [(step.step_id, step.num_tokens) for step in trace.steps] == [(3, 1), (4, 1)]


def test_balance_is_told_smoothed_and_by_step() -> None:
    unit = up(leader())
    assert [
        occupant(unit, "a", prompt=200, max_tokens=50),
        occupant(unit, "b", prompt=66, max_tokens=50),
    ] == [0, 1]
    unit.handle(0.0, TraceRequest(9, 1, 10.0))
    unit.handle(0.1, done(0, {0: 1}))
    unit.handle(0.2, done(1, {0: 1}))
    (trace,) = sent(unit.handle(0.3, done(2, {0: 1, 4: 1})), Trace)
    (step,) = trace.steps
    # The plan is the third: it writes position 202 of one request, and 66 of the other.
    assert step.balance == {"kv": pytest.approx((203 + 67) / 2 / 203), "requests": 1.0}
    (load,) = sent(unit.handle(9.0, FrontUp("f")), UnitReport)[-1:]
    assert 0.5 < load.balance["requests"] < 1.0
    assert 0.5 < load.balance["kv"] < 1.0


def test_in_turn_requests_go_to_the_next_rank_whatever_left() -> None:
    unit = up(leader(request_balance="turns"))
    assert [
        occupant(unit, name, prompt=length)
        for name, length in zip("abc", (200, 10, 10), strict=True)
    ] == [0, 1, 0]


def test_by_counts_alone_requests_take_turns() -> None:
    unit = up(leader(request_balance="off"))
    found = [
        occupant(unit, name, prompt=length)
        for name, length in zip("abcd", (200, 10, 10, 10), strict=True)
    ]
    assert found == [0, 1, 0, 1]
