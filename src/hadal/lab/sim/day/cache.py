"""Day of the KV cache on disk for a sample of the sessions, with the server's own ledgers
(lab/sim/day/disk_replay).

One session in `scale` uses a cache of 1/`scale` of the bytes (SHARDS, see Workload.sample).
Evictions depend on the ratio of the bytes written between two uses to the cache's size, and both
shrink alike. A prompt's blocks are written when they are computed. An answer's blocks are written
when it is complete, including R1's reasoning: decode writes all blocks that it fills, because it
cannot foresee the next turn.

Bytes are those of DeepSeek-V3: 61 layers x 576 values x 2 bytes per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from hadal.core.arrays import Floats, Ints
from hadal.core.cache import NAME_BYTES, slice_of, split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.sim.day.clock import hour_index
from hadal.lab.sim.day.disk_replay import DiskReplay
from hadal.lab.sim.sessions import WorkloadParams, generate
from hadal.lab.sim.workload import Workload
from hadal.policy.demand import DAY_S
from hadal.policy.eviction import Arc, Lru

KV_BYTES_TOKEN = 61 * 576 * 2
BLOCK_BYTES = KV_BYTES_TOKEN * BLOCK_TOKENS
BUDGET_BYTES = 180 * 16 * 14 * 2**40 / 3
"""14.8 PB: the cluster of 3FS's README, 180 nodes with 16 disks of 14 TiB, with three copies of
everything (assumed). Half of the bytes that the published day writes, so blocks stay for hours, as
DeepSeek states for its cache.
"""

IDLE_EDGES_S = (
    0.0,
    60.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    7200.0,
    14400.0,
    28800.0,
    57600.0,
    115200.0,
    np.inf,
)
RATIO_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.35, 1.7, 2.2, 3.0, np.inf)
"""Interval edges of the ratio: time since the last use over the mean age of evicted blocks."""


@dataclass(frozen=True, slots=True)
class CacheDay:
    """Cache activity of one day in the sample; multiply counts by `scale` for all sessions."""

    scale: float
    num_disk_slots: int
    workload: Workload
    """Requests of that day."""
    tokens_found: Ints
    """Tokens of each prompt that were found in the cache instead of computed."""
    blocks_written: Ints
    """Blocks written, by hour since second 0."""
    blocks_evicted: Ints
    """Blocks evicted, by hour since second 0."""
    eviction_age_s: Floats
    """Mean time since the last use of evicted blocks, by hour since second 0; inf without any."""

    @property
    def hit_share(self) -> float:
        """Share of the day's prompt tokens that were found in the cache."""
        return float(self.tokens_found.sum() / self.workload.tokens_in.sum())

    @property
    def eviction_age_mean_s(self) -> float:
        """Mean time since the last use of the day's evicted blocks; inf without evictions."""
        some = self.blocks_evicted > 0
        return (
            float(np.average(self.eviction_age_s[some], weights=self.blocks_evicted[some]))
            if some.any()
            else np.inf
        )

    def by_hour(self) -> dict[str, Floats]:
        """Return sums over all sessions [24]: `tokens_in`, `tokens_hit`, `tokens_out`."""
        came = self.workload
        hour = hour_index(came.arrival_s)
        columns = {
            "tokens_in": came.tokens_in,
            "tokens_hit": self.tokens_found,
            "tokens_out": came.tokens_out,
        }
        return {
            name: np.asarray(np.bincount(hour, column, 24) * self.scale)
            for name, column in columns.items()
        }

    def hits_by_idle(self) -> tuple[Ints, Floats]:
        """Return (findable tokens of own sessions, share found) by interval of IDLE_EDGES_S."""
        return self._hits_by(self.workload.idle_s, IDLE_EDGES_S)

    def found_share(self, at_s: Floats, idle_s: Floats) -> Floats:
        """Return the probability that blocks last used `idle_s` before `at_s` are still cached.

        It depends on the ratio of `idle_s` to the mean age of blocks evicted in that hour, as
        measured over the day, and is interpolated between the middles of RATIO_EDGES. Raises
        ValueError if no session of the day had a second request.
        """
        total, share = self._hits_by(
            self._ratio(self.workload.arrival_s, self.workload.idle_s), RATIO_EDGES
        )
        middle = np.array([*np.add(RATIO_EDGES[:-2], RATIO_EDGES[1:-1]) / 2, 2 * RATIO_EDGES[-2]])
        known = total > 0
        if not known.any():
            raise ValueError(
                "no session of this day has a second turn, so cache hits cannot be measured."
            )
        return np.interp(self._ratio(at_s, idle_s), middle[known], share[known])

    def tokens_expected(self, workload: Workload) -> Floats:
        """Return the expected cached tokens of each request of another workload: a larger sample
        than the cache's own has less noise.
        """
        shared, own = tokens_shared_own(workload)
        share = np.where(own > 0, self.found_share(workload.arrival_s, workload.idle_s), 0.0)
        return np.asarray(shared + own * share)

    def _ratio(self, at_s: Floats, idle_s: Floats) -> Floats:
        ratio = np.full(len(idle_s), np.inf)
        np.divide(
            idle_s, self.eviction_age_s[hour_index(at_s)], out=ratio, where=np.isfinite(idle_s)
        )
        return ratio

    def _hits_by(self, values: Floats, edges: tuple[float, ...]) -> tuple[Ints, Floats]:
        shared, own = tokens_shared_own(self.workload)
        goes_on = own > 0
        bin_index = np.digitize(values[goes_on], edges[1:-1])
        total = np.bincount(bin_index, own[goes_on], len(edges) - 1)
        found = np.bincount(
            bin_index, np.maximum(self.tokens_found - shared, 0)[goes_on], len(edges) - 1
        )
        return total.astype(np.int64), found / np.maximum(total, 1)


def tokens_shared_own(workload: Workload) -> tuple[Ints, Ints]:
    """Split the findable tokens of each prompt: (tokens of its system prompt, which are always
    cached because all its sessions use them; tokens of its own session).
    """
    findable = workload.tokens_findable
    shared = np.minimum(workload.prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS, findable)
    return shared, np.where(np.isfinite(workload.idle_s), findable - shared, 0)


def simulate_cache(
    params: WorkloadParams,
    rng: Generator,
    *,
    budget_bytes: float = BUDGET_BYTES,
    scale: float = 8000.0,
    warm_s: float = 2 * DAY_S,
    policy: type[Arc | Lru] = Arc,
    keeps_reasoned: bool = True,
) -> CacheDay:
    """Simulate one day from second 0, after `warm_s` of the same load. A day fills the default
    budget, and Arc needs some hours more to learn how to divide it. `keeps_reasoned`: True if
    answers that began with reasoning are written like all others, though no next turn can use them.
    """
    workload = generate(params, -warm_s, DAY_S, rng, scale)
    end_s = workload.arrival_s + params.first_token_s + workload.tokens_out * params.token_s
    if not keeps_reasoned:
        end_s = np.where(workload.tokens_reasoning > 0, np.inf, end_s)
    # More disk slots than all blocks of the workload change nothing, and their table takes memory.
    most = int(((workload.tokens_in + workload.tokens_out) // BLOCK_TOKENS).sum())
    num_disk_slots = max(1, min(int(budget_bytes / BLOCK_BYTES / scale), most))
    return replay(workload, end_s, num_disk_slots, policy, scale=scale)


def replay(
    workload: Workload,
    end_s: Floats,
    num_disk_slots: int,
    policy: type[Arc | Lru] = Arc,
    *,
    scale: float = 1.0,
) -> CacheDay:
    """Run requests through a cache of `num_disk_slots`. Requests before second 0 warm it and are
    not counted. `end_s`: time at which each answer is complete and written; inf: it is never
    written.
    """
    disk = DiskReplay(num_disk_slots, policy)
    last_use_s: dict[bytes, float] = {}
    written, evicted = np.zeros(24, np.int64), np.zeros(24, np.int64)
    ages_s = np.zeros(24)
    found = np.zeros(len(workload), np.int64)
    times = np.concatenate((workload.arrival_s, end_s))
    hours = hour_index(np.where(np.isfinite(times), times, 0.0))
    order = np.argsort(times, kind="stable")
    for event in order[np.isfinite(times[order])].tolist():
        index, is_end = event % len(workload), event >= len(workload)
        at_s = float(times[event])
        chain = workload.chain(index, with_output=is_end)
        first = int(workload.tokens_in[index]) // BLOCK_TOKENS if is_end else 0
        if not is_end:
            usable = slice_of(chain, 0, (int(workload.tokens_in[index]) - 1) // BLOCK_TOKENS)
            first = disk.find(at_s, usable)
            found[index] = first * BLOCK_TOKENS
            last_use_s.update(dict.fromkeys(split(usable[: first * NAME_BYTES]), at_s))
        kept, gone = disk.store(chain, first)
        last_use_s.update(dict.fromkeys(kept, at_s))
        gone_s = [last_use_s.pop(name) for name in gone]
        if 0 <= at_s < DAY_S:
            written[hours[event]] += len(kept)
            evicted[hours[event]] += len(gone)
            ages_s[hours[event]] += at_s * len(gone) - sum(gone_s)
    assert disk.check() == [], disk.check()
    is_counted = workload.arrival_s >= 0
    age_s = np.divide(ages_s, evicted, out=np.full(24, np.inf), where=evicted > 0)
    return CacheDay(
        scale, num_disk_slots, workload.take(is_counted), found[is_counted], written, evicted, age_s
    )
