"""A study small enough for a test: units of 8 and 16 H200, some dozens of requests per second.

Values that take more than a moment are made once, for all tests of a run, and never changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hadal.core.config import DECODE, PREFILL
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.day.cache import CacheDay
from hadal.lab.sim.day.curves import (
    UnitCurves,
    batch_max,
    decode_curve,
    decode_point,
    prefill_point,
)
from hadal.lab.sim.day.demand import DayDemand, cache_day, day_demand
from hadal.lab.sim.day.fluid_day import FluidResult, fluid_day
from hadal.lab.sim.day.hour_window import HourSetting, HourWindow, run_hour
from hadal.lab.sim.day.study import CacheStudy, FleetStudy, Study, UnitsStudy, WindowStudy
from hadal.lab.sim.sessions import LogNormal, WorkloadParams

PLACED = {PREFILL: 1.0, DECODE: 1.0}
LOOKED_AT = 8
"""Hour of the window: 20:00 in Beijing."""


WORKLOAD = WorkloadParams(
    sessions_per_day=4e6,
    document_share=0.02,
    document=LogNormal(3_000, 0.5, 6_000),
    output_v3=LogNormal(350, 0.5, 2_048),
    output_r1=LogNormal(600, 0.5, 2_048),
)
"""Workload with few long texts, so that seconds represent hours; it needs a few units of each role."""


def small(**changes: Any) -> Study:
    """Return the small study, with these fields changed."""
    study = Study(
        name="small",
        hardware="h200",
        gpu_hour_usd=2.5,
        chunk_tokens=4096,
        prefill=UnitsStudy(8, 0, 16, bundle=0, extra=0, units_min=1, units_max=40, use=0.6),
        decode=UnitsStudy(16, 0, 32, bundle=0, extra=0, units_min=1, units_max=40, use=0.8),
        workload=WORKLOAD,
        cache=CacheStudy(disk_pb=0.1, sample=5000.0),
        fleet=FleetStudy(noise=0.0),
        window=WindowStudy(
            seconds=2.0, prefill_seconds=4.0, settle_s=2.0, first_token_s=0.3, back_s=3600.0
        ),
    )
    return replace(study, **changes)


@cache
def cached_day() -> CacheDay:
    return cache_day(small())


@cache
def load() -> DayDemand:
    return day_demand(small(), cached_day(), 10)


@cache
def curves() -> UnitCurves:
    """Return the small study's unit curves, with decode measured at 6, 14 and 24 requests per rank."""
    study, figures = small(), load().figures()
    points = [decode_point(study, PLACED, figures, cached_day(), at) for at in (6.0, 14.0, 24.0)]
    return UnitCurves(
        decode_curve(points),
        study.decode.ranks,
        prefill_point(study, PLACED, figures, cached_day()),
        figures.hit_share,
        batch_max(study, figures),
    )


@cache
def fluid() -> FluidResult:
    return fluid_day(small(), curves(), load())


def setting(index: int = LOOKED_AT) -> HourSetting:
    middle = fluid().middles[index]
    return HourSetting(
        index, middle.units, 1.0 / middle.tokens_per_s_user, small().window.first_token_s
    )


@cache
def looked() -> HourWindow:
    return run_hour(small(), PLACED, setting(), cached_day())


def model(role: str) -> StepModel:
    return small().step_model(role, 1.0)
