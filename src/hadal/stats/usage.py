"""Use of paid GPU time: a unit's time, divided among the tenants that it worked for.

    time of a unit   |--used--|    idle    |------used------|  idle |
    tenant a          ========              ====
    tenant b             =====                ==============

A unit is in use while it has a generation. A generation is on its prefill unit from the receipt of
its request to its first token, and on its decode unit from then to its last. Each moment is divided
among the present generations in proportion to their rates: tokens computed of a prompt, or drawn,
over the time that they took. Idle time is divided among tenants in proportion to their use. So the
sums equal the paid time, to the last GPU-second. Two assumptions: this division of a step's time
over its requests, and that a waiting prompt counts as work. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hadal.core.facts import NodesFact, micros
from hadal.stats.prices import HOUR_S

_HOUR_US = HOUR_S * 1_000_000


class WorkSpan(NamedTuple):
    """Time of a generation on a unit."""

    unit: str
    model: str
    tenant: str
    from_us: int
    to_us: int
    num_tokens: int


@dataclass(frozen=True)
class TenantUse:
    """GPU time and its cost, of one tenant or of all."""

    used_rank_us: float = 0.0
    idle_rank_us: float = 0.0
    used_micro_usd: float = 0.0
    idle_micro_usd: float = 0.0

    def as_json(self) -> dict[str, float]:
        """Return flat fields, named with their units."""
        return {
            "gpu_hours_used": self.used_rank_us / _HOUR_US,
            "gpu_hours_idle": self.idle_rank_us / _HOUR_US,
            "cost_used_usd": self.used_micro_usd / 1e6,
            "cost_idle_usd": self.idle_micro_usd / 1e6,
        }


def uses_of(
    nodes: Iterable[NodesFact], spans: Sequence[WorkSpan], from_us: int, to_us: int
) -> tuple[dict[str, TenantUse], TenantUse]:
    """Return (tenant -> use between two times, sum of all uses). If no tenant used anything, all
    time is idle and belongs to no tenant.
    """
    unit_to_spans: dict[tuple[str, str], list[WorkSpan]] = {}
    for span in spans:
        if span.to_us > span.from_us:
            unit_to_spans.setdefault((span.unit, span.model), []).append(span)
    time_us: dict[str, float] = {}
    cost: dict[str, float] = {}
    paid_us = paid_cost = 0.0
    for fact in nodes:
        first, last = max(from_us, micros(fact.from_s)), min(to_us, micros(fact.to_s))
        if last <= first:
            continue
        its = (
            unit_to_spans.get((fact.unit, fact.model), [])
            if fact.model
            else [one for key, many in unit_to_spans.items() if key[0] == fact.unit for one in many]
        )
        price = fact.gpu_hour_micro_usd / _HOUR_US
        paid_us += fact.num_ranks * (last - first)
        paid_cost += fact.num_ranks * (last - first) * price
        for tenant, used_us in _shares(its, first, last).items():
            time_us[tenant] = time_us.get(tenant, 0.0) + fact.num_ranks * used_us
            cost[tenant] = cost.get(tenant, 0.0) + fact.num_ranks * used_us * price
    idle_us, idle_cost = paid_us - sum(time_us.values()), paid_cost - sum(cost.values())
    return _with_idle(time_us, cost, idle_us, idle_cost), TenantUse(
        sum(time_us.values()), max(0.0, idle_us), sum(cost.values()), max(0.0, idle_cost)
    )


def _with_idle(
    time_us: Mapping[str, float], cost: Mapping[str, float], idle_us: float, idle_cost: float
) -> dict[str, TenantUse]:
    used_us = sum(time_us.values())
    return {
        tenant: TenantUse(
            mine,
            max(0.0, idle_us) * mine / used_us,
            cost[tenant],
            max(0.0, idle_cost) * mine / used_us,
        )
        for tenant, mine in sorted(time_us.items())
        if mine > 0.0
    }


def _shares(spans: Sequence[WorkSpan], first_us: int, last_us: int) -> dict[str, float]:
    """Return tenant -> microseconds of a unit; their sum is the time covered by any span."""
    spans = [span for span in spans if span.from_us < last_us and span.to_us > first_us]
    if not spans:
        return {}
    num_tokens, begins, ends = (
        np.array(column, np.int64)
        for column in zip(*((s.num_tokens, s.from_us, s.to_us) for s in spans), strict=True)
    )
    rates: npt.NDArray[np.float64] = np.maximum(num_tokens, 1) / (ends - begins)
    begins, ends = np.maximum(begins, first_us), np.minimum(ends, last_us)
    times = np.unique(np.concatenate([begins, ends]))
    at_begin, at_end = np.searchsorted(times, begins), np.searchsorted(times, ends)
    num_changes, rate_changes = np.zeros(times.size, np.int64), np.zeros(times.size)
    for at, sign in ((at_begin, 1), (at_end, -1)):
        np.add.at(num_changes, at, sign)
        np.add.at(rate_changes, at, sign * rates)
    # Integer counts mark the idle moments, because summed rates leave a rounding error.
    is_used = np.cumsum(num_changes)[:-1] > 0
    rate = np.maximum(np.cumsum(rate_changes)[:-1], rates.min())
    # Microseconds that a rate of 1 receives from the beginning up to each time.
    got = np.concatenate([[0.0], np.cumsum(np.where(is_used, np.diff(times) / rate, 0.0))])
    shares: dict[str, float] = {}
    for span, share in zip(spans, (rates * (got[at_end] - got[at_begin])).tolist(), strict=True):
        shares[span.tenant] = shares.get(span.tenant, 0.0) + share
    return shares
