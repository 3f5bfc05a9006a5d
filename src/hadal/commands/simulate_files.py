"""What `hadal simulate` reads and writes: a study as TOML, the result as JSON, HTML and a trace."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hadal.commands.day_html import report_html
from hadal.commands.simulate_run import Plan, Simulated, check_promise, simulate
from hadal.commands.simulate_table import show
from hadal.core.config_text import to_toml
from hadal.core.errors import ConfigError
from hadal.core.tables import build, read_toml
from hadal.progress import Bar
from hadal.sim.load_clock import hour_beijing
from hadal.sim.step_trace import steps_trace
from hadal.sim.study import Study
from hadal.sim.what_ifs import what_ifs

PRESETS = {Study().name: Study}
RESULT, REPORT, TRACE = "result.json", "report.html", "step.trace.json"


@dataclass(frozen=True)
class Asked:
    """The options of `hadal simulate`."""

    study: Study
    out: Path
    hours: str
    """In Beijing; empty: none."""
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
    fields = read_toml(config, "study") if config else {}
    for path, value in changes.items():
        if value is not None:
            *tables, name = path.split(".")
            table = fields
            for one in tables:
                table = table.setdefault(one, {})
                if not isinstance(table, dict):
                    raise ConfigError(f"{config}: {one} must be a table.")
            table[name] = value
    where = str(config) if config else "options"
    try:
        return build(Study, fields, where, PRESETS[preset]())
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


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


def run(asked: Asked) -> None:
    """Simulate, print, write. Raises ConfigError and HadalError, one line that says what to do."""
    plan = Plan(
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
    console.print(f"Took {found['seconds']:,.0f} s. Written: {names}", soft_wrap=True)


def _with_progress(plan: Plan) -> Simulated:
    with Bar("hadal simulate", plan.work_s) as bar:
        return simulate(plan, lambda what, work_s: bar.update(what, advance=work_s))


def _write(folder: Path, found: dict[str, Any], simulated: Simulated) -> list[Path]:
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
