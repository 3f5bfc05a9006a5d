"""Test a prefill unit of several ranks: balance, cut prompts, and random worlds with resets."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from hadal.core.balance import ATTENTION, TIME, TOKENS
from hadal.core.messages.pools import Freed
from hadal.core.messages.questions import Trace, TraceRequest
from hadal.core.messages.units import Prefill, PrefillDone, Release, Returned, UnitReport, UnitUp
from hadal.core.plans import OpTime, PrefillPlan
from hadal.core.rates import StepRates
from hadal.core.seams import Execute, RankReset, Tick
from hadal.kv.blocks import blocks_for
from hadal.policy.batching import AGE_S
from hadal.policy.cached_prefix import Prefix
from hadal.roles.prefill.leader import PrefillLeader
from hadal.roles.prefill.prompts import PackRules, PrefillAttempt, PromptChunk, cut, pack
from hadal.roles.ranks.pools import RankPools
from tests.fresh import seeds
from tests.unit.roles.driving import done, generation, of, prefill, prefill_leader, sent
from tests.unit.roles.rank_worlds import PrefillWorld

SEEDS = seeds(1, 2, 4)
POOLS = ("p0", "p1")


def leader(num_ranks: int = 2, **options: Any) -> PrefillLeader:
    return prefill_leader(num_ranks=num_ranks, **{"num_waiting_max": 100} | options)


def up(unit: PrefillLeader) -> PrefillLeader:
    unit.start(0.0)
    unit.handle(0.0, RankReset((), (0, 1), POOLS, 1))
    return unit


def plans_of(effects: Any) -> list[tuple[PrefillPlan, ...]]:
    return [effect.plans for effect in of(effects, Execute)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overlap", "balance"),
    [("auto", "auto"), ("prefill_dual", "auto"), ("auto", "off"), ("auto", "turns")],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_prompt_is_prefilled_once_whatever_the_ranks_do(
    seed: int, overlap: str, balance: str
) -> None:
    print("seed", seed)
    random = Random(seed)
    num_ranks = random.choice([2, 3, 4])
    unit = leader(
        num_ranks,
        chunk_tokens=96,
        num_blocks=random.choice([5, 9]),
        overlap=overlap,
        min_split_tokens=2,
        num_layers=4,
        num_moe_layers=3,
        request_balance=balance,
    )
    world = PrefillWorld(random, unit, num_ranks)
    assert sent(unit.start(0.0), UnitUp) == []
    for number in range(10):
        world.submit(f"r{number}")
    world.reset(set(), set(range(num_ranks)))
    world.live(250, 10, 0.05)
    world.end()
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)
    assert overlap == "auto" or ("prefill_dual", 2) in world.schedules


def test_by_token_budgets_prompts_start_where_there_is_less_to_do() -> None:
    unit = up(leader(request_balance="off"))
    ((first, second),) = plans_of(unit.handle(0.0, prefill("fill", 10)))
    assert (len(first.chunks), second.chunks, first.step_id, second.step_id) == (1, (), 0, 0)
    ((first, second),) = plans_of(unit.handle(0.0, prefill("a", 60)))
    for name, prompt in (("b", 150), ("c", 20), ("d", 30)):
        unit.handle(0.0, prefill(name, prompt))
    ((first, second),) = plans_of(unit.handle(0.1, done(0, {0: 3})))
    assert [(c.request_id, len(c.tokens)) for c in first.chunks] == [("b", 64)]
    assert [(c.request_id, len(c.tokens)) for c in second.chunks] == [("c", 20), ("d", 30)]
    unit.handle(0.2, done(1, {0: 3}))
    effects = unit.handle(0.3, done(2, {1: 5, 2: 6}))  # b's chunk is key 0.
    answers = [(m.token.request_id, m.lease and m.lease.source) for m in sent(effects, PrefillDone)]
    assert answers == [("c", "p1"), ("d", "p1")]
    assert unit.audit() == []


def test_in_turn_a_prompt_is_its_ranks_however_much_that_has_to_do() -> None:
    unit = up(leader(request_balance="turns"))
    assert len(plans_of(unit.handle(0.0, prefill("a", 300)))) == 2
    for name in "bcd":
        unit.handle(0.0, prefill(name, 10))
    ((first, second),) = plans_of(unit.handle(0.1, done(0, {})))
    assert [chunk.request_id for chunk in first.chunks] == ["a"], "c has to wait behind a"
    assert [chunk.request_id for chunk in second.chunks] == ["b", "d"]


def test_a_lost_rank_gives_back_its_prompts_and_leases_and_survivors_plan_again() -> None:
    unit = up(leader(request_balance="off"))
    unit.handle(0.0, prefill("a", 30))
    unit.handle(0.0, prefill("b", 150))  # "b" runs on rank 1.
    unit.handle(0.0, prefill("c", 200))
    unit.handle(0.1, done(0, {0: 3}))  # A lease on rank 0 now; c starts there.
    effects = unit.handle(0.2, RankReset((0,), (), ("", "p1"), 2))
    found = [(m.request_id, m.reason) for m in sent(effects, Returned)]
    assert found == [("c", "rank lost"), ("a", "rank lost")]
    again = [plan.chunks[0].start for _, plan in plans_of(effects)]
    assert again == [0, 64]
    assert of(effects, Freed) == []
    assert unit.audit() == []


def test_a_unit_without_ranks_gives_back_what_waits() -> None:
    unit = up(leader())
    for name in "abcdefghij":
        unit.handle(0.0, prefill(name, 200))
    held = unit.num_requests
    returned = sent(unit.handle(0.1, RankReset((0, 1), (), ("", ""), 2)), Returned)
    assert len(returned) == held == 10
    assert (unit.num_requests, unit.blocks.num_used, unit.audit()) == (0, 0, [])


def test_a_prompt_may_be_cut_between_micro_batches() -> None:
    prompt = PrefillAttempt(generation(prompt=100), tuple(range(100)), 0, (4, 5), 100)
    other = PrefillAttempt(generation("b", prompt=10), tuple(range(10)), 0, (6,), 10)
    first, second = cut([PromptChunk(prompt, 30, 100), PromptChunk(other, 0, 10)], [40, 0])
    assert [(p.start, p.end) for p in (*first, *second)] == [(30, 70), (70, 100), (0, 10)]
    assert [part.chunk().sampling is None for part in (*first, *second)] == [True, False, False]
    assert [part.chunk().block_ids for part in (*first, *second)] == [(4, 5), (4, 5), (6,)]


# ---- cut by cost ----
def pools_of(num_ranks: int, num_blocks: int = 200) -> RankPools:
    pools = RankPools(num_blocks, num_ranks)
    pools.reset(
        RankReset((), tuple(range(num_ranks)), tuple(f"p{rank}" for rank in range(num_ranks)), 1)
    )
    return pools


def waiting_of(*lengths: int) -> list[PrefillAttempt]:
    prompts = (generation(f"r{number}", length) for number, length in enumerate(lengths))
    return [
        PrefillAttempt(prompt, prompt.prompt, number=number)
        for number, prompt in enumerate(prompts)
    ]


def started_on(
    pools: RankPools, rank: int, name: str, num_tokens: int, num_planned: int
) -> PrefillAttempt:
    prompt = PrefillAttempt(
        made := generation(name, num_tokens), made.prompt, rank, num_planned=num_planned
    )
    prompt.block_ids = pools[rank].allocate(blocks_for(num_tokens), prompt.key) or ()
    return prompt


RATES = StepRates(1e-4, 1e-7, 1e-5, 1e-3)


def seconds_of(parts: Sequence[PromptChunk], rates: StepRates = RATES) -> float:
    return sum(rates.chunk_s(part.start, part.end - part.start) for part in parts)


def test_ranks_take_equal_time_where_token_budgets_would_not() -> None:
    pools = pools_of(2)
    started = [started_on(pools, 0, "dense", 9000, 7000), started_on(pools, 1, "light", 3000, 0)]
    by_cost = pack(started, [], pools, PackRules(512, 8), RATES)
    times_s = [seconds_of(parts) for parts in by_cost.parts]
    assert times_s[0] == pytest.approx(times_s[1], rel=0.1)
    assert all(sum(part.end - part.start for part in parts) <= 512 for parts in by_cost.parts)
    step = pack(started, [], pools, PackRules(512, 8, is_by_cost=False), RATES)
    by_tokens = [seconds_of(parts) for parts in step.parts]
    assert by_tokens[0] > 5 * by_tokens[1]


def test_a_step_keeps_blocks_starts_and_tokens() -> None:
    pools = pools_of(3, num_blocks=5)
    step = pack([], waiting_of(*[100] * 20), pools, PackRules(64, 2), RATES)
    by_rank = [[prompt for prompt, at, _ in step.starts if at == rank] for rank in range(3)]
    assert all(1 <= len(prompts) <= 2 for prompts in by_rank)  # Each needs 2 of 4 blocks.
    assert [prompt.number for prompt, _, _ in step.starts] == list(range(len(step.starts)))
    assert all(0 < sum(part.end - part.start for part in parts) <= 64 for parts in step.parts)
    assert all(part.end > part.start for parts in step.parts for part in parts)
    held = started_on(pools, 1, "held", 200, 200)  # All of rank 1's blocks.
    step = pack([held], waiting_of(100, 100, 100), pools, PackRules(64, 2), RATES)
    assert {rank for _, rank, _ in step.starts} == {0, 2}


def test_in_turn_nothing_is_looked_up_for_those_that_wait_behind_full_ranks() -> None:
    found: list[int] = []

    def find(prompt: PrefillAttempt) -> dict[int, Prefix]:
        found.append(prompt.number)
        return {}

    rules = PackRules(64, 2, is_by_cost=False, is_in_turn=True)
    step = pack([], waiting_of(*[100] * 50), pools_of(2), rules, RATES, find)
    assert [(prompt.number, rank) for prompt, rank, _ in step.starts] == [(0, 0), (1, 1)]
    assert found == [0, 1]


def test_one_that_starts_without_time_keeps_its_rank_and_is_not_overtaken() -> None:
    """A prompt started beside a dense one may get no tokens in this step, but no later one overtakes it."""
    unit = up(leader(2, chunk_tokens=64, num_blocks=400, num_requests_max=8))
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        unit.handle(0.0, prefill(name, 60 if number % 3 else 3000))
        assert unit.audit() == []
    numbers = [prompt.number for prompt in unit._started.values()]
    assert numbers == sorted(numbers)
    assert min(prompt.number for prompt in unit._waiting) > max(numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dense_prompt_is_not_starved_by_light_ones_that_keep_coming(seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    unit = up(leader(2, chunk_tokens=64, num_blocks=400, num_requests_max=16))
    unit.handle(0.0, prefill("dense", 4000))
    ended: set[str] = set()
    for number in range(900):
        if len(unit._waiting) < 30:
            for _ in range(10):
                name = f"light{number}-{random.randrange(1 << 40)}"
                unit.handle(0.0, prefill(name, random.randint(5, 60)))
        step = next(iter(unit._in_flight))
        keys = {
            key: 1 for key, part in enumerate(step.parts) if part.end == len(part.prompt.tokens)
        }
        for answer in sent(unit.handle(0.0, done(step.step_id, keys)), PrefillDone):
            ended.add(answer.token.request_id)
            unit.handle(0.0, Release(answer.token.request_id, 0))
        if "dense" in ended:
            break
    # The dense prompt gets at least a tenth of every step; its tokens cost about as much as others.
    assert "dense" in ended, f"{unit._started[('dense', 0)].num_left} tokens left"
    assert len(ended) > 100


def test_priority_and_age_order_those_that_wait() -> None:
    unit = up(leader(2, num_blocks=400))
    for name in ("fill0", "fill1"):
        unit.handle(0.0, prefill(name, 500))
    late = 2 * AGE_S + 1.0
    for name, arrived_s, priority in (
        ("a", 0.0, 0),
        ("b", 0.5, 0),
        ("c", late, 2),
        ("d", 1.0, 1),
        ("e", 0.0, 0),
    ):
        made = msgspec.structs.replace(
            generation(name, 9000), arrived_s=arrived_s, priority=priority
        )
        unit.handle(0.0, Prefill(made))
    assert [prompt.key[0] for prompt in unit._waiting if prompt.key[0] in "abcde"] == [
        "d",
        "a",
        "e",
        "b",
        "c",
    ]


# ---- reports and traces ----
def test_balance_is_in_load_and_exact_in_a_trace() -> None:
    unit = leader(2, num_blocks=400)
    up(unit)
    unit.handle(0.0, TraceRequest(7, 1, 10.0))
    effects = unit.handle(0.0, prefill("a", 300))
    first, second = plans_of(effects)[0]
    load = sent(effects, UnitReport)[-1]
    assert (len(first.chunks), len(second.chunks)) == (1, 0)
    assert load.balance == {ATTENTION: 0.5, TOKENS: 0.5, TIME: 0.5}  # Rank 1 is idle.
    assert (load.token_s, load.pair_s) == (0.0, 0.0)
    effects = unit.handle(0.1, done(0))
    (trace,) = sent(effects, Trace)
    assert trace.steps[0].balance == {ATTENTION: 0.5, TOKENS: 0.5, TIME: 0.5}
    unit.handle(0.2, RankReset((1,), (), ("p0", ""), 2))
    (load,) = sent(unit.handle(9.0, Tick()), UnitReport)
    assert load.balance == {}  # No other rank to compare with.


def reports(unit: PrefillLeader) -> UnitReport:
    """Return the report after a step of 14 ms with 40 tokens and their pairs."""
    unit.handle(0.0, prefill("a", 40))
    times = (OpTime("attn_in", 4, 4e-3), OpTime("attn_core", 4, 4e-3), OpTime("experts", 3, 6e-3))
    unit.handle(0.1, msgspec.structs.replace(done(0, {0: 1}), op_times=times))
    (load,) = sent(unit.handle(0.7, Tick()), UnitReport)
    # A part of the step time is taken to be fixed.
    assert 0.8 * 14e-3 < 40 * load.token_s + 820 * load.pair_s < 14e-3
    return load


def test_a_unit_of_one_rank_has_no_balance_and_reports_what_it_measured() -> None:
    unit = prefill_leader(40, num_layers=4, num_moe_layers=3)
    assert reports(unit).balance == {}


def test_a_unit_of_two_ranks_reports_what_its_experts_take_of_a_token_too() -> None:
    unit = up(leader(num_layers=4, num_moe_layers=3, request_balance="off"))
    assert reports(unit).num_ranks == 2
