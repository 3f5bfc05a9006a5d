"""Files of `hadal simulate`: a study as TOML; the result as JSON, HTML and a trace."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hadal.core.config import read_toml, to_toml
from hadal.core.documents import converted, shown
from hadal.core.errors import ConfigError
from hadal.lab.perf.trace import steps_trace
from hadal.lab.sim.day.clock import hour_beijing
from hadal.lab.sim.day.study import Study
from hadal.lab.simulate.stages import Simulated

PRESETS = {Study().name: Study}
RESULT, REPORT, TRACE = "result.json", "report.html", "step.trace.json"


def read_study(preset: str, config: Path | None, changes: Mapping[str, Any]) -> Study:
    """Return the preset, overridden by the file, then by `changes`: field such as "cache.disk_pb"
    -> value, None for no change. Raises ConfigError for an unknown preset or field, or an
    impossible value.
    """
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r} is unknown; use one of {', '.join(PRESETS)}.")
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
    """Change fields of a table and its inner tables. Raises ConfigError for an unknown name, or for
    a value where a table is needed.
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
    """Return all fields of a study as TOML that --config reads."""
    heading = "A study for `hadal simulate --config`. Omitted settings have the values shown here."
    return to_toml(study, [heading], is_whole=True)


def hours_of(text: str) -> tuple[int, ...]:
    """Parse Beijing hours such as "0-5,14" to hours since noon; "" is none. Raises ConfigError."""
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, _, last = part.partition("-")
        try:
            wanted = range(int(first), int(last or first) + 1)
        except ValueError:
            wanted = range(0)
        if not wanted or wanted[0] < 0 or wanted[-1] > 23:
            raise ConfigError(f"--hours {text!r}: use hours from 0 to 23, such as 0-5,14.")
        found.update(wanted)
    if text and not found:
        raise ConfigError(
            f"--hours {text!r} names no hour; use hours from 0 to 23, such as 0-5,14."
        )
    return tuple(index for index in range(24) if hour_beijing(index) in found)


def write_result(folder: Path, found: dict[str, Any], simulated: Simulated) -> list[Path]:
    """Write result, report and, if a window ran, the trace of a step of the busiest window. Return
    the paths. Raises ConfigError if a file cannot be written.
    """
    # Imported here, because reading and rejecting a study needs no charts.
    from hadal.lab.simulate.page import report_html

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


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has none."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
