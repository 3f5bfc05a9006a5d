"""Windows: arrivals, running requests and cached tokens equal those in the middle of a played day."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hadal.lab.sim.day.cache import CacheDay, simulate_cache
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.window import Window, window
from hadal.lab.sim.sessions import WorkloadParams, generate
from hadal.lab.sim.workload import Workload
from tests.unit.lab.sim.day.test_cache import hit_share_of

PARAMS = WorkloadParams()
FROM_S, TO_S = 10 * HOUR_S, 10 * HOUR_S + 2400
SCALE = 300


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def arriving(seen: Window) -> Workload:
    return seen.workload.take(np.arange(len(seen.workload)) >= seen.num_running)


@pytest.fixture(scope="module")
def seen() -> Window:
    return window(PARAMS, FROM_S, TO_S, HOUR_S, rng(), scale=SCALE)


@pytest.fixture(scope="module")
def played() -> Workload:
    return generate(PARAMS, FROM_S - HOUR_S, TO_S, rng(1), SCALE)


def test_a_seed_is_a_window(seen: Window) -> None:
    same = window(PARAMS, FROM_S, TO_S, HOUR_S, rng(), scale=SCALE)
    assert np.array_equal(same.workload.arrival_s, seen.workload.arrival_s)
    assert np.array_equal(same.tokens_done, seen.tokens_done)


def test_what_comes_is_what_comes_in_a_played_day(seen: Window, played: Workload) -> None:
    ours, theirs = arriving(seen), played.take(played.arrival_s >= FROM_S)
    assert ours.arrival_s[0] >= FROM_S
    assert ours.arrival_s[-1] < TO_S
    assert len(ours) == pytest.approx(len(theirs), rel=0.02)
    for name in ("tokens_in", "tokens_out", "tokens_reasoning", "tokens_findable", "turn", "model"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        noise = np.hypot(mine.std() / len(mine) ** 0.5, other.std() / len(other) ** 0.5)
        # Turns of one session are alike: the means vary more than those of independent requests.
        assert abs(mine.mean() - other.mean()) < 5 * noise, name
    for edge_s in (60, 600, HOUR_S, 8 * HOUR_S, 24 * HOUR_S):
        found = (ours.idle_s < edge_s).mean()
        assert found == pytest.approx((theirs.idle_s < edge_s).mean(), abs=0.01)


def test_what_runs_has_come_as_far_as_in_a_played_day(seen: Window, played: Workload) -> None:
    num = seen.num_running
    ours = seen.workload.take(np.arange(len(seen.workload)) < num)
    end_s = ours.arrival_s + PARAMS.first_token_s + ours.tokens_out * PARAMS.token_s
    assert ours.arrival_s.max() < FROM_S < end_s.min()
    done = seen.tokens_done[:num]
    assert (done < ours.tokens_out).all()
    assert (done >= 0).all()
    made_s = ours.arrival_s + PARAMS.first_token_s + done * PARAMS.token_s
    assert np.abs(made_s - FROM_S)[done > 0].max() <= PARAMS.token_s
    assert not seen.tokens_done[num:].any()

    ends_s = played.arrival_s + PARAMS.first_token_s + played.tokens_out * PARAMS.token_s
    theirs = (played.arrival_s < FROM_S) & (ends_s > FROM_S)
    assert num == pytest.approx(theirs.sum(), rel=0.1)
    # Little's law: rate of requests x duration of one.
    rate = len(arriving(seen)) / (TO_S - FROM_S)
    assert num == pytest.approx(rate * (ends_s - played.arrival_s).mean(), rel=0.1)


def test_turns_of_one_sitting_follow_each_other(seen: Window) -> None:
    load = seen.workload
    order = np.lexsort((load.turn, load.session))
    session, turn, at_s = load.session[order], load.turn[order], load.arrival_s[order]
    follows = session[1:] == session[:-1]
    assert follows.sum() > 1000
    assert (np.diff(turn)[follows] == 1).all()
    assert np.allclose(np.diff(at_s)[follows], load.idle_s[order][1:][follows])


def test_the_cache_of_the_day_says_what_is_found() -> None:
    day: CacheDay = simulate_cache(PARAMS, rng(), scale=300_000)
    cached = window(PARAMS, FROM_S, TO_S, HOUR_S, rng(), day, scale=SCALE)
    assert (cached.tokens_cached <= cached.workload.tokens_findable).all()
    assert not (cached.tokens_cached % 64).any()
    share = cached.tokens_cached.sum() / cached.workload.tokens_in.sum()
    assert share == pytest.approx(hit_share_of(day, cached.workload), abs=0.01)
    all_there = window(PARAMS, FROM_S, TO_S, HOUR_S, rng(), scale=SCALE)
    assert np.array_equal(all_there.tokens_cached, all_there.workload.tokens_findable)
    assert share < all_there.tokens_cached.sum() / all_there.workload.tokens_in.sum()


def test_slower_answers_leave_more_running(seen: Window) -> None:
    slow = window(
        replace(PARAMS, token_s=2 * PARAMS.token_s), FROM_S, TO_S, HOUR_S, rng(), scale=SCALE
    )
    assert slow.num_running == pytest.approx(2 * seen.num_running, rel=0.1)


def test_nothing_comes_without_sessions() -> None:
    empty = window(replace(PARAMS, sessions_per_day=1e-9), 0, 60, 0, rng())
    assert (len(empty.workload), empty.num_running) == (0, 0)


@pytest.mark.parametrize("span", [(10, 10, 0, 1), (0, 10, -1, 1), (0, 10, 0, 0.5)])
def test_refuses_what_is_no_window(span: tuple[float, float, float, float]) -> None:
    start_s, end_s, warm_s, scale = span
    with pytest.raises(
        ValueError, match=r"is empty, warm_s .* is negative, or scale .* is below 1"
    ):
        window(PARAMS, start_s, end_s, warm_s, rng(), scale=scale)
