"""A day of the disk cache: small cases by hand, all findable tokens found on an infinite disk, and
the published hit rate on a finite one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hadal.lab.sim.day.cache import (
    BLOCK_BYTES,
    IDLE_EDGES_S,
    CacheDay,
    replay,
    simulate_cache,
    tokens_shared_own,
)
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.sessions import LogNormal, WorkloadParams, generate
from hadal.lab.sim.workload import R1, Workload
from hadal.policy.demand import DAY_S
from hadal.policy.eviction import Lru
from tests.unit.lab.sim.worlds import Row, of

PARAMS = WorkloadParams()
SCALE = 80_000


@pytest.fixture(scope="module")
def day() -> CacheDay:
    return simulate_cache(PARAMS, np.random.default_rng(0), scale=SCALE)


def findable_share(day: CacheDay) -> float:
    """Return the share that would be found if no block were ever evicted."""
    return float(day.workload.tokens_findable.sum() / day.workload.tokens_in.sum())


def hit_share_of(day: CacheDay, workload: Workload) -> float:
    """Return the share of a workload's prompt tokens that is found. A sample's own `hit_share` has
    a standard deviation of 0.01 and more, as few long sessions have many of the tokens.
    """
    return float(day.tokens_expected(workload).sum() / workload.tokens_in.sum())


def test_two_turns_by_hand() -> None:
    rows = [Row(10, 7, 0, 200, 300), Row(100, 7, 1, 612, 50, tokens_seen=499, idle_s=90)]
    day = replay(of(*rows), np.array([60.0, 150.0]), 100)
    assert day.tokens_found.tolist() == [0, 7 * 64]
    # 612 + 49 tokens at the end: ten blocks, each written once.
    assert day.blocks_written.tolist()[:2] == [9 + 1, 0]
    assert np.isinf(day.eviction_age_s).all()
    assert day.hit_share == findable_share(day) == 448 / 812
    # The answer is on disk only after it has ended.
    early = replay(of(*rows), np.array([101.0, 150.0]), 100)
    assert early.tokens_found.tolist() == [0, 3 * 64]


def test_reasoning_by_hand() -> None:
    rows = [
        Row(10, 7, 0, 200, 300, 150, model=R1),
        Row(100, 7, 1, 450, 50, tokens_seen=200, idle_s=90, model=R1),
    ]
    day = replay(of(*rows), np.array([60.0, 150.0]), 100)
    assert day.tokens_found.tolist() == [0, 3 * 64]
    # First turn: 3 blocks of the prompt, 4 of the answer. Second turn: 4 of the prompt, and none of
    # the answer, as 450 + 49 tokens fill no further block.
    assert day.blocks_written.sum() == 3 + 4 + 4 + 0
    without = replay(of(*rows), np.array([np.inf, 150.0]), 100)
    assert without.blocks_written.sum() == 3 + 4 + 0
    assert without.tokens_found.tolist() == [0, 3 * 64]


def test_what_makes_room_has_an_age() -> None:
    rows = [Row(at * HOUR_S, at, 0, 640, 1) for at in range(3)]
    day = replay(of(*rows), np.array([np.inf] * 3), 15, Lru)
    assert day.blocks_evicted.tolist()[:3] == [0, 5, 10]
    # The oldest prompt is evicted first: its last five blocks after one hour, the others after two;
    # then some of the second's.
    assert day.eviction_age_s[1] == HOUR_S
    assert day.eviction_age_s[2] == (5 * 2 + 5 * 1) / 10 * HOUR_S
    assert day.eviction_age_mean_s == (5 + 10 * 1.5) / 15 * HOUR_S


def test_what_came_before_second_0_warms_and_is_not_counted() -> None:
    rows = [Row(-50, 7, 0, 200, 300), Row(100, 7, 1, 612, 50, tokens_seen=499, idle_s=150)]
    day = replay(of(*rows), np.array([-5.0, 150.0]), 100)
    assert (len(day.workload), day.tokens_found.tolist(), day.blocks_written.sum()) == (1, [448], 3)


def test_a_disk_that_forgets_nothing_finds_exactly_what_can_be_found() -> None:
    load = generate(PARAMS, 0, DAY_S, np.random.default_rng(1), 4 * SCALE)
    end_s = load.arrival_s + PARAMS.first_token_s + load.tokens_out * PARAMS.token_s
    day = replay(load, end_s, 1 << 20)
    before = set(zip(load.session.tolist(), load.turn.tolist(), strict=True))
    is_known = np.array(
        [
            (session, turn - 1) in before
            for session, turn in zip(load.session, load.turn, strict=True)
        ]
    )
    assert is_known.sum() > 100
    assert np.array_equal(day.tokens_found[is_known], load.tokens_findable[is_known])
    assert (day.tokens_found <= load.tokens_findable).all()


def test_the_published_hits_come_of_a_finite_disk(day: CacheDay) -> None:
    many = generate(PARAMS, 0, DAY_S, np.random.default_rng(2), 400)
    assert hit_share_of(day, many) == pytest.approx(0.563, abs=0.01)
    assert findable_share(day) - 0.06 < day.hit_share < findable_share(day) - 0.01
    # The idle times that the shares were learned from give back the sample's own hits.
    assert hit_share_of(day, day.workload) == pytest.approx(day.hit_share, abs=0.005)


def test_it_writes_what_it_did_not_find_and_what_it_made(day: CacheDay) -> None:
    load = day.workload
    tokens = (load.tokens_in.sum() - day.tokens_found.sum() + load.tokens_out.sum()) * SCALE
    num_bytes = float(day.blocks_written.sum()) * BLOCK_BYTES * SCALE
    assert num_bytes == pytest.approx(tokens / 64 * BLOCK_BYTES, rel=0.03)
    assert num_bytes == pytest.approx(30.5e15, rel=0.15)
    by_hour = day.by_hour()
    assert by_hour["tokens_hit"].sum() / by_hour["tokens_in"].sum() == pytest.approx(day.hit_share)
    assert by_hour["tokens_out"].sum() == load.tokens_out.sum() * SCALE


def test_it_forgets_in_hours(day: CacheDay) -> None:
    assert 4 * HOUR_S < day.eviction_age_mean_s < 24 * HOUR_S
    own, share = day.hits_by_idle()
    assert own.sum() == tokens_shared_own(day.workload)[1].sum()
    assert (share[np.array(IDLE_EDGES_S[1:]) <= 600] > 0.98).all()
    assert share[-1] < 0.5
    ages_s = np.geomspace(60, 3 * DAY_S, 20)
    found = day.found_share(np.zeros(20), ages_s)
    assert found[0] > 0.99
    assert found[-1] < 0.5


def test_who_never_rests_finds_everything() -> None:
    awake = replace(PARAMS, return_share=0.0, think_s=LogNormal(60, 0.5, 600))
    day = simulate_cache(awake, np.random.default_rng(0), scale=4 * SCALE)
    assert findable_share(day) - day.hit_share < 0.005


def test_a_cache_that_saw_nothing_go_on_knows_nothing() -> None:
    day = replay(of(Row(0, 0, 0, 100, 10)), np.array([1.0]), 10)
    with pytest.raises(ValueError, match="cannot be measured"):
        day.found_share(np.zeros(1), np.ones(1))
