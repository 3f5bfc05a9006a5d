"""Window of a day at the full rate, some seconds long: arrivals, requests that already run, and the
cached part of their prompts.

Conversations last for days, and a day has 170 million requests: too many to draw for one minute.
That is not necessary either. Sittings (turns without a long rest between them) begin at a constant
rate by the load clock (lab/sim/sessions). In a window much shorter than a rest, the start of a
sitting is independent of the other sittings of its session. So sessions are drawn whole, and each
of their sittings is put at a random time in the window or shortly before it. Its history is known
without simulation: the prompt's length, its previously computed part, and the time of that.

    sessions that begin anywhere in the span -> each of their sittings 0, 1, 2 ... at its own random point of the span
    expected sittings of a kind in the span   = (sessions per second) x (sittings of the kind per session) x span

Does not depend on units or roles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from hadal.core.arrays import Ints
from hadal.lab.sim.day.cache import CacheDay, tokens_shared_own
from hadal.lab.sim.day.clock import DemandClock
from hadal.lab.sim.sessions import Turns, WorkloadParams, draw_rhythm, draw_turns, placed
from hadal.lab.sim.workload import Workload, concatenate
from hadal.policy.demand import DAY_S

CHUNK_SESSIONS = 200_000
"""Number of sessions per draw, so that memory does not grow with the span."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that arrive in [t0, t1), and earlier ones that still run at t0, in arrival order."""

    workload: Workload
    tokens_done: Ints
    """Output tokens generated before t0; 0 for requests in prefill at t0 and for later arrivals."""
    tokens_cached: Ints
    """Leading tokens of each prompt that the cache has at its arrival, in full blocks."""
    num_running: int
    """Number of requests that arrived before t0; they come first in `workload`."""


def window(
    params: WorkloadParams,
    t0_s: float,
    t1_s: float,
    warm_s: float,
    rng: Generator,
    cache: CacheDay | None = None,
    *,
    scale: float = 1.0,
) -> Window:
    """Draw the requests of [t0_s, t1_s), for a sample of one session in `scale`. Each sitting is
    numbered as a session of its own.

    `warm_s`: sittings that began up to this long before t0 are included; 3600 includes more than 99
    % of those still running. `params.first_token_s` and `params.token_s` set the output of running
    requests at t0, and the times of later turns. `cache`: a day's cache, which finds a session's
    own text entirely or not at all, and a system prompt always; None: an infinite cache. Raises
    ValueError if the window is empty, warm_s is negative or scale is below 1.
    """
    if not t0_s < t1_s or warm_s < 0 or scale < 1:
        raise ValueError(
            f"the window [{t0_s}, {t1_s}) is empty, warm_s {warm_s} is negative, or scale"
            f" {scale} is below 1."
        )
    shape = DemandClock(params.shares)
    first, last = (float(shape.load_s(at_s + params.lead_s)) for at_s in (t0_s - warm_s, t1_s))
    left = int(rng.poisson(params.sessions_per_day / scale * (last - first) / DAY_S))
    drawn: list[Workload] = []
    next_session = 0
    while left or not drawn:
        count = min(left, CHUNK_SESSIONS)
        turns = _sittings_apart(
            draw_turns(params, draw_rhythm(params, count, rng), rng), next_session
        )
        sittings, sitting = np.unique(turns.session, return_inverse=True)
        load_s = rng.uniform(first, last, len(sittings))[sitting]
        # Nearly all turns are over by t0: dropping them first saves most of the work.
        came_s = shape.at_s(load_s) - params.lead_s + turns.lag_s
        runs = np.flatnonzero(
            came_s + params.first_token_s + turns.tokens_out * params.token_s > t0_s
        )
        drawn.append(placed(params, turns, runs, load_s[runs], shape, t0_s - warm_s, t1_s))
        next_session += len(sittings)
        left -= count
    workload = concatenate(drawn)
    runs_s = t0_s - workload.arrival_s - params.first_token_s
    done = np.clip(np.floor(runs_s / params.token_s), 0, workload.tokens_out - 1).astype(np.int64)
    num_running = int(np.searchsorted(workload.arrival_s, t0_s))
    return Window(workload, done, _cached(workload, cache, rng), num_running)


def _sittings_apart(turns: Turns, first_session: int) -> Turns:
    """Return the turns with a session per sitting; `turn` and `tokens_seen` are unchanged."""
    begins = np.concatenate(
        ([True], (np.diff(turns.session) != 0) | (np.diff(turns.sitting) != 0))
    )[: len(turns.turn)]
    sitting = np.cumsum(begins) - 1
    return replace(
        turns, session=first_session + sitting, lag_s=turns.lag_s - turns.lag_s[begins][sitting]
    )


def _cached(workload: Workload, cache: CacheDay | None, rng: Generator) -> Ints:
    if cache is None:
        return workload.tokens_findable
    shared, own = tokens_shared_own(workload)
    share = cache.found_share(workload.arrival_s, workload.idle_s)
    return shared + np.where(rng.random(len(workload)) < share, own, 0)
