"""One hour of the day at full fleet size: every request is one, and the roles that serve decide
about all of them.

    settle | measured seconds |        what runs at the start is there already, as far as it would have come

The fleet is the one that the fluid day has at the middle of the hour. A value goes in and a value
comes out, so that hours can be looked at in other processes. Knows no fleet and no other hour.
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
