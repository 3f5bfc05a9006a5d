"""What benches of the simulated day begin with: its cache, where its experts are, and how small a
quick one is.
"""

from __future__ import annotations

from dataclasses import replace

from hadal.commands.simulate_stages import expert_ranks
from hadal.sim.day.cache import CacheDay
from hadal.sim.day.demand import cache_day
from hadal.sim.day.study import Study

QUICK_CACHE_SAMPLE = 40_000.0
"""One session in so many meets the cache in a quick run: it hits 56.2 % of the day, with the
study's sample 56.5.
"""


def cache_of(study: Study, *, quick: bool) -> CacheDay:
    """The day through its cache (half a minute of a core, for the published day)."""
    if quick:
        study = replace(study, cache=replace(study.cache, sample=QUICK_CACHE_SAMPLE))
    return cache_day(study)


def placed(study: Study) -> dict[str, float]:
    """By role, what its placement of experts leaves of imbalance, maximum over mean."""
    return {role: ranks.imbalance for role, ranks in expert_ranks(study).items()}
