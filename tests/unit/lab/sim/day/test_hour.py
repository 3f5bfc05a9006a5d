"""A window of an hour (some seconds, simulated request by request): determined by its seed, with
valid ledgers, equal to the fluid's hour.
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.sim.day.demand import generator, with_tokens_at
from hadal.lab.sim.day.hour_window import HourWindow, requests_of, run_hour, uncollected
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.window import window
from hadal.policy.scaling import Units
from tests.unit.lab.sim.studies import (
    LOOKED_AT,
    PLACED,
    WORKLOAD,
    cached_day,
    curves,
    fluid,
    load,
    looked,
    setting,
    small,
)

SHORT = small(window=replace(small().window, seconds=0.5, settle_s=0.2, back_s=600.0))


def short(seed: int = 1, units: Units | None = None) -> HourWindow:
    study = replace(SHORT, seed=seed)
    return run_hour(study, PLACED, replace(setting(), units=units or Units(2, 4)), cached_day())


def test_a_seed_is_a_window_wherever_it_is_run() -> None:
    one, other = (pickle.loads(pickle.dumps(short())) for _ in range(2))
    assert np.array_equal(one.reading.ttft_s, other.reading.ttft_s)
    assert np.array_equal(one.reading.decode.seconds_K, other.reading.decode.seconds_K)
    found = (one.num_events, one.num_steps, one.hit_share)
    assert found == (other.num_events, other.num_steps, other.hit_share)
    assert not np.array_equal(one.reading.ttft_s, short(seed=2).reading.ttft_s)


def test_the_ledgers_are_whole_and_both_roles_worked() -> None:
    seen = looked()
    assert seen.problems == ()
    assert seen.setting == setting()
    assert seen.num_events > seen.num_steps > 100
    assert set(seen.steps) == {PREFILL, DECODE}
    assert seen.reading.num_failed == 0
    assert (seen.reading.begin_s, seen.reading.end_s) == (2.0, 4.0)
    assert len(seen.reading.kv_share) == setting().units.decode


def test_liquid_and_window_agree() -> None:
    """Compare both with the same units; the window has about 440 requests, so its noise is 5 %."""
    decode, middle = looked().reading.decode, fluid().middles[LOOKED_AT]
    assert decode.requests_per_rank == pytest.approx(middle.requests_per_rank, rel=0.1)
    assert 1.0 / decode.token_s == pytest.approx(middle.tokens_per_s_user, rel=0.05)
    could = middle.units.prefill * curves().prefill_computed_per_s * small().window.seconds
    came = looked().reading.tokens_arrived * (1 - looked().hit_share)
    assert came / could == pytest.approx(middle.prefill_use, rel=0.1)
    assert looked().hit_share == pytest.approx(load().hit_share, rel=0.1)


def test_kv_is_as_long_as_what_was_drawn_says() -> None:
    seen, study = looked(), small()
    begin_s = (LOOKED_AT + 0.5) * HOUR_S
    drawn = window(
        with_tokens_at(WORKLOAD, setting().token_s, setting().first_token_s),
        begin_s,
        begin_s + 4.0,
        study.window.back_s,
        generator(study, "window", LOOKED_AT),
        cached_day(),
    )
    came = drawn.workload.take(drawn.tokens_done > 0)
    # Running requests at the start: each has its context length and makes one token per token_s.
    held = came.tokens_in + drawn.tokens_done[drawn.tokens_done > 0]
    assert seen.reading.decode.positions_per_token == pytest.approx(held.mean(), rel=0.05)
    assert (seen.num_running, seen.num_came) == (len(came), len(drawn.workload) - len(came))


def test_requests_come_when_the_window_says() -> None:
    drawn = window(
        WORKLOAD, 1000.0, 1002.0, 600.0, np.random.default_rng(1), cached_day(), scale=10
    )
    made = requests_of(drawn, 1000.0, has_cache=True)
    num = drawn.num_running
    assert num > 0
    assert not made.arrival_s[:num].any()
    assert made.arrival_s[num:] == pytest.approx(drawn.workload.arrival_s[num:] - 1000.0)
    assert np.array_equal(made.tokens_done, drawn.tokens_done)
    assert np.array_equal(made.tokens_cached, drawn.tokens_cached // BLOCK_TOKENS * BLOCK_TOKENS)
    assert made.tokens_cached.sum() > 0
    assert not requests_of(drawn, 1000.0, has_cache=False).tokens_cached.any()


def test_without_a_cache_nothing_hits() -> None:
    seen = run_hour(SHORT, PLACED, setting(), None)
    assert seen.hit_share == 0.0
    assert seen.reading.disk_tokens == 0
    assert seen.reading.prefill.tokens > short().reading.prefill.tokens


def test_fewer_units_are_fuller() -> None:
    wide, narrow = short().reading.decode, short(units=Units(2, 2)).reading.decode
    assert narrow.requests_per_rank > 1.5 * wide.requests_per_rank
    assert narrow.token_s > wide.token_s


@pytest.mark.parametrize("is_on", [True, False])
def test_who_looks_for_garbage_does_so_afterwards_whatever_happened(is_on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
