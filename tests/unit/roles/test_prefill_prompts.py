"""A prefill unit of several ranks: balance, prompts cut between micro-batches, and random worlds with resets."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Any

import pytest

from hadal.core.messages import PrefillDone, Returned, UnitUp
from hadal.core.plans import PrefillPlan
from hadal.core.seams import Execute, Freed, RankReset
from hadal.roles.prefill import PrefillLeader
from hadal.roles.prefill_prompts import Part, Prompt, cut
from tests.unit.roles.driving import done, generation, of, prefill, sent
from tests.unit.roles.rank_worlds import PrefillWorld

SEEDS = [*range(4), *(SystemRandom().randrange(1 << 30) for _ in range(2))]
POOLS = ("p0", "p1")


def leader(num_ranks: int = 2, **options: Any) -> PrefillLeader:
    fields: dict[str, Any] = {
        "chunk_tokens": 64, "num_requests_max": 4, "num_waiting_max": 100, "lease_s": 2.0, "heartbeat_s": 0.5,
        "num_blocks": 9,
    }  # fmt: skip
    fields |= options
    return PrefillLeader("prefill-0", "e1", "", fields.pop("num_blocks"), num_ranks=num_ranks, **fields)


def up(unit: PrefillLeader) -> None:
    unit.start(0.0)
    unit.handle(0.0, RankReset((), (0, 1), POOLS, 1))


def plans_of(effects: Any) -> list[tuple[PrefillPlan, ...]]:
    return [effect.plans for effect in of(effects, Execute)]  # type: ignore[misc]


@pytest.mark.parametrize("overlap", ["auto", "prefill_dual"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_prompt_is_prefilled_once_whatever_the_ranks_do(seed: int, overlap: str) -> None:
    print("seed", seed)
    random = Random(seed)
    num_ranks = random.choice([2, 3, 4])
    unit = leader(
        num_ranks, chunk_tokens=96, num_blocks=random.choice([5, 9]), overlap=overlap, min_split_tokens=2,
        num_layers=4, num_moe_layers=3,
    )  # fmt: skip
    world = PrefillWorld(random, unit, num_ranks)
    assert sent(unit.start(0.0), UnitUp) == []
    for number in range(10):
        world.submit(f"r{number}")
    world.reset(set(), set(range(num_ranks)))
    world.live(250, 10, 0.05)
    world.end()
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)
    assert overlap == "auto" or ("prefill_dual", 2) in world.schedules


def test_prompts_start_where_there_is_less_to_do() -> None:
    unit = leader()
    up(unit)
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


def test_a_lost_rank_gives_back_its_prompts_and_leases_and_survivors_plan_again() -> None:
    unit = leader()
    up(unit)
    unit.handle(0.0, prefill("a", 30))
    unit.handle(0.0, prefill("b", 150))  # On rank 1.
    unit.handle(0.0, prefill("c", 200))
    unit.handle(0.1, done(0, {0: 3}))  # Now a lease on rank 0; c starts there.
    effects = unit.handle(0.2, RankReset((0,), (), ("", "p1"), 2))
    assert [(m.request_id, m.reason) for m in sent(effects, Returned)] == [("c", "rank lost"), ("a", "rank lost")]
    again = [plan.chunks[0].start for _, plan in plans_of(effects)]
    assert again == [0, 64]
    assert of(effects, Freed) == []
    assert unit.audit() == []


def test_a_unit_without_ranks_gives_back_what_waits() -> None:
    unit = leader()
    up(unit)
    for name in "abcdefghij":
        unit.handle(0.0, prefill(name, 200))
    held = unit.num_requests
    returned = sent(unit.handle(0.1, RankReset((0, 1), (), ("", ""), 2)), Returned)
    assert len(returned) == held == 10
    assert (unit.num_requests, unit.blocks.num_used, unit.audit()) == (0, 0, [])


def test_a_prompt_may_be_cut_between_micro_batches() -> None:
    prompt = Prompt(generation(prompt=100), tuple(range(100)), 0, (4, 5), 100)
    other = Prompt(generation("b", prompt=10), tuple(range(10)), 0, (6,), 10)
    first, second = cut([Part(prompt, 30, 100), Part(other, 0, 10)], [40, 0])
    assert [(p.start, p.end) for p in (*first, *second)] == [(30, 70), (70, 100), (0, 10)]
    assert [part.chunk().sampling is None for part in (*first, *second)] == [True, False, False]
    assert [part.chunk().block_ids for part in (*first, *second)] == [(4, 5), (4, 5), (6,)]
