"""Choose the prefill unit, and later the decode unit, of a request.

Goals (DeepSeek-V3/R1 inference overview): equal prefill work, so the unit that will be done first;
equal KV use and similar request counts in decode. A unit is chosen only if the request can ever
fit; whether it fits now is the admission's question.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.rates import chunk_s
from hadal.policy.prefill_rates import UNMEASURED
from hadal.policy.views import DecodeUnitView, PrefillUnitView


def choose_prefill_unit(
    units: Sequence[PrefillUnitView], num_blocks_needed: int, num_tokens: int
) -> str | None:
    """The unit that has prefilled `num_tokens` first, as far as can be predicted; None if all are
    full or too small.

    What waits there is shared by its ranks; the prompt itself is on one of them. What the unit has
    in its cache is context, not work. A unit that has measured nothing yet is taken to be like the
    others.
    """
    fitting = [
        unit
        for unit in units
        if unit.num_requests < unit.num_requests_max and num_blocks_needed <= unit.num_blocks
    ]
    if not fitting:
        return None
    rates = _unknown_rates(units) if min([unit.token_s for unit in fitting]) <= 0.0 else None
    half = 0.5 * (num_tokens + 1)  # Nearly always nothing is cached, and _done_s is this.
    times_s = [
        unit.waits_s + num_tokens * (unit.token_s + unit.pair_s * half)
        if rates is None and not unit.num_cached
        else _done_s(unit, num_tokens, rates)
        for unit in fitting
    ]
    first_s = min(times_s)
    first = [unit for unit, done_s in zip(fitting, times_s, strict=True) if done_s == first_s]
    return min(first, key=lambda unit: (unit.num_requests, unit.unit)).unit


def _unknown_rates(units: Sequence[PrefillUnitView]) -> tuple[float, float]:
    """(token_s, pair_s) of a unit that has none: the mean of those that have, else the model's
    ratio.
    """
    known = [unit for unit in units if unit.token_s > 0.0]
    if not known:
        return UNMEASURED.token_s, UNMEASURED.pair_s
    return sum(unit.token_s for unit in known) / len(known), sum(
        unit.pair_s for unit in known
    ) / len(known)


def _done_s(unit: PrefillUnitView, num_tokens: int, unknown: tuple[float, float] | None) -> float:
    """Predicted seconds until the unit is done with a prompt of `num_tokens` that comes now."""
    token_s, pair_s = (
        unknown if unknown is not None and unit.token_s <= 0.0 else (unit.token_s, unit.pair_s)
    )
    num_cached = min(
        unit.num_cached, num_tokens - 1
    )  # The last position is computed in any case: a token is drawn.
    return unit.waits_at_s(token_s, pair_s) + chunk_s(
        token_s, pair_s, num_cached, num_tokens - num_cached
    )


def choose_decode_unit(
    units: Sequence[DecodeUnitView], num_blocks_needed: int, num_blocks_needed_max: int
) -> str | None:
    """The unit whose scarcer resource, KV or slots, is least used after taking the request; None if
    it fits nowhere.

    `num_blocks_needed_max` is what it holds at its longest. A full unit may be chosen: its leader
    queues.
    """
    fitting = [unit for unit in units if num_blocks_needed_max <= unit.num_blocks_request]
    if not fitting:
        return None
    return min(
        fitting, key=lambda unit: (_share(unit, num_blocks_needed), unit.num_requests, unit.unit)
    ).unit


def _share(unit: DecodeUnitView, num_blocks_needed: int) -> float:
    kv_share = (unit.num_blocks_used + num_blocks_needed) / unit.num_blocks
    return max(kv_share, (unit.num_requests + 1) / unit.num_requests_max)
