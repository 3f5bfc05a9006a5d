"""What units do, measured in a simulated world of few of them under the leaders that serve.

A decode unit is loaded with some requests a rank, as a window of the day has them, and its time per
token is read off; a prefill unit is given more than it can do. So what balancers leave of imbalance
is in these curves, and the fleet that is sized by them (sim/day/fluid) knows what its balancers are
worth. One point is one call: callers may spread them.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError, InvariantError
from hadal.core.messages import BLOCK_TOKENS
from hadal.perf.explain import StepPrice
from hadal.perf.step import StepModel
from hadal.policy.capacity import DecodePoint, decode_capacity
from hadal.policy.demand import DAY_S, Floats
from hadal.policy.scaling import Units
from hadal.roles.fleet import Fleet
from hadal.sim.day.cache import CacheDay, tokens_shared_own
from hadal.sim.day.clock import FIRST_HOUR, HOUR_S, DemandClock
from hadal.sim.day.demand import DayDemand, DemandFigures, generator, with_tokens_at
from hadal.sim.day.fluid import Day, Faults, FluidDay, Hours, UnitModel
from hadal.sim.day.study import Study
from hadal.sim.sessions import Turns, WorkloadParams, draw_rhythm, draw_turns, placed
from hadal.sim.workload import Workload, concatenate
from hadal.sim.world.seen import Reading, Requests, StepReading
from hadal.sim.world.units import kv_blocks
from hadal.sim.world.world import FleetWorld

# Some seconds of a day at the full rate: who comes, who is there already, and what the cache has
# of them.
#
# Conversations last for days, and a day has 170 million requests; drawing all that to look at a
# minute is out of the question. It is not needed either. Sittings, first and later ones alike,
# begin at a constant rate by the load clock (sim/sessions), each independent of when the others of
# its session did as far as a window much shorter than a rest can tell. So sessions are drawn whole,
# each of their sittings is put anywhere in the window or shortly before it, and what comes before
# it is known without having been played: how long the prompt is, what of it was computed, and when.
#
#     sessions that begin anywhere in the span -> their sittings 0, 1, 2 ... each put at a point of the span of its own
#     expected sittings of a kind in the span   = (sessions per second) x (sittings of the kind per session) x span


CHUNK_SESSIONS = 200_000
"""Drawn at once, so that memory stays small however long the span."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that come in [t0, t1), and those that came before t0 and run still, in the order of
    arrival.
    """

    workload: Workload
    tokens_done: Ints
    """Output tokens made before t0: 0 for what is still being prefilled then, and what comes
    later.
    """
    tokens_cached: Ints
    """First tokens of each prompt that the cache has when it comes: full blocks."""
    num_running: int
    """Requests that came before t0: the first of them all."""


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
    """The window [t0_s, t1_s) of one session in `scale`. Session numbers are unique to a sitting.

    `warm_s`: sittings that began no longer ago are there; an hour has more than 99 % of them. What
    runs at t0 has come as far as `params.first_token_s` and `params.token_s` say, and later turns
    come when they do by these. `cache`: the day whose cache it is; None: one that forgets nothing.
    A session's own text is found or not as a whole, a system prompt always. Raises ValueError if
    the window is empty, warm_s is negative or scale is below 1.
    """
    if not t0_s < t1_s or warm_s < 0 or scale < 1:
        raise ValueError(
            f"[{t0_s}, {t1_s}), warm_s {warm_s}, scale {scale}: empty, negative or below 1."
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
        # Nearly all are over by t0: they are passed over before anything else is known of them.
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
    """The same with every sitting as a session of its own; turns and what they have seen stay as
    they are.
    """
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


# One hour of the day at full fleet size: every request is one, and the roles that serve decide
# about all of them.
#
#     settle | measured seconds |        what runs at the start is there already, as far as it would have come
#
# The fleet is the one that the fluid day has at the middle of the hour. A value goes in and a value
# comes out, so that hours can be looked at in other processes.


SAMPLE_S = 1.0
"""Time between two looks at how full ranks are."""


@dataclass(frozen=True)
class HourSetting:
    """What an hour is looked at with."""

    index: int
    """Hours since second 0."""
    units: Units
    token_s: float
    """Seconds per output token before the start: it says how far what runs has come, and how much
    of it there is.
    """
    first_token_s: float


@dataclass(frozen=True)
class HourWindow:
    """What was seen in it."""

    setting: HourSetting
    reading: Reading
    hit_share: float
    """Share of the prompt tokens of those that came in the window: what was on disk, less what was
    computed all the same.
    """
    num_running: int
    """Requests that had output at the start,"""
    num_came: int
    """and all others: in prefill then, or yet to come."""
    num_events: int
    num_steps: int
    steps: Mapping[str, tuple[str, StepPrice]]
    """A unit of each role, and what its last step cost."""
    problems: tuple[str, ...]
    """What the ledgers' checks found at the end."""


def run_hour(
    study: Study, placed: Mapping[str, float], setting: HourSetting, cache: CacheDay | None
) -> HourWindow:
    """Simulate the middle of an hour. `placed`: by role, see Study.step_model."""
    with uncollected():
        return _run_hour(study, placed, setting, cache)


@contextmanager
def uncollected() -> Iterator[None]:
    """Let nobody look for garbage meanwhile: a fleet is millions of objects that stay and hardly a
    cycle, and to look through them again and again took a third of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run_hour(
    study: Study, placed: Mapping[str, float], setting: HourSetting, cache: CacheDay | None
) -> HourWindow:
    begin_s = (setting.index + 0.5) * HOUR_S
    settle_s, seconds = study.window.settle_s, study.window.seconds
    drawn = window(
        with_tokens_at(study.workload, setting.token_s, setting.first_token_s),
        begin_s,
        begin_s + settle_s + seconds,
        study.window.back_s,
        generator(study, "window", setting.index),
        cache,
    )
    world = FleetWorld(
        study.deployment(setting.units.prefill, setting.units.decode),
        {role: study.step_model(role, placed[role]) for role in (PREFILL, DECODE)},
        requests_of(drawn, begin_s, has_cache=cache is not None),
        mtp_accept=study.mtp_accept,
        sample_s=SAMPLE_S,
    )
    world.run(settle_s + seconds)
    processes = world.processes.values()
    num_events, num_steps = (
        sum(p.num_events for p in processes),
        sum(p.num_steps for p in processes),
    )
    num_running = int(world.requests.is_running.sum())
    return HourWindow(
        setting,
        world.read(settle_s, settle_s + seconds),
        _hit_share(world),
        num_running,
        len(world.requests) - num_running,
        num_events,
        num_steps,
        world.last_steps(),
        tuple(world.check()),
    )


def requests_of(drawn: Window, begin_s: float, *, has_cache: bool) -> Requests:
    """A window's requests as a world takes them: second 0 is `begin_s`, and what came before it
    comes then.
    """
    came = drawn.workload
    cached = drawn.tokens_cached if has_cache else np.zeros(len(came), np.int64)
    return Requests(
        np.maximum(came.arrival_s - begin_s, 0.0),
        came.tokens_in,
        came.tokens_out,
        cached // BLOCK_TOKENS * BLOCK_TOKENS,
        drawn.tokens_done,
    )


def _hit_share(world: FleetWorld) -> float:
    """Those that are done are more often those that had little to compute, so they alone would tell
    too much.
    """
    asked, seen = world.requests, world.seen
    came = ~asked.is_running
    done = came & np.isfinite(seen.first_token_s)
    on_disk = float(asked.tokens_cached[came].sum() / max(1, asked.tokens_in[came].sum()))
    return on_disk * float(seen.tokens_hit[done].sum() / max(1, asked.tokens_cached[done].sum()))


REQUESTS_PER_RANK = (24.0, 56.0, 88.0, 112.0, 136.0)
"""Loads at which a decode unit is looked at, as far as it can have so many requests; see
`points_at`.
"""
NEAR = 1.05
"""Two points are told apart if the batch of one is so many times the other's: between nearer ones
noise is a slope.
"""
OVERLOAD = 1.5
"""Load of a prefill unit where it is looked at, over what it is priced to do."""
_AT_S = 0.4 * DAY_S
"""The hour whose requests are taken: what they are depends little on it."""


@dataclass(frozen=True)
class UnitCurves:
    """Measured speeds of a study's units."""

    decode: tuple[tuple[float, float], ...]
    """(requests of a rank, seconds per output token of each), by the first."""
    decode_ranks: int
    prefill_computed_per_s: float
    """Tokens that a prefill unit computes in a second, always busy."""
    hit_share: float
    """Share of prompt tokens that is found, not computed."""
    batch_max: float
    """Requests of a decode rank, at most."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of a prefill unit, those found in the cache among them."""
        return self.prefill_computed_per_s / (1.0 - self.hit_share)

    def tpot_s(self, batch: Floats) -> Floats:
        """Seconds per output token with `batch` requests on a rank: straight between what was
        measured and beyond.
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
        """Return the tokens/s of a unit whose requests are promised a token every `tpot_s`. Raises
        ValueError if none is so fast.
        """
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
    """Requests of a rank at which a unit that can have so many is looked at, and with which it
    should keep its promise (`batch_within`): if these are few, there are two points for them.
    """
    found = sorted({min(at, batch_max) for at in REQUESTS_PER_RANK})
    if len(found) < 3 or found[-1] < NEAR * found[-2]:
        found = [share * batch_max for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    if promised < found[0]:
        found = [0.4 * promised, 0.8 * promised, *found]
    return tuple(found)


def batch_within(study: Study, placed: float, kv_length: float) -> float:
    """Requests of a decode rank, at most, whose step is priced within the promised TPOT; `placed`:
    see Study.step_model. Raises ConfigError if one is too many already.
    """
    model, promised_s = study.step_model(DECODE, placed), study.tpot_ms / 1e3
    low, high = 1.0, float(max(1, study.decode.max_requests))
    fastest_s = _priced_tpot_s(study, model, low, kv_length)
    if promised_s < fastest_s:
        raise ConfigError(
            f"{study.name}: no batch reaches a TPOT of {study.tpot_ms:g} ms: with one request a"
            f" rank, a decode unit of {study.decode.ranks} {study.hardware.upper()} takes"
            f" {fastest_s * 1e3:.1f} ms. Promise more (tpot_ms), or take faster hardware."
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
    """What was measured, as `UnitCurves.decode` has it. Raises ConfigError if a line cannot be
    drawn through it.
    """
    found: list[tuple[float, float]] = []
    for at, tpot_s in sorted(points):
        if not found or at >= NEAR * found[-1][0]:
            found.append((at, tpot_s))
    if len(found) < 2:
        raise ConfigError(
            "decode could not be measured at two batches: give decode.max_requests more, or let"
            " window.back_s and window.seconds be longer."
        )
    return tuple(found)


def decode_point(
    study: Study,
    placed: Mapping[str, float],
    load: DemandFigures,
    cache: CacheDay | None,
    requests_per_rank: float,
) -> tuple[float, float]:
    """Measure one decode unit with about so many requests on a rank: (how many there were, seconds
    per token).
    """
    ranks = study.decode.ranks
    token_s = _priced_tpot_s(
        study, study.step_model(DECODE, placed[DECODE]), requests_per_rank, load.kv_length
    )
    requests_per_s = ranks * requests_per_rank / (load.tokens_out * token_s)
    num_prefill = math.ceil(requests_per_s / (0.5 * _prefill_requests_per_s(study, placed, load)))
    seconds = study.window.seconds
    world = _world(
        study,
        placed,
        load,
        cache,
        num_prefill,
        requests_per_s,
        token_s,
        int(requests_per_rank),
        seconds,
    )
    reading = world.read(study.window.settle_s, study.window.settle_s + seconds)
    if not reading.decode.tokens:
        raise _nothing_seen(DECODE)
    return reading.decode.requests_per_rank, reading.decode.token_s


def prefill_point(
    study: Study, placed: Mapping[str, float], load: DemandFigures, cache: CacheDay | None
) -> float:
    """Measure one prefill unit that has always something to do: tokens that it computes in a
    second.
    """
    reading = prefill_reading(study, prefill_world(study, placed, load, cache))
    return reading.tokens / (study.window.prefill_seconds * reading.busy_share)


def prefill_world(
    study: Study, placed: Mapping[str, float], load: DemandFigures, cache: CacheDay | None
) -> FleetWorld:
    """Such a unit, when what is measured is over."""
    requests_per_s = OVERLOAD * _prefill_requests_per_s(study, placed, load)
    return _world(
        study, placed, load, cache, 1, requests_per_s, 1e-6, 0, study.window.prefill_seconds
    )


def prefill_reading(study: Study, world: FleetWorld) -> StepReading:
    """What its steps were. Raises ConfigError if there were none."""
    settle_s = study.window.settle_s
    reading = world.read(settle_s, settle_s + study.window.prefill_seconds).prefill
    if not reading.tokens:
        raise _nothing_seen(PREFILL)
    return reading


def _nothing_seen(role: str) -> ConfigError:
    return ConfigError(
        f"{role} had nothing to do while it was measured: let window.back_s and window.seconds be"
        " longer."
    )


def _prefill_requests_per_s(
    study: Study, placed: Mapping[str, float], load: DemandFigures
) -> float:
    """About what a prefill unit does, as its steps are priced."""
    priced = study.step_model(PREFILL, placed[PREFILL]).prefill(
        study.chunk_tokens, load.tokens_in, load.tokens_hit
    )
    return study.prefill.ranks * priced.tokens_per_s_gpu / (load.tokens_in - load.tokens_hit)


def _world(
    study: Study,
    placed: Mapping[str, float],
    load: DemandFigures,
    cache: CacheDay | None,
    num_prefill: int,
    requests_per_s: float,
    token_s: float,
    number: int,
    seconds: float,
) -> FleetWorld:
    """One decode unit and some prefill units, from the start to the end of what is measured."""
    settle_s = study.window.settle_s
    scale = load.requests_per_s[int(_AT_S // 3600.0)] / requests_per_s
    params = with_tokens_at(study.workload, token_s, study.window.first_token_s)
    drawn = window(
        replace(params, sessions_per_day=params.sessions_per_day / min(1.0, scale)),
        _AT_S,
        _AT_S + settle_s + seconds,
        study.window.back_s,
        generator(study, "curve", number),
        cache,
        scale=max(1.0, scale),
    )
    models = {role: study.step_model(role, placed[role]) for role in (PREFILL, DECODE)}
    world = FleetWorld(
        study.deployment(num_prefill, 1),
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
    """Requests of a decode rank, at most: as many as it has slots, or room for their KV. Raises
    ValueError for none.
    """
    blocks = kv_blocks(study.step_model(DECODE, 1.0), study.drafts)
    return min(float(study.decode.max_requests), blocks / (load.kv_length / BLOCK_TOKENS + 1.0))


# A study's day as a fluid: how many units there are at every minute, under the fleet role that
# serves.
#
# Begins some hours early with an empty fleet, so that what comes of that is not the day's. Its
# clock is that of Beijing, as the fleet sees it; hours are counted from second 0, noon, as
# everywhere else here.


EARLY_HOURS = 6
STEP_S = 60.0
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Middle:
    """The fleet at one moment."""

    units: Units
    """Units that take requests."""
    requests_per_rank: float
    """Requests of a decode rank."""
    tokens_per_s_user: float
    prefill_use: float
    """What comes over what could be done."""


@dataclass(frozen=True)
class FluidResult:
    """A day of 1,440 minutes from noon in Beijing."""

    day: Day
    prefill_nodes: Ints
    """Prefill nodes by minute; nodes of units that start and drain are owned as well."""
    decode_nodes: Ints
    middles: tuple[Middle, ...]
    """The middle of each hour."""
    capacity: tuple[float, float]
    """Tokens per second that a prefill and a decode unit were counted on, within the promise."""


def fluid_day(study: Study, curves: UnitCurves, load: DayDemand) -> FluidResult:
    """Run it. Raises ConfigError where no batch keeps the promise."""
    try:
        decode_tokens_per_s = curves.decode_tokens_per_s(study.tpot_ms / 1e3)
    except ValueError as error:
        raise ConfigError(f"{study.name}: {error}") from error
    demand, fleet_study = load.demand(), study.fleet
    fleet = Fleet(
        study.rules(),
        prefill_tokens_per_s=curves.prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        shape=demand.shape,
    )
    faults = Faults(
        fleet_study.start_s,
        fleet_study.start_spread,
        fleet_study.start_fail_share,
        node_failures_per_s=1.0 / (3600.0 * fleet_study.hours_between_failures)
        if fleet_study.hours_between_failures
        else 0.0,
        noise=fleet_study.noise,
    )
    fluid = FluidDay(
        fleet,
        demand,
        curves.unit_model(),
        faults,
        generator(study, "fluid"),
        start=HOUR_S * (FIRST_HOUR - EARLY_HOURS),
        step_s=STEP_S,
    )
    fluid.run(round(EARLY_HOURS * HOUR_S / STEP_S))
    hours = Hours(fluid.engine, fleet)
    nodes: list[tuple[int, int]] = []
    middles = []
    for minute in range(round(DAY_S / STEP_S)):
        fluid.step()
        hours.add(fluid.now_s, STEP_S)
        owned = fleet.role_to_nodes()
        nodes.append((owned[PREFILL], owned[DECODE]))
        if minute % 60 == 29:  # It has just ended: half past.
            middles.append(_middle(fluid, demand.requests_per_s(fluid.now_s)))
    prefill_nodes, decode_nodes = np.array(nodes, np.int64).T
    return FluidResult(
        hours.done(),
        prefill_nodes,
        decode_nodes,
        tuple(middles),
        (curves.prefill_tokens_per_s, decode_tokens_per_s),
    )


def _middle(fluid: FluidDay, requests_per_s: float) -> Middle:
    engine, model = fluid.engine, fluid.engine.model
    units = Units(sum(engine.prefill_units.values()), sum(engine.decode_units.values()))
    batch = sum(engine.held.values()) / max(1, len(engine.held)) / model.decode_ranks
    could = max(1, units.prefill) * model.prefill_tokens_per_s
    return Middle(
        units,
        batch,
        1.0 / float(model.tpot_s(np.array(batch))),
        requests_per_s * engine.tokens_in_request / could,
    )
