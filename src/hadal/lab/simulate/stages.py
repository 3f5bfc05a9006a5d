"""Stages of `hadal simulate`, spread over processes: independent measurements run in parallel.

    cache day -> load -> unit curves -> fluid day -> windows of the wanted hours
                              and the same for every alternative, without windows

Does not depend on options, files or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, replace
from typing import Any

from pebble import ProcessExpired

from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError, HadalError
from hadal.lab.sim.day.cache import CacheDay
from hadal.lab.sim.day.curves import (
    REQUESTS_PER_RANK,
    UnitCurves,
    batch_max,
    batch_within,
    decode_curve,
    decode_point,
    points_at,
    prefill_point,
)
from hadal.lab.sim.day.demand import DayDemand, cache_day, day_demand, generator, kv_length_about
from hadal.lab.sim.day.fluid_day import FluidResult, fluid_day
from hadal.lab.sim.day.hour_window import HourSetting, HourWindow, run_hour
from hadal.lab.sim.day.result import DayResult, day_result, result_json
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.what_ifs import same_cache, same_units
from hadal.lab.sim.expert_loads import ExpertRanks, expert_share
from hadal.lab.simulate.processes import processes

Advance = Callable[[str, float], None]
"""Progress callback: (current work in words, finished work in estimated seconds)."""
CACHE_S, LOAD_S, POINT_S, WINDOW_S = 30.0, 6.0, 8.0, 35.0
"""Estimated seconds of each part on one core, used only by the progress bar."""


@dataclass(frozen=True)
class SimulationPlan:
    """Study to simulate, with its windows and alternatives."""

    study: Study
    hours: tuple[int, ...]
    """Hours with a simulated window, counted since second 0."""
    alternatives: tuple[tuple[str, Study], ...]
    """(description, study) of each alternative."""
    num_jobs: int
    """Maximum number of processes at once."""

    @property
    def work_s(self) -> float:
        """Estimated seconds of all parts on one core."""
        num_points = len(REQUESTS_PER_RANK) + 1
        others = [study for _, study in self.alternatives]
        points = num_points * (1 + sum(not same_units(self.study, other) for other in others))
        caches = 1 + sum(not same_cache(self.study, other) for other in others)
        return LOAD_S + CACHE_S * caches + POINT_S * points + WINDOW_S * len(self.hours)


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation."""

    result: DayResult
    json: dict[str, Any]
    """Content of result.json, without the elapsed time."""


class Stages:
    """One running simulation."""

    def __init__(self, plan: SimulationPlan, pool: Executor, advance: Advance) -> None:
        self._plan = plan
        self._pool = pool
        self._advance = advance

    def run(self) -> Simulated:
        """Run all stages. Raises ConfigError for an impossible study."""
        plan, study = self._plan, self._plan.study
        self._advance("the cache's day", 0.0)
        caches = self._caches()
        self._advance("demand of the day", 0.0)
        load = day_demand(study, caches[0])
        experts = expert_ranks(study)
        self._advance("what units do", LOAD_S)
        points = self._points(study, experts, load, caches[0])
        other_experts = [expert_ranks(other) for _, other in plan.alternatives]
        other_points = [
            None if same_units(study, other) else self._other_points(other, ranks, load, caches[0])
            for (_, other), ranks in zip(plan.alternatives, other_experts, strict=True)
        ]
        curves = self._curves(study, load, points)
        fluid = fluid_day(study, curves, load)
        windows = self._windows(fluid, experts, caches[0])
        result = day_result(study, load, experts, curves, fluid, windows if plan.hours else ())
        found = result_json(result)
        found["what_ifs"] = [
            {"name": "as asked", **day_result(study, load, experts, curves, fluid, ()).flat()}
        ]
        number = 1
        for (name, other), ranks, pending in zip(
            plan.alternatives, other_experts, other_points, strict=True
        ):
            other_load = load
            if not same_cache(study, other):
                other_load, number = load.with_cache(caches[number]), number + 1
            found["what_ifs"].append(
                self._alternative(name, other, ranks, other_load, curves, pending)
            )
        return Simulated(result, found)

    def _caches(self) -> list[CacheDay | None]:
        """Run the cache days of the study, then of each alternative with another cache."""
        study = self._plan.study
        studies = [
            study,
            *(other for _, other in self._plan.alternatives if not same_cache(study, other)),
        ]
        pending = [
            self._pool.submit(cache_day, one) if one.cache.disk_pb else None for one in studies
        ]
        return [
            None if one is None else self._done(one, "the cache's day", CACHE_S) for one in pending
        ]

    def _points(
        self, study: Study, experts: dict[str, ExpertRanks], load: DayDemand, cache: CacheDay | None
    ) -> list[Future[Any]]:
        """Submit the measurement of a prefill unit, then those of decode points. Raises ConfigError
        if no decode batch meets the TPOT target.
        """
        figures = load.figures()
        placed = {role: ranks.imbalance for role, ranks in experts.items()}
        wanted = points_at(
            batch_max(study, figures), batch_within(study, placed[DECODE], figures.kv_length)
        )
        return [
            self._pool.submit(prefill_point, study, placed, figures, cache),
            *(self._pool.submit(decode_point, study, placed, figures, cache, at) for at in wanted),
        ]

    def _other_points(
        self, study: Study, experts: dict[str, ExpertRanks], load: DayDemand, cache: CacheDay | None
    ) -> list[Future[Any]]:
        """Submit an alternative's points; if it is impossible, a future raises ConfigError."""
        try:
            return self._points(study, experts, load, cache)
        except ConfigError as error:
            found: Future[Any] = Future()
            found.set_exception(error)
            return [found]

    def _curves(self, study: Study, load: DayDemand, points: Sequence[Future[Any]]) -> UnitCurves:
        computed_per_s, *decode = [self._done(point, "what units do", POINT_S) for point in points]
        figures = load.figures()
        return UnitCurves(
            decode_curve(decode),
            study.decode.ranks,
            computed_per_s,
            figures.hit_share,
            batch_max(study, figures),
        )

    def _windows(
        self, fluid: FluidResult, experts: dict[str, ExpertRanks], cache: CacheDay | None
    ) -> list[HourWindow | None]:
        plan, found = self._plan, list[HourWindow | None]([None] * 24)
        placed = {role: ranks.imbalance for role, ranks in experts.items()}
        settings = [
            HourSetting(
                index,
                fluid.middles[index].units,
                1.0 / fluid.middles[index].tokens_per_s_user,
                plan.study.window.first_token_s,
            )
            for index in plan.hours
        ]
        # Largest first, so that no long window is left to run alone at the end.
        settings.sort(key=lambda setting: -setting.units.decode)
        pending = {
            self._pool.submit(run_hour, plan.study, placed, setting, cache): setting
            for setting in settings
        }
        for num_done, future in enumerate(as_completed(pending), start=1):
            window = self._done(
                future, f"windows request by request: {num_done} of {len(pending)} hours", WINDOW_S
            )
            found[window.setting.index] = window
        return found

    def _alternative(
        self,
        name: str,
        study: Study,
        experts: dict[str, ExpertRanks],
        load: DayDemand,
        curves: UnitCurves,
        pending: Sequence[Future[Any]] | None,
    ) -> dict[str, Any]:
        self._advance(f"what if: {name}", 0.0)
        try:
            if pending is not None:
                curves = self._curves(study, load, pending)
            curves = replace(curves, hit_share=load.hit_share)
            result = day_result(study, load, experts, curves, fluid_day(study, curves, load), ())
        except (ConfigError, ValueError) as error:
            return {"name": f"{name}: {error}"}
        return {"name": name, **result.flat()}

    def _done(self, future: Future[Any], what: str, work_s: float) -> Any:
        found = future.result()
        self._advance(what, work_s)
        return found


def expert_ranks(study: Study) -> dict[str, ExpertRanks]:
    """Return role -> rank loads under the role's balancer. Equal seeds draw equal expert loads."""
    return {
        role: expert_share(
            study.units_of(role).expert_balance,
            role,
            study.units_of(role).ranks,
            study.units_of(role).redundant_experts,
            generator(study, "experts", number),
        )
        for number, role in enumerate((PREFILL, DECODE))
    }


def check_promise(study: Study) -> None:
    """Raise ConfigError if no decode batch meets the TPOT target by the step model. Takes a
    second; measurements would fail only after minutes.
    """
    batch_within(study, expert_ranks(study)[DECODE].imbalance, kv_length_about(study))


def simulate(plan: SimulationPlan, advance: Advance) -> Simulated:
    """Run a plan. Raises ConfigError for an impossible study, HadalError if a process died."""
    try:
        with processes(plan.num_jobs) as pool:
            return Stages(plan, pool, advance).run()
    except ProcessExpired as error:
        raise HadalError(
            "a process of the simulation was killed, probably because memory ran out: use"
            " --jobs 1, or a shorter --window."
        ) from error
