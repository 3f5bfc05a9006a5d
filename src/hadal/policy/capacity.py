"""Compute how many units a latency SLO needs, from measured or predicted throughput of one unit.

Decode: a unit's batch may grow until the time per output token (TPOT) reaches the SLO. Prefill:
prompts arrive at random and queue behind each other, so an SLO on the time to the first token
(TTFT) bounds how busy units may be. Independent of hardware: the caller supplies throughput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

USE_MAX = 0.98
"""Highest planned utilization under any SLO: above it, waiting times explode."""


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Performance of a decode unit at one batch size."""

    tpot_s: float
    """Seconds per output token of a request."""
    tokens_per_s: float
    """Tokens that the whole unit computes in a second."""


def decode_capacity(points: Sequence[DecodePoint], tpot_s: float) -> float:
    """Return the tokens per second of a unit at one token per request every `tpot_s`, linear
    between the given points.

    The result never exceeds the points' highest throughput, since nothing is known beyond it.
    Raises ValueError if there is no point, or if no batch is that fast.
    """
    if not points:
        raise ValueError("decode_capacity needs at least one measured or priced point.")
    ordered = sorted(points, key=lambda point: point.tpot_s)
    if tpot_s < ordered[0].tpot_s:
        raise ValueError(
            f"no batch reaches a TPOT of {tpot_s * 1e3:g} ms; the fastest takes"
            f" {ordered[0].tpot_s * 1e3:g} ms. Allow a longer TPOT, or use faster hardware."
        )
    # A larger batch never lowers a unit's best throughput: a point that is slower and does less is
    # ignored.
    best = np.maximum.accumulate([point.tokens_per_s for point in ordered])
    return float(np.interp(tpot_s, [point.tpot_s for point in ordered], best))


def prefill_use(service_s: float, ttft_s: float, num_servers: int, variation: float = 1.0) -> float:
    """Return the highest utilization at which the mean time to the first token is at most `ttft_s`.

    Sakasegawa's approximation of the mean wait in a queue of c = `num_servers` equal servers
    (1977), with Poisson arrivals:

        wait = (1 + variation^2) / 2 x service x use^(sqrt(2 (c + 1)) - 1) / (c (1 - use))

    Args:
        service_s: mean seconds of a prompt once it has begun.
        num_servers: prompts, or packed steps, that the fleet's units work on at once.
        variation: standard deviation over mean of the service time.

    Raises ValueError if even an idle unit is too slow, or if `num_servers` is below 1.
    """
    if service_s >= ttft_s:
        raise ValueError(
            f"a prompt takes {service_s:g} s by itself, and the TTFT limit is {ttft_s:g} s: raise"
            " the limit, or use units that prefill faster."
        )
    if num_servers < 1:
        raise ValueError("num_servers must be at least 1.")
    power = math.sqrt(2.0 * (num_servers + 1)) - 1.0

    def is_kept(use: float) -> bool:
        wait_s = 0.5 * (1.0 + variation**2) * service_s * use**power / (num_servers * (1.0 - use))
        return bool(service_s + wait_s <= ttft_s)

    low, high = 0.0, USE_MAX
    if is_kept(high):
        return high
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def units_needed(tokens_per_s: float, unit_tokens_per_s: float, use: float) -> float:
    """Return how many units, a fraction, do `tokens_per_s` if each uses the share `use` of its
    throughput.

    Raises ValueError for a throughput or share that is not positive.
    """
    if unit_tokens_per_s <= 0.0 or not 0.0 < use <= 1.0:
        raise ValueError(
            f"a unit has {unit_tokens_per_s:g} tokens/s and use {use:g}; the first must be above"
            " 0, use above 0 and at most 1."
        )
    return tokens_per_s / (unit_tokens_per_s * use)
