"""Quotas: tokens per minute, concurrent requests, dollars per day; and the replies about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hadal.core.messages.generation import RateLimits
from hadal.core.messages.requests import Quota
from hadal.policy.quotas import (
    BUDGET_CODE,
    NEVER_CODE,
    RATE_CODE,
    QuotaView,
    filled,
    limits_of,
    refuse,
)

QUOTA = Quota("t", tokens_per_minute=600, requests=3, day_pico_usd=1000)
VIEW = QuotaView(QUOTA, 1, 600.0, 0, 0, 3600.0)


def test_what_is_within_it_is_let_in() -> None:
    assert refuse(VIEW, 2, 600, 1000) is None
    assert refuse(replace(VIEW, num_tokens_left=1.0), 1, 0, 0) is None, "not read yet"


@pytest.mark.parametrize(
    ("view", "wanted", "code", "retry_after_s"),
    [
        (VIEW, (3, 1, 1), RATE_CODE, 1.0),
        (replace(VIEW, is_batch=True, spent_pico_usd=999), (1, 1, 2), BUDGET_CODE, 3600.0),
        (replace(VIEW, num_tokens_left=90.0), (1, 100, 1), RATE_CODE, 1.0),
        (replace(VIEW, num_tokens_left=-59.0), (1, 0, 1), RATE_CODE, 6.0),
        (replace(VIEW, spent_pico_usd=999), (1, 1, 2), BUDGET_CODE, 3600.0),
        (replace(VIEW, spent_pico_usd=1000), (1, 1, 0), BUDGET_CODE, 3600.0),
        (replace(VIEW, reserved_pico_usd=999), (1, 1, 2), BUDGET_CODE, 1.0),
    ],
)
def test_what_is_beyond_it_is_refused(
    view: QuotaView, wanted: tuple[int, int, int], code: str, retry_after_s: float
) -> None:
    refusal = refuse(view, *wanted)
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.is_for_room) == (429, code, False)
    assert refusal.retry_after_s == pytest.approx(retry_after_s)
    assert refusal.limits == limits_of(view)


@pytest.mark.promise("A request that alone exceeds a quota is a 400")
@pytest.mark.parametrize("wanted", [(4, 1, 1), (1, 601, 1), (1, 1, 1001)])
def test_what_no_waiting_helps_is_the_requests_own_fault(wanted: tuple[int, int, int]) -> None:
    for view in (VIEW, replace(VIEW, num_open=0), replace(VIEW, is_batch=True)):
        refusal = refuse(view, *wanted)
        if view.is_batch and wanted[0] > 1:
            assert refusal is None, "a batch has no limit of generations at once"
            continue
        assert refusal is not None
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (400, NEVER_CODE, 0.0)


@pytest.mark.promise(
    "Until they are read, the tenant gets 503. Without a ledger, a budget is an error."
)
def test_a_budget_whose_past_is_not_known_lets_nothing_in() -> None:
    refusal = refuse(replace(VIEW, spent_pico_usd=None), 1, 1, 1)
    assert refusal is not None
    assert refusal.status == 503


def test_the_bucket_fills_evenly_and_not_over() -> None:
    assert filled(QUOTA, -100.0, 20.0) == 100.0
    assert filled(QUOTA, 590.0, 20.0) == 600.0


def test_replies_say_what_is_left() -> None:
    found = limits_of(replace(VIEW, num_tokens_left=400.7))
    assert found == RateLimits(3, 2, 600, 400, 1.0, pytest.approx(19.93))
    found = limits_of(replace(VIEW, num_open=9, num_tokens_left=-5.0))
    assert found == RateLimits(3, 0, 600, 0, 1.0, 60.5)
    assert limits_of(replace(VIEW, quota=Quota("t", day_pico_usd=5))) is None
    only = limits_of(replace(VIEW, quota=Quota("t", requests=2)))
    assert only is not None
    assert (only.requests, only.tokens) == (2, None)


def test_a_batch_leaves_half_of_the_bucket_and_all_of_the_requests_to_others() -> None:
    batch = replace(VIEW, num_open=3, is_batch=True)
    assert refuse(batch, 1, 300, 0) is None, "requests at once are others' matter"
    assert refuse(replace(batch, num_tokens_left=599.0), 1, 400, 0) is not None
    assert refuse(batch, 1, 400, 0) is None, "a full bucket holds what no half does"
    refusal = refuse(replace(batch, num_tokens_left=300.0), 1, 60, 0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(6.0)
    assert refuse(replace(batch, spent_pico_usd=999), 1, 1, 2) is not None, "money is money"
