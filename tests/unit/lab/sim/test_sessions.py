"""Sessions: equal for equal seeds, exact by turn, in the day's shape, as long as published."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from hadal.lab.sim.day.clock import DEEPSEEK_SHARES, hour_index
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.sessions import (
    LogNormal,
    SystemPrompt,
    Turns,
    WorkloadParams,
    draw_rhythm,
    draw_turns,
    generate,
)
from hadal.lab.sim.workload import NO_PREFIX, R1, V3, Workload
from hadal.policy.demand import DAY_S

PARAMS = WorkloadParams()
DAY_SCALE = 400
PLAIN = WorkloadParams(
    continue_share=0.5,
    document_share=0.0,
    message=LogNormal(100, 0, 1e9),
    output_v3=LogNormal(300, 0, 1e9),
    think_s=LogNormal(60, 0, 1e9),
    return_share=0.0,
    system_prompts=(SystemPrompt(1.0, 200),),
    first_token_s=2.0,
    token_s=0.05,
)
"""Parameters under which only the number of turns and R1's reasoning vary."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def turns_of(params: WorkloadParams, num_sessions: int) -> Turns:
    draws = rng()
    return draw_turns(params, draw_rhythm(params, num_sessions, draws), draws)


def columns(load: Workload | Turns) -> dict[str, np.ndarray]:
    return {
        field.name: getattr(load, field.name)
        for field in fields(load)
        if getattr(load, field.name) is not None
    }


def test_a_seed_is_a_workload() -> None:
    one, same, other = (columns(generate(PARAMS, 0, HOUR_S, rng(seed), 5000)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["arrival_s"], other["arrival_s"][: len(one["arrival_s"])])


def test_a_prompt_is_what_was_said_and_a_new_message() -> None:
    turns = turns_of(replace(PLAIN, share_r1=0.0), 1000)
    assert turns.turn.max() > 3
    assert np.array_equal(turns.tokens_in, 300 + 400 * turns.turn)
    assert not turns.tokens_reasoning.any()
    # All but the new message was seen, and the answer's last token, which is never computed.
    assert np.array_equal(turns.tokens_seen, np.where(turns.turn == 0, 200, turns.tokens_in - 101))


def test_reasoning_is_billed_and_left_out_of_the_next_prompt() -> None:
    turns = turns_of(replace(PLAIN, share_r1=1.0, output_r1=LogNormal(300, 0, 1e9)), 1000)
    last, following = np.flatnonzero(turns.turn[1:] > 0), np.flatnonzero(turns.turn > 0)
    assert (turns.tokens_out == 300).all()
    assert ((turns.tokens_reasoning > 0) & (turns.tokens_reasoning < 300)).all()
    kept = turns.tokens_out - turns.tokens_reasoning
    assert np.array_equal(turns.tokens_in[following], turns.tokens_in[last] + kept[last] + 100)
    # The answer was computed after the reasoning, so without it none of its blocks are found.
    assert np.array_equal(turns.tokens_seen[following], turns.tokens_in[last])


def test_a_turn_comes_when_the_answer_was_read() -> None:
    load = generate(
        replace(PLAIN, share_r1=0.0, shares=(1 / 24,) * 24, rest_from_s=100.0),
        0,
        HOUR_S,
        rng(),
        20_000,
    )
    assert np.allclose(load.idle_s[load.turn > 0], 2 + 300 * 0.05 + 60)
    assert np.isinf(load.idle_s[load.turn == 0]).all()
    resting = generate(
        replace(PLAIN, share_r1=0.0, rest_from_s=50.0, shares=(1 / 24,) * 24),
        0,
        HOUR_S,
        rng(),
        20_000,
    )
    assert np.allclose(resting.idle_s[resting.turn > 0], 2 + 300 * 0.05 + 60)


def test_rests_are_by_the_load_clock() -> None:
    params = replace(PLAIN, return_share=1.0, return_s=LogNormal(8 * HOUR_S, 0, 1e9))
    load = generate(params, 0, DAY_S, rng(), 20_000)
    idle_h = load.idle_s[load.turn > 0] / HOUR_S
    # Eight hours at the mean load last less than seven at busy times, more than eleven at night.
    assert idle_h.min() < 7
    assert idle_h.max() > 11


def test_a_session_ends_before_its_context_is_full() -> None:
    turns = turns_of(replace(PARAMS, context=8192), 5000)
    assert (turns.tokens_in + turns.tokens_out).max() <= 8192
    begins = np.flatnonzero(np.diff(turns.session, prepend=-1))
    assert (turns.turn[begins] == 0).all()


@pytest.fixture(scope="module")
def day() -> Workload:
    return generate(PARAMS, 0, DAY_S, rng(), DAY_SCALE)


def test_requests_come_by_the_shape_of_the_day(day: Workload) -> None:
    # At night there are 5,000 requests per hour. Lengths vary widely between sessions
    # and little within a session, so the shares have 4 % of noise.
    for weights, most in ((np.ones(len(day)), 0.05), (day.tokens_out, 0.07), (day.tokens_in, 0.12)):
        shares = np.bincount(hour_index(day.arrival_s), weights, 24) / weights.sum()
        assert np.abs(shares / np.array(DEEPSEEK_SHARES) - 1).max() < most


def test_a_day_is_like_the_published_one(day: Workload) -> None:
    billions = np.array([day.tokens_in.sum(), day.tokens_out.sum()]) * DAY_SCALE / 1e9
    assert billions == pytest.approx([608, 168], rel=0.02)
    assert day.tokens_in.sum() / day.tokens_out.sum() == pytest.approx(608 / 168, rel=0.01)
    assert day.kv_length_mean == pytest.approx(4989, rel=0.01)


def test_the_first_second_is_like_any_other() -> None:
    load = generate(
        replace(PARAMS, shares=(1 / 24,) * 24), 5 * DAY_S, 5 * DAY_S + 8 * HOUR_S, rng(), 2000
    )
    first, last = (load.take(load.arrival_s // (4 * HOUR_S) % 2 == half) for half in (0, 1))
    assert len(first) == pytest.approx(len(last), rel=0.04)
    assert (first.turn > 0).mean() == pytest.approx((last.turn > 0).mean(), rel=0.04)


def test_tenants_bring_their_system_prompts() -> None:
    load = generate(PARAMS, 0, HOUR_S, rng(), 500)
    for tenant, prompt in enumerate(PARAMS.system_prompts):
        own = load.take((load.tenant == tenant) & (load.turn == 0))
        assert len(own) / (load.turn == 0).sum() == pytest.approx(prompt.share, rel=0.15)
        assert set(own.prefix_tokens.tolist()) == {prompt.tokens} == set(own.tokens_seen.tolist())
        assert set(own.prefix.tolist()) == {tenant if prompt.tokens else NO_PREFIX}
        assert own.tokens_in.min() > prompt.tokens


def test_models_answer_as_their_sources_say() -> None:
    turns = turns_of(PARAMS, 200_000)
    v3, r1 = turns.model == V3, turns.model == R1
    assert not turns.tokens_reasoning[v3].any()
    assert np.median(turns.tokens_out[v3]) == pytest.approx(350, rel=0.02)
    assert np.median(turns.tokens_out[r1]) == pytest.approx(875, rel=0.02)
    found = (turns.tokens_reasoning[r1] / turns.tokens_out[r1]).mean()
    assert found == pytest.approx(0.70, abs=0.01)


@pytest.mark.parametrize(("start_s", "end_s", "scale"), [(0, 0, 1), (0, 1, 0.5)])
def test_refuses_an_empty_window(start_s: float, end_s: float, scale: float) -> None:
    with pytest.raises(ValueError, match="empty"):
        generate(PARAMS, start_s, end_s, rng(), scale)
