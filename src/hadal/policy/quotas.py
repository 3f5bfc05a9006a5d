"""Check a tenant's own limits: tokens per minute, simultaneous generations, dollars per day.

The limit on tokens is a bucket that holds one minute's worth and fills evenly. A prompt is admitted
if the bucket covers it. Output tokens are subtracted as they are drawn, even below 0, so that the
long-term rate holds. The dollar limit is strict: a request is admitted only if the day's budget
covers its maximum cost on top of all charges so far and the maximum costs of admitted requests that
are not charged yet.

Values in, values out; the state is the front's (roles/front/tenants).
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages.generation import RateLimits
from hadal.core.messages.requests import Quota
from hadal.policy.admission import Refusal

MINUTE_S = 60.0
DAY_S = 86_400
AGAIN_S = 1.0
"""Seconds until a retry where the time of free capacity is unknown."""
RATE_CODE = "rate_limit_exceeded"
BUDGET_CODE = "insufficient_quota"
"""OpenAI's code for a budget that is used up."""
NEVER_CODE = "request_too_large"
"""Code of a request that exceeds the quota by itself, so that no waiting helps: a 400, unlike others."""


@dataclass(frozen=True, slots=True)
class QuotaView:
    """Tenant's quota, and its current use."""

    quota: Quota
    num_open: int
    """Generations that are queued or running."""
    num_tokens_left: float
    """Tokens in the bucket; may be negative."""
    spent_pico_usd: int | None
    """Charged today; None if not known yet."""
    reserved_pico_usd: int
    """Maximum cost of requests that are not charged yet."""
    day_left_s: float
    is_batch: bool = False
    """True for batch requests: they may use only the upper half of the bucket."""


def filled(quota: Quota, num_tokens_left: float, passed_s: float) -> float:
    """Return the tokens in the bucket after `passed_s` seconds."""
    most = float(quota.tokens_per_minute)
    return min(most, num_tokens_left + passed_s * most / MINUTE_S)


def refuse(view: QuotaView, num_wanted: int, num_tokens: int, most_pico_usd: int) -> Refusal | None:
    """Return a refusal, or None to admit `num_wanted` more generations with prompts of `num_tokens` tokens
    together and a maximum cost of `most_pico_usd`. `num_tokens` 0: the prompts are not tokenized.
    """
    quota = view.quota
    if quota.requests and not view.is_batch and num_wanted > quota.requests:
        return _never(
            view,
            f"the request asks for {num_wanted} texts, and this key may have {quota.requests}"
            " generations at once; lower n, or send fewer prompts.",
        )
    if quota.requests and not view.is_batch and view.num_open + num_wanted > quota.requests:
        return _refusal(
            view,
            f"{view.num_open} generations of this key run or wait, and it may have"
            f" {quota.requests} at once.",
            AGAIN_S,
        )
    if quota.tokens_per_minute and num_tokens > quota.tokens_per_minute:
        return _never(
            view,
            f"the request has {num_tokens} tokens, and this key may have"
            f" {quota.tokens_per_minute} a minute; send a shorter prompt.",
        )
    needed = float(max(1, num_tokens))
    if view.is_batch:
        needed = min(needed + quota.tokens_per_minute / 2, quota.tokens_per_minute)
    refusal = refuse_tokens(view, needed)
    if refusal is None and quota.day_pico_usd:
        return _refuse_cost(view, most_pico_usd)
    return refusal


def refuse_tokens(view: QuotaView, num_needed: float = 1.0) -> Refusal | None:
    """Return a refusal if the bucket holds fewer tokens than needed. One token admits a prompt of
    unknown length: its tokens are counted later, and subtracted then.
    """
    quota = view.quota
    if not quota.tokens_per_minute or view.num_tokens_left >= num_needed:
        return None
    missing = num_needed - view.num_tokens_left
    return _refusal(
        view,
        f"this key's limit of {quota.tokens_per_minute} tokens a minute is used up.",
        missing * MINUTE_S / quota.tokens_per_minute,
    )


def _refuse_cost(view: QuotaView, most_pico_usd: int) -> Refusal | None:
    if view.spent_pico_usd is None:
        reason = "today's spending of this key is not read from the ledger yet; try again."
        return Refusal(503, reason, AGAIN_S, RATE_CODE)
    left = view.quota.day_pico_usd - view.spent_pico_usd
    if most_pico_usd > view.quota.day_pico_usd:
        return _never(
            view,
            f"this key may spend ${view.quota.day_pico_usd / 1e12:g} a day (UTC), and the request can"
            f" cost ${most_pico_usd / 1e12:g}; lower max_tokens, or send a shorter prompt.",
        )
    if left <= 0 or most_pico_usd > left:
        return _refusal(
            view,
            f"this key may spend ${view.quota.day_pico_usd / 1e12:g} a day (UTC), and ${left / 1e12:g}"
            f" of it is left; the request can cost ${most_pico_usd / 1e12:g}. Lower max_tokens, or"
            " wait until tomorrow.",
            view.day_left_s,
            BUDGET_CODE,
        )
    if view.reserved_pico_usd + most_pico_usd > left:
        return _refusal(
            view,
            "the rest of this key's budget for today is reserved for its running requests.",
            AGAIN_S,
            BUDGET_CODE,
        )
    return None


def _never(view: QuotaView, reason: str) -> Refusal:
    return Refusal(400, reason, 0.0, NEVER_CODE, limits_of(view))


def _refusal(view: QuotaView, reason: str, retry_after_s: float, code: str = RATE_CODE) -> Refusal:
    return Refusal(429, reason, retry_after_s, code, limits_of(view))


def limits_of(view: QuotaView) -> RateLimits | None:
    """Return the limits for a reply's headers; None if the tenant has no limit that headers can show."""
    quota = view.quota
    if not quota.requests and not quota.tokens_per_minute:
        return None
    tokens = quota.tokens_per_minute
    return RateLimits(
        requests=quota.requests or None,
        requests_left=max(0, quota.requests - view.num_open),
        tokens=tokens or None,
        tokens_left=max(0, int(view.num_tokens_left)) if tokens else 0,
        requests_reset_s=AGAIN_S if view.num_open else 0.0,
        tokens_reset_s=(tokens - view.num_tokens_left) * MINUTE_S / tokens if tokens else 0.0,
    )
