"""Run of `hadal simulate`: passes a study through the stages, prints and writes the result."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hadal.core.errors import ConfigError
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.what_ifs import what_ifs
from hadal.lab.simulate.files import finite, hours_of, write_result
from hadal.lab.simulate.stages import Simulated, SimulationPlan, check_promise, simulate
from hadal.lab.simulate.tables import show
from hadal.progress import Bar


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `hadal simulate`."""

    study: Study
    out: Path
    hours: str
    """Hours in Beijing with a simulated window; empty: none."""
    has_what_ifs: bool
    num_jobs: int
    """Number of processes. 0: one per core."""
    as_json: bool


def run(asked: SimulateOptions) -> None:
    """Simulate, print and write. Raises ConfigError or HadalError that says what to change."""
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
            f"--out {asked.out} cannot be created: {(error.strerror or '').lower()}."
        ) from error
    began_s = time.monotonic()
    simulated = _with_progress(plan)
    found = {**finite(simulated.json), "seconds": round(time.monotonic() - began_s, 1)}
    written = write_result(asked.out, found, simulated)
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
