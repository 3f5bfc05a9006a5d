"""Choose the prefill unit, and later the decode unit, of a request.

Goals (DeepSeek-V3/R1 inference overview). Prefill: equal work, so choose the unit that finishes
first. Decode: equal KV use and similar request counts. A unit is chosen only if the request can
ever fit; policy/admission decides if it fits now.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.core.rates import chunk_s
from hadal.policy.prefill_rates import UNMEASURED
from hadal.policy.views import DecodeUnitView, PrefillUnitView


def choose_prefill_unit(
    units: Sequence[PrefillUnitView], num_blocks_needed: int, num_tokens: int
) -> str | None:
    """Return the unit predicted to finish `num_tokens` first; None if all are full or too small.

    A unit's queue is shared by its ranks; the prompt itself runs on one rank. Cached positions are
    context, not work. A unit without measurements is assumed to be like the others.
    """
    fitting = [
        unit
        for unit in units
        if unit.num_requests < unit.num_requests_max and num_blocks_needed <= unit.num_blocks
    ]
    if not fitting:
        return None
    rates = _unknown_rates(units) if min([unit.token_s for unit in fitting]) <= 0.0 else None
    half = 0.5 * (num_tokens + 1)  # Inlines _done_s for the usual case that nothing is cached.
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
    """Return (token_s, pair_s) for units without measurements: the mean of the measured units, else
    the model's ratio.
    """
    known = [unit for unit in units if unit.token_s > 0.0]
    if not known:
        return UNMEASURED.token_s, UNMEASURED.pair_s
    return sum(unit.token_s for unit in known) / len(known), sum(
        unit.pair_s for unit in known
    ) / len(known)


def _done_s(unit: PrefillUnitView, num_tokens: int, unknown: tuple[float, float] | None) -> float:
    """Return the predicted seconds until the unit finishes a prompt of `num_tokens` that arrives now."""
    token_s, pair_s = (
        unknown if unknown is not None and unit.token_s <= 0.0 else (unit.token_s, unit.pair_s)
    )
    # The last position is always computed: a token is drawn from it.
    num_cached = min(unit.num_cached, num_tokens - 1)
    return unit.waits_at_s(token_s, pair_s) + chunk_s(
        token_s, pair_s, num_cached, num_tokens - num_cached
    )


def choose_decode_unit(
    units: Sequence[DecodeUnitView], num_blocks_needed: int, num_blocks_needed_max: int
) -> str | None:
    """Return the unit with the smallest used share of KV or slots, whichever is larger there, once
    it has the request; None if it fits nowhere.

    `num_blocks_needed_max`: blocks of the request at its longest. A full unit may be chosen: its
    leader queues.
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
