"""Demand of a day: a sample of its requests, and the expected hits of each in a finite cache.

One session in SAMPLE is drawn whole, so that the day's totals follow from the workload's parameters
with little noise. The probability of a hit is measured by running a day through the cache's own
ledgers (lab/sim/day/cache).

Shapes: N requests of the sample, 24 hours from second 0 on (12:00 in Beijing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.errors import ConfigError
from hadal.lab.sim.day.cache import CacheDay, simulate_cache
from hadal.lab.sim.day.clock import DemandClock, hour_index
from hadal.lab.sim.day.published import FIRST_HOUR, HOUR_S, DemandCurve
from hadal.lab.sim.day.study import CACHE_POLICIES, PB, Study
from hadal.lab.sim.sessions import WorkloadParams, generate
from hadal.lab.sim.workload import Workload
from hadal.policy.demand import DAY_S, DayShape

SAMPLE = 100
"""Sampling rate: one session in SAMPLE is drawn, or more to reach SESSIONS_MIN sessions."""
SESSIONS_MIN = 1_000_000
CACHE_SESSIONS_MIN = 1_000
"""Minimum number of sessions for the cache's sample; with fewer, its hits are too noisy."""
QUICK_SESSIONS = 20_000
"""Sessions in a sample that only serves to find a mean."""
EARLY_S = 2 * HOUR_S
"""Seconds drawn before second 0; requests of this time may end within the day."""


@dataclass(frozen=True)
class DemandFigures:
    """Summary of a day's load: means per request, and the rate of requests."""

    requests_per_s: tuple[float, ...]
    """Requests/s by hour since second 0."""
    tokens_in: float
    tokens_hit: float
    tokens_out: float
    kv_length: float
    """Mean KV length over output tokens."""

    @property
    def hit_share(self) -> float:
        return self.tokens_hit / self.tokens_in


@dataclass(frozen=True)
class DayDemand:
    """Sample of a day's requests, with EARLY_S before the day."""

    workload: Workload
    tokens_hit: Floats
    """Expected tokens of each prompt that are found in the cache [N]."""
    scale: int
    """Sampling rate: the sample has one session in `scale`."""
    eviction_age_s: float
    """Mean time since the last use of the day's evicted blocks; inf without evictions."""

    def with_cache(self, cache: CacheDay | None) -> DayDemand:
        """Return a copy with the expected hits of another cache; None: no cache."""
        if cache is None:
            return replace(self, tokens_hit=np.zeros(len(self.workload)), eviction_age_s=np.inf)
        return replace(
            self,
            tokens_hit=cache.tokens_expected(self.workload),
            eviction_age_s=cache.eviction_age_mean_s,
        )

    @property
    def counts(self) -> Floats:
        """Number of requests of all sessions, by hour of arrival [24]."""
        return self._by_hour(np.ones(len(self.workload)))

    @property
    def tokens_in(self) -> Floats:
        """Prompt tokens of all sessions, by hour of arrival [24]."""
        return self._by_hour(self.workload.tokens_in.astype(np.float64))

    @property
    def tokens_hit_by_hour(self) -> Floats:
        return self._by_hour(self.tokens_hit)

    @property
    def tokens_out(self) -> Floats:
        """Output tokens of all sessions, by hour of the request's arrival [24]."""
        return self._by_hour(self.workload.tokens_out.astype(np.float64))

    @property
    def hit_share(self) -> float:
        """Share of the day's prompt tokens that are found in the cache."""
        return float(self.tokens_hit_by_hour.sum() / self.tokens_in.sum())

    def figures(self) -> DemandFigures:
        """Return the summary of the load."""
        count = self.counts.sum()
        return DemandFigures(
            tuple((self.counts / HOUR_S).tolist()),
            float(self.tokens_in.sum() / count),
            float(self.tokens_hit_by_hour.sum() / count),
            float(self.tokens_out.sum() / count),
            self.workload.kv_length_mean,
        )

    def demand(self) -> DemandCurve:
        """Return the demand as a rate over time, for the fluid day."""
        tokens_in, shares = self.tokens_in, self.tokens_in / self.tokens_in.sum()
        shape = DayShape(tuple(np.roll(shares, FIRST_HOUR).tolist()))
        return DemandCurve(
            float(tokens_in.sum()),
            float(self.tokens_out.sum()),
            float(tokens_in.sum() / self.counts.sum()),
            shape,
            DemandClock(shares.tolist()).rate,
        )

    @cached_property
    def _today(self) -> tuple[NDArray[np.bool_], Ints]:
        """(True for requests of the day [N], hour since second 0 of each such request)."""
        arrival_s = self.workload.arrival_s
        is_today = (arrival_s >= 0) & (arrival_s < DAY_S)
        return is_today, hour_index(arrival_s[is_today])

    def _by_hour(self, column: Floats) -> Floats:
        is_today, hours = self._today
        return np.asarray(np.bincount(hours, column[is_today], 24) * float(self.scale))


def cache_day(study: Study) -> CacheDay:
    """Run the day through the cache's ledgers, with one session in `cache.sample`, or with more
    sessions to reach CACHE_SESSIONS_MIN.
    """
    cache = study.cache
    sample = max(1.0, min(cache.sample, study.workload.sessions_per_day / CACHE_SESSIONS_MIN))
    return simulate_cache(
        study.workload,
        generator(study, "cache"),
        budget_bytes=cache.disk_pb * PB,
        scale=sample,
        policy=CACHE_POLICIES[cache.policy],
    )


def sample_of(params: WorkloadParams) -> int:
    """Return N, where one session in N is drawn: SAMPLE, or less so that at least SESSIONS_MIN are
    drawn, which describe the day well enough. A day with fewer sessions is drawn whole.
    """
    return max(1, min(SAMPLE, int(params.sessions_per_day / SESSIONS_MIN)))


def day_demand(study: Study, cache: CacheDay | None, scale: int = 0) -> DayDemand:
    """Draw the day's sample. `cache` None: no cache, so no hits. `scale` 0: as `sample_of` returns.
    Raises ConfigError if an hour of the day has no request.
    """
    scale = scale or sample_of(study.workload)
    workload = generate(study.workload, -EARLY_S, DAY_S, generator(study, "load"), scale)
    load = DayDemand(workload, np.zeros(len(workload)), scale, np.inf).with_cache(cache)
    if not load.counts.all():
        raise ConfigError("an hour of the day has no requests: raise workload.sessions_per_day.")
    return load


def kv_length_about(study: Study) -> float:
    """Return the mean KV length over output tokens, from a small sample: within a few percent."""
    scale = max(1, int(study.workload.sessions_per_day / QUICK_SESSIONS))
    workload = generate(study.workload, 0.0, DAY_S, generator(study, "load"), scale)
    return workload.kv_length_mean if len(workload) else 1.0


def with_tokens_at(params: WorkloadParams, token_s: float, first_token_s: float) -> WorkloadParams:
    """Return a copy of `params` with these times per output token and to the first token."""
    return replace(params, token_s=token_s, first_token_s=first_token_s)


_STREAMS = ("cache", "load", "fluid", "window", "curve", "experts", "ranks")


def generator(study: Study, what: str, *numbers: int) -> Generator:
    """Return the random generator of one part of the study, independent of other parts."""
    return np.random.default_rng((study.seed, _STREAMS.index(what), *numbers))
