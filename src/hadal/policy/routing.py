"""Choose the prefill unit, and later the decode unit, of a request.

Goals (DeepSeek-V3/R1 inference overview): equal prefill work; equal KV use and similar request counts in decode.
A unit is chosen only if the request can ever fit; whether it fits now is the admission's question.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import DecodeUnitView, PrefillUnitView


def choose_prefill_unit(units: Sequence[PrefillUnitView], num_blocks_needed: int) -> str | None:
    """The unit with the fewest tokens waiting; None if every one is full or too small."""
    fitting = [
        unit for unit in units
        if unit.num_requests < unit.num_requests_max and num_blocks_needed <= unit.num_blocks
    ]  # fmt: skip
    if not fitting:
        return None
    return min(fitting, key=lambda unit: (unit.num_tokens_waiting, unit.num_requests, unit.unit)).unit


def choose_decode_unit(
    units: Sequence[DecodeUnitView], num_blocks_needed: int, num_blocks_needed_max: int
) -> str | None:
    """The unit whose scarcer resource, KV or slots, is least used after taking the request; None if it fits nowhere.

    `num_blocks_needed_max` is what it holds at its longest. A full unit may be chosen: its leader queues.
    """
    fitting = [unit for unit in units if num_blocks_needed_max <= unit.num_blocks_request]
    if not fitting:
        return None
    return min(fitting, key=lambda unit: (_share(unit, num_blocks_needed), unit.num_requests, unit.unit)).unit


def _share(unit: DecodeUnitView, num_blocks_needed: int) -> float:
    kv_share = (unit.num_blocks_used + num_blocks_needed) / unit.num_blocks
    return max(kv_share, (unit.num_requests + 1) / unit.num_requests_max)
