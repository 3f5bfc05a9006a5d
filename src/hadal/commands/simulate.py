"""The stages of `hadal simulate`, spread over processes: what can be measured apart is measured at
once.

cache day -> load -> unit curves -> fluid day -> 24 windows
                          and the same for every alternative, without windows
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from pebble import ProcessExpired
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hadal.commands.processes import processes
from hadal.core.config import DECODE, PREFILL, read_toml, to_toml
from hadal.core.documents import converted, shown
from hadal.core.errors import ConfigError, HadalError
from hadal.perf.explain import steps_trace
from hadal.progress import Bar
from hadal.sim.day.cache import CacheDay
from hadal.sim.day.clock import hour_beijing
from hadal.sim.day.curves import (
    REQUESTS_PER_RANK,
    FluidResult,
    HourSetting,
    HourWindow,
    UnitCurves,
    batch_max,
    batch_within,
    decode_curve,
    decode_point,
    fluid_day,
    points_at,
    prefill_point,
    run_hour,
)
from hadal.sim.day.demand import DayDemand, cache_day, day_demand, generator, kv_length_about
from hadal.sim.day.result import DayResult, day_result, result_json
from hadal.sim.day.study import Study, same_cache, same_units, what_ifs
from hadal.sim.expert_loads import ExpertRanks, expert_share

# The tables that `hadal simulate` prints: the published figures beside ours, the hours, the
# alternatives.


ROWS = (
    ("nodes, mean", "nodes_mean", 1.0, ",.2f"),
    ("nodes, peak", "nodes_peak", 1.0, ",.0f"),
    ("tokens in, 10^9", "tokens_in", 1e9, ",.1f"),
    ("of them found in the cache, %", "hit_percent", 1.0, ".1f"),
    ("tokens out, 10^9", "tokens_out", 1e9, ",.1f"),
    ("tokens/s for a user", "tokens_per_s_user", 1.0, ".1f"),
    ("KV length, mean", "kv_length_mean", 1.0, ",.0f"),
    ("tokens/s in, a prefill node", "prefill_tokens_per_s_node", 1.0, ",.0f"),
    ("tokens/s out, a decode node", "decode_tokens_per_s_node", 1.0, ",.0f"),
    ("cost, $", "cost_usd", 1.0, ",.0f"),
    ("income, $", "income_usd", 1.0, ",.0f"),
    ("margin on cost, %", "margin_percent", 1.0, ",.0f"),
)
"""Label, key, divisor, format."""
HOURS = (
    "hour",
    "nodes",
    "in, 10^9",
    "out, 10^9",
    "hit",
    "income, $",
    "tokens/s/user",
    "batch a GPU",
    "prefill use",
    "TTFT p50, p99",
    "units P + D",
)


def show(console: Console, result: dict[str, Any]) -> None:
    """Print all of them."""
    console.print(day_table(result))
    for part in hours_tables(result, console.width):
        console.print(part)
    if len(result.get("what_ifs", ())) > 1:
        console.print(alternatives_table(result))
    for note in result["notes"]:
        console.print(f"[yellow]note[/yellow] {note}")


def day_table(result: dict[str, Any]) -> Table:
    """What was published, where something was, beside what came out."""
    published = result["published"]
    table = _table(f"{result['study']['name']} on {result['study']['hardware'].upper()}")
    table.add_column("")
    for name in ("published", "simulated", "difference") if published else ("simulated",):
        table.add_column(name, justify="right")
    for label, key, by, form in ROWS:
        value = result[key]
        ours = "-" if value is None else format(value / by, form)
        if not published:
            table.add_row(label, ours)
            continue
        stated = published[key]
        if isinstance(stated, list):
            shown, within = (
                f"{stated[0]:g} to {stated[1]:g}",
                value is not None and stated[0] <= value <= stated[1],
            )
            table.add_row(label, shown, ours, "within" if within else "outside")
        else:
            difference = "-" if value is None else f"{value / stated - 1:+.1%}"
            table.add_row(label, format(stated / by, form), ours, difference)
    return table


def hours_tables(result: dict[str, Any], width: int | None) -> list[Table]:
    """Hour by hour: the fleet as a fluid, and beside it what a window of single requests showed.
    In as many parts as a terminal of `width` columns needs, each with the hours; None: in one.
    """
    rows = [_hour_cells(hour) for hour in result["hours"]]
    wide = [max(len(name), *(len(row[at]) for row in rows)) + 2 for at, name in enumerate(HOURS)]
    parts: list[list[int]] = [[]]
    for at in range(1, len(HOURS)):
        if (
            parts[-1]
            and width is not None
            and wide[0] + sum(wide[one] for one in [*parts[-1], at]) > width
        ):
            parts.append([])
        parts[-1].append(at)
    tables = []
    for columns in ([0, *part] for part in parts):
        table = _table("Hour by hour (Beijing); fluid | window")
        for at in columns:
            table.add_column(HOURS[at], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[at] for at in columns))
        tables.append(table)
    return tables


def _hour_cells(hour: dict[str, Any]) -> tuple[str, ...]:
    """The cells of an hour's row, in the order of HOURS."""
    fluid, window = hour["fluid"], hour["window"]

    def both(key: str, form: str) -> str:
        left = format(fluid[key], form)
        return (
            f"{left} | {format(window[key], form)}" if window and window[key] is not None else left
        )

    ttft, units = "", ""
    if window:
        units = f"{window['prefill_units']} + {window['decode_units']}"
        if window["ttft_s"]["p50"] is not None:
            ttft = f"{window['ttft_s']['p50']:.1f}, {window['ttft_s']['p99']:.1f} s"
    return (
        f"{hour['hour_beijing']:02}:00",
        f"{hour['nodes_mean']:.0f}",
        f"{hour['tokens_in'] / 1e9:.2f}",
        f"{hour['tokens_out'] / 1e9:.2f}",
        _percent(hour),
        f"{hour['income_usd']:,.0f}",
        both("tokens_per_s_user", ".1f"),
        both("requests_per_rank", ".0f"),
        both("prefill_use", ".0%"),
        ttft,
        units,
    )


def alternatives_table(result: dict[str, Any]) -> Table:
    """One thing changed at a time."""
    table = _table("What if (the fleet as a fluid)")
    table.add_column("", min_width=14, max_width=44)
    for name in ("nodes,\nmean", "peak", "cost, $", "income, $", "margin", "hit", "tok/s\n/user"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["what_ifs"]:
        if row.get("nodes_mean") is None:
            table.add_row(row["name"])
            continue
        table.add_row(
            row["name"],
            f"{row['nodes_mean']:,.1f}",
            f"{row['nodes_peak']:,.0f}",
            f"{row['cost_usd']:,.0f}",
            f"{row['income_usd']:,.0f}",
            f"{row['margin_percent'] or 0:,.0f} %",
            f"{row['hit_percent'] or 0:.1f} %",
            f"{row['tokens_per_s_user'] or 0:.1f}",
        )
    return table


def _percent(hour: dict[str, Any]) -> str:
    """Percent of an hour's prompt tokens that the cache had."""
    return f"{100 * hour['tokens_hit'] / hour['tokens_in']:.1f} %" if hour["tokens_in"] else "-"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_edge=False,
    )


Advance = Callable[[str, float], None]
"""(what is being done now, seconds' worth of work that was done)"""
CACHE_S, LOAD_S, POINT_S, WINDOW_S = 30.0, 6.0, 8.0, 35.0
"""About what a part takes on a core: for the progress bar alone."""


@dataclass(frozen=True)
class SimulationPlan:
    """What to simulate."""

    study: Study
    hours: tuple[int, ...]
    """Hours since second 0 of which a window is simulated."""
    alternatives: tuple[tuple[str, Study], ...]
    num_jobs: int

    @property
    def work_s(self) -> float:
        """About what it takes on a core."""
        num_points = len(REQUESTS_PER_RANK) + 1
        others = [study for _, study in self.alternatives]
        points = num_points * (1 + sum(not same_units(self.study, other) for other in others))
        caches = 1 + sum(not same_cache(self.study, other) for other in others)
        return LOAD_S + CACHE_S * caches + POINT_S * points + WINDOW_S * len(self.hours)


@dataclass(frozen=True)
class Simulated:
    """What came of it."""

    result: DayResult
    json: dict[str, Any]
    """What result.json holds, but for the time it took."""


class Stages:
    """One simulation at work."""

    def __init__(self, plan: SimulationPlan, pool: Executor, advance: Advance) -> None:
        self._plan = plan
        self._pool = pool
        self._advance = advance

    def run(self) -> Simulated:
        """All stages. Raises ConfigError for a study that cannot be."""
        plan, study = self._plan, self._plan.study
        self._advance("the cache's day", 0.0)
        caches = self._caches()
        self._advance("what the day asks for", 0.0)
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
        """The cache days: the study's, then that of each alternative that has another."""
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
        """A prefill unit's point, then a decode unit's. Raises ConfigError if no batch of it keeps
        the promise.
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
        """Submit an alternative; what cannot be is said where its points are asked for."""
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
        # The largest first: none of them is the last that all wait for.
        settings.sort(key=lambda setting: -setting.units.decode)
        pending = {
            self._pool.submit(run_hour, plan.study, placed, setting, cache): setting
            for setting in settings
        }
        for num_done, future in enumerate(as_completed(pending), start=1):
            window = self._done(
                future, f"every request of an hour: {num_done} of {len(pending)} hours", WINDOW_S
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
    """What each role's expert balancer leaves; the same loads whatever the study's policy."""
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
    """Raise ConfigError for a TPOT that no decode unit keeps as its steps are priced: in a second,
    before minutes of measuring would say so.
    """
    batch_within(study, expert_ranks(study)[DECODE].imbalance, kv_length_about(study))


def simulate(plan: SimulationPlan, advance: Advance) -> Simulated:
    """Run it all. Raises ConfigError for a study that cannot be, HadalError if a process died."""
    try:
        with processes(plan.num_jobs) as pool:
            return Stages(plan, pool, advance).run()
    except ProcessExpired as error:
        raise HadalError(
            "a process of the simulation was ended, most likely for want of memory: try --jobs 1,"
            " or a shorter --window."
        ) from error


# What `hadal simulate` reads and writes: a study as TOML, the result as JSON, HTML and a trace.


PRESETS = {Study().name: Study}
RESULT, REPORT, TRACE = "result.json", "report.html", "step.trace.json"


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `hadal simulate`."""

    study: Study
    out: Path
    hours: str
    """Hours in Beijing whose windows are simulated; empty: none."""
    has_what_ifs: bool
    num_jobs: int
    """0: as many as there are cores."""
    as_json: bool


def read_study(preset: str, config: Path | None, changes: Mapping[str, Any]) -> Study:
    """The preset, what the file says, then `changes`: by field, such as "cache.disk_pb"; None is
    none.

    Raises ConfigError.
    """
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r} is unknown; known are {', '.join(PRESETS)}.")
    where = str(config) if config else "options"
    fields = msgspec.to_builtins(PRESETS[preset]())
    _put(fields, read_toml(config, "study") if config else {}, where)
    for path, value in changes.items():
        if value is not None:
            *tables, name = path.split(".")
            _put(
                fields,
                functools.reduce(lambda inner, one: {one: inner}, tables, {name: value}),
                where,
            )
    return converted(fields, Study, where)


def _put(table: dict[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """Change fields of a table, and of the tables in it. Raises ConfigError for a name that it has
    not.
    """
    for name, value in changes.items():
        if name not in table:
            known = ", ".join(table)
            raise ConfigError(f"{where}: unknown field {shown(name)}. Known: {known}.")
        if not isinstance(table[name], dict):
            table[name] = value
        elif isinstance(value, dict):
            _put(table[name], value, f"{where}: {name}")
        else:
            raise ConfigError(f"{where}: {name} must be a table.")


def study_toml(study: Study) -> str:
    """All of a study, as --config reads it."""
    heading = "A study for `hadal simulate --config`. What is left out stays as it is here."
    return to_toml(study, [heading], is_whole=True)


def hours_of(text: str) -> tuple[int, ...]:
    """ "0-5,14" in Beijing as hours since second 0, noon; "": none. Raises ConfigError."""
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, _, last = part.partition("-")
        try:
            wanted = range(int(first), int(last or first) + 1)
        except ValueError:
            wanted = range(0)
        if not wanted or wanted[0] < 0 or wanted[-1] > 23:
            raise ConfigError(f"--hours {text!r}: hours are 0 to 23, such as 0-5,14.")
        found.update(wanted)
    if text and not found:
        raise ConfigError(f"--hours {text!r}: no hour is named; hours are 0 to 23, such as 0-5,14.")
    return tuple(index for index in range(24) if hour_beijing(index) in found)


def run(asked: SimulateOptions) -> None:
    """Simulate, print, write. Raises ConfigError and HadalError, one line that says what to do."""
    plan = SimulationPlan(
        asked.study,
        hours_of(asked.hours),
        tuple(what_ifs(asked.study)) if asked.has_what_ifs else (),
        asked.num_jobs or os.cpu_count() or 1,
    )
    check_promise(plan.study)
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {asked.out} cannot be made: {(error.strerror or '').lower()}."
        ) from error
    began_s = time.monotonic()
    simulated = _with_progress(plan)
    found = {**_finite(simulated.json), "seconds": round(time.monotonic() - began_s, 1)}
    written = _write(asked.out, found, simulated)
    if asked.as_json:
        print(json.dumps(found))
        return
    console = Console()
    show(console, found)
    names = ", ".join(str(path) for path in written)
    console.print(f"Took {found['seconds']:,.0f} s. Written: {names}", soft_wrap=True, markup=False)


def _with_progress(plan: SimulationPlan) -> Simulated:
    with Bar("hadal simulate", plan.work_s) as bar:
        return simulate(plan, lambda what, work_s: bar.update(what, advance=work_s))


def _write(folder: Path, found: dict[str, Any], simulated: Simulated) -> list[Path]:
    # Not at the top: each process of a window or a curve loads this module, and draws nothing.
    from hadal.commands.day_page import report_html

    texts = {RESULT: json.dumps(found, indent=1), REPORT: report_html(found)}
    busiest = max(
        (window for window in simulated.result.windows if window is not None),
        key=lambda window: window.reading.decode.requests_per_rank,
        default=None,
    )
    if busiest is not None and busiest.steps:
        unit, price = busiest.steps.get("decode") or next(iter(busiest.steps.values()))
        texts[TRACE] = json.dumps(steps_trace(unit, [(0.0, price)]))
    paths = []
    for name, text in texts.items():
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {(error.strerror or '').lower()}."
            ) from error
        paths.append(path)
    return paths


def _finite(value: Any) -> Any:
    """JSON has no infinite numbers: null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
