"""Window of one hour at full fleet size: the server's own roles serve every simulated request.

    settle | measured seconds |        requests that run at the start have part of their output

Its units are those of the fluid day in the middle of the hour. Input and output are values, so
hours can be simulated in other processes. Does not depend on the fleet role or on other hours.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hadal.core.config import DECODE, PREFILL
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.perf.explain import StepPrice
from hadal.lab.sim.day.cache import CacheDay
from hadal.lab.sim.day.demand import generator, with_tokens_at
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.window import Window, window
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.seen import Reading
from hadal.lab.sim.world.world import FleetWorld
from hadal.policy.scaling import Units

SAMPLE_S = 1.0
"""Seconds between two samples of KV use and requests of ranks."""


@dataclass(frozen=True)
class HourSetting:
    """Input of one hour's window."""

    index: int
    """Hours since second 0."""
    units: Units
    token_s: float
    """TPOT before the start, seconds: sets how many requests run at the start, and their output."""
    first_token_s: float
    """TTFT before the start, seconds."""


@dataclass(frozen=True)
class HourWindow:
    """Result of one hour's window."""

    setting: HourSetting
    reading: Reading
    hit_share: float
    """Share of prompt tokens cached, not computed, over requests that did not run at the start."""
    num_running: int
    """Number of requests that had output at the start."""
    num_came: int
    """Number of all other requests: in prefill at the start, or later arrivals."""
    num_events: int
    num_steps: int
    steps: Mapping[str, tuple[str, StepPrice]]
    """Role -> (a unit, price of its last step)."""
    problems: tuple[str, ...]
    """Problems that the ledgers' checks found at the end."""


def run_hour(
    study: Study, placed: Mapping[str, float], setting: HourSetting, cache: CacheDay | None
) -> HourWindow:
    """Simulate the middle of an hour. `placed`: see Study.step_model. `cache` None: no hits."""
    with uncollected():
        return _run_hour(study, placed, setting, cache)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside: it took a third of the time, and cycles are rare."""
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
    )
    world.sample_every(SAMPLE_S)
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
    """Return a window's requests with times since `begin_s`; earlier arrivals get time 0."""
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
    """Return `HourWindow.hit_share`: the cached share of all requests, times the used share of the
    cached tokens of prefilled ones. Prefilled requests alone would be biased: those with little to
    compute finish earlier.
    """
    asked, seen = world.requests, world.seen
    came = ~asked.is_running
    done = came & np.isfinite(seen.first_token_s)
    on_disk = float(asked.tokens_cached[came].sum() / max(1, asked.tokens_in[came].sum()))
    return on_disk * float(seen.tokens_hit[done].sum() / max(1, asked.tokens_cached[done].sum()))
