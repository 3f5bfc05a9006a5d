"""Throughput curves of units, measured in a simulated world of a few units under the server's own
leaders (schedulers).

A decode unit gets a number of requests per rank, as a window of the day has them, and its time per
token is measured. A prefill unit gets more load than it can process. So the curves include the
imbalance that balancers leave, and the fleet sized by them (lab/sim/day/fluid) depends on its
balancers. One point is one call, so callers may compute points in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hadal.core.arrays import Floats
from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError, InvariantError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.day.cache import CacheDay
from hadal.lab.sim.day.demand import DemandFigures, generator, with_tokens_at
from hadal.lab.sim.day.hour_window import requests_of, uncollected
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.vessels import UnitModel
from hadal.lab.sim.day.window import window
from hadal.lab.sim.world.seen import StepReading
from hadal.lab.sim.world.units import kv_blocks
from hadal.lab.sim.world.world import FleetWorld
from hadal.policy.capacity import DecodePoint, decode_capacity
from hadal.policy.demand import DAY_S

REQUESTS_PER_RANK = (24.0, 56.0, 88.0, 112.0, 136.0)
"""Requests per rank at which a decode unit is measured, up to its largest batch (`points_at`)."""
NEAR = 1.05
"""Smallest ratio of neighbouring batches; between nearer points noise looks like a slope."""
OVERLOAD = 1.5
"""Load of a measured prefill unit as a multiple of its priced throughput."""
_AT_S = 0.4 * DAY_S
"""Start of the drawn window, seconds since noon in Beijing; lengths depend little on it."""


@dataclass(frozen=True)
class UnitCurves:
    """Measured speeds of a study's units."""

    decode: tuple[tuple[float, float], ...]
    """(requests per rank, seconds per output token of each), in ascending order of requests."""
    decode_ranks: int
    prefill_computed_per_s: float
    """Tokens/s that a prefill unit computes when always busy."""
    hit_share: float
    """Share of prompt tokens found in the cache instead of computed."""
    batch_max: float
    """Maximum number of requests of a decode rank."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens/s of a prefill unit, including tokens found in the cache."""
        return self.prefill_computed_per_s / (1.0 - self.hit_share)

    def tpot_s(self, batch: Floats) -> Floats:
        """Return the seconds per output token with `batch` requests per rank: linear between
        measured points (made non-decreasing) and beyond, but at least half of the first point's.
        """
        at, tpot_s = (np.array(column) for column in zip(*self.decode, strict=True))
        tpot_s = np.maximum.accumulate(tpot_s)
        slope = (tpot_s[-1] - tpot_s[-2]) / (at[-1] - at[-2])
        first = (tpot_s[1] - tpot_s[0]) / (at[1] - at[0])
        batch = np.asarray(batch, np.float64)
        inside = np.interp(batch, at, tpot_s)
        below = np.maximum(tpot_s[0] - first * (at[0] - batch), 0.5 * tpot_s[0])
        above = tpot_s[-1] + slope * (batch - at[-1])
        return np.asarray(np.where(batch > at[-1], above, np.where(batch < at[0], below, inside)))

    def decode_tokens_per_s(self, tpot_s: float) -> float:
        """Return a unit's tokens/s at TPOT `tpot_s`. Raises ValueError if no batch meets it."""
        batches = np.arange(1.0, self.batch_max + 1.0)
        return decode_capacity(
            [
                DecodePoint(float(tpot), float(self.decode_ranks * batch / tpot))
                for batch, tpot in zip(batches, self.tpot_s(batches), strict=True)
            ],
            tpot_s,
        )

    def unit_model(self) -> UnitModel:
        """Return the curves in the form that the fluid day takes."""
        return UnitModel(self.prefill_tokens_per_s, self.decode_ranks, self.tpot_s, self.batch_max)


def points_at(batch_max: float, promised: float = math.inf) -> tuple[float, ...]:
    """Return the requests per rank at which a unit with at most `batch_max` per rank is measured.
    `promised`: largest batch expected to meet the TPOT target (`batch_within`); if it is less than
    all other points, two points below it are added.
    """
    found = sorted({min(at, batch_max) for at in REQUESTS_PER_RANK})
    if len(found) < 3 or found[-1] < NEAR * found[-2]:
        found = [share * batch_max for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    if promised < found[0]:
        found = [0.4 * promised, 0.8 * promised, *found]
    return tuple(found)


def batch_within(study: Study, placed: float, kv_length: float) -> float:
    """Return the largest number of requests per decode rank with a priced TPOT within the target.
    `placed`: see Study.step_model. Raises ConfigError if even one request is too slow.
    """
    model, promised_s = study.step_model(DECODE, placed), study.tpot_ms / 1e3
    low, high = 1.0, float(max(1, study.decode.max_requests))
    fastest_s = _priced_tpot_s(study, model, low, kv_length)
    if promised_s < fastest_s:
        raise ConfigError(
            f"{study.name}: no batch reaches a TPOT of {study.tpot_ms:g} ms: with one"
            f" request per rank, a decode unit of {study.decode.ranks}"
            f" {study.hardware.upper()} takes {fastest_s * 1e3:.1f} ms. Raise tpot_ms, or"
            " use faster hardware."
        )
    if _priced_tpot_s(study, model, high, kv_length) <= promised_s:
        return high
    for _ in range(20):
        middle = 0.5 * (low + high)
        is_kept = _priced_tpot_s(study, model, middle, kv_length) <= promised_s
        low, high = (middle, high) if is_kept else (low, middle)
    return low


def _priced_tpot_s(
    study: Study, model: StepModel, requests_per_rank: float, kv_length: float
) -> float:
    priced = model.decode(requests_per_rank, kv_length, study.drafts, mtp_accept=study.mtp_accept)
    assert priced.tokens_per_s_user is not None
    return 1.0 / priced.tokens_per_s_user


def decode_curve(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return measured points in the form of `UnitCurves.decode`. Raises ConfigError if fewer than
    two distinct batches were measured.
    """
    found: list[tuple[float, float]] = []
    for at, tpot_s in sorted(points):
        if not found or at >= NEAR * found[-1][0]:
            found.append((at, tpot_s))
    if len(found) < 2:
        raise ConfigError(
            "decode could not be measured at two batch sizes: raise decode.max_requests,"
            " or window.back_s and window.seconds."
        )
    return tuple(found)


def decode_point(
    study: Study,
    placed: Mapping[str, float],
    load: DemandFigures,
    cache: CacheDay | None,
    requests_per_rank: float,
) -> tuple[float, float]:
    """Measure one decode unit with about `requests_per_rank`. Return (measured requests per rank,
    seconds per token). Raises ConfigError if it had nothing to do.
    """
    ranks = study.decode.ranks
    token_s = _priced_tpot_s(
        study, study.step_model(DECODE, placed[DECODE]), requests_per_rank, load.kv_length
    )
    requests_per_s = ranks * requests_per_rank / (load.tokens_out * token_s)
    num_prefill = math.ceil(requests_per_s / (0.5 * _prefill_requests_per_s(study, placed, load)))
    seconds = study.window.seconds
    point = _Point(num_prefill, requests_per_s, token_s, seconds, int(requests_per_rank))
    world = _world(study, placed, load, cache, point)
    reading = world.read(study.window.settle_s, study.window.settle_s + seconds)
    if not reading.decode.tokens:
        raise _nothing_seen(DECODE)
    return reading.decode.requests_per_rank, reading.decode.token_s


def prefill_point(
    study: Study, placed: Mapping[str, float], load: DemandFigures, cache: CacheDay | None
) -> float:
    """Measure one prefill unit under overload. Return the tokens/s that it computes when busy."""
    reading = prefill_reading(study, prefill_world(study, placed, load, cache))
    return reading.tokens / (study.window.prefill_seconds * reading.busy_share)


def prefill_world(
    study: Study, placed: Mapping[str, float], load: DemandFigures, cache: CacheDay | None
) -> FleetWorld:
    """Return the world of one overloaded prefill unit, at the end of the measured time."""
    requests_per_s = OVERLOAD * _prefill_requests_per_s(study, placed, load)
    point = _Point(1, requests_per_s, 1e-6, study.window.prefill_seconds)
    return _world(study, placed, load, cache, point)


def prefill_reading(study: Study, world: FleetWorld) -> StepReading:
    """Return the measured prefill steps of a world. Raises ConfigError if there were none."""
    settle_s = study.window.settle_s
    reading = world.read(settle_s, settle_s + study.window.prefill_seconds).prefill
    if not reading.tokens:
        raise _nothing_seen(PREFILL)
    return reading


def _nothing_seen(role: str) -> ConfigError:
    return ConfigError(
        f"{role} had no work during its measurement: raise window.back_s and window.seconds."
    )


def _prefill_requests_per_s(
    study: Study, placed: Mapping[str, float], load: DemandFigures
) -> float:
    """Return about how many requests/s a prefill unit can compute, by the step model."""
    priced = study.step_model(PREFILL, placed[PREFILL]).prefill(
        study.chunk_tokens, load.tokens_in, load.tokens_hit
    )
    return study.prefill.ranks * priced.tokens_per_s_gpu / (load.tokens_in - load.tokens_hit)


@dataclass(frozen=True)
class _Point:
    """Load at which one decode unit and its prefill units run, to measure either role."""

    num_prefill: int
    requests_per_s: float
    token_s: float
    """Expected seconds per output token."""
    seconds: float
    """Measured seconds, after the settling."""
    stream: int = 0
    """Number of the random stream."""


def _world(
    study: Study,
    placed: Mapping[str, float],
    load: DemandFigures,
    cache: CacheDay | None,
    point: _Point,
) -> FleetWorld:
    """Run the point's units from the start to the end of the measured time. Raises InvariantError
    if the ledgers' checks find a problem.
    """
    settle_s, seconds = study.window.settle_s, point.seconds
    scale = load.requests_per_s[int(_AT_S // 3600.0)] / point.requests_per_s
    params = with_tokens_at(study.workload, point.token_s, study.window.first_token_s)
    drawn = window(
        replace(params, sessions_per_day=params.sessions_per_day / min(1.0, scale)),
        _AT_S,
        _AT_S + settle_s + seconds,
        study.window.back_s,
        generator(study, "curve", point.stream),
        cache,
        scale=max(1.0, scale),
    )
    models = {role: study.step_model(role, placed[role]) for role in (PREFILL, DECODE)}
    world = FleetWorld(
        study.deployment(point.num_prefill, 1),
        models,
        requests_of(drawn, _AT_S, has_cache=cache is not None),
        mtp_accept=study.mtp_accept,
    )
    with uncollected():
        world.run(settle_s + seconds)
    problems = world.check()
    if problems:
        raise InvariantError(f"{study.name}: {problems[0]}")
    return world


def batch_max(study: Study, load: DemandFigures) -> float:
    """Return the largest number of requests per decode rank that its slots and KV blocks allow.
    Raises ValueError if there is no memory for KV.
    """
    blocks = kv_blocks(study.step_model(DECODE, 1.0), study.drafts)
    return min(float(study.decode.max_requests), blocks / (load.kv_length / BLOCK_TOKENS + 1.0))
